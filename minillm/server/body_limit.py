"""A body that is too long is turned away, at once if its length is announced, else when it gets there.

FastAPI has a limit of its own, but answers an announced length in plain text; a client of ours reads OpenAI's form.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from minillm.server.answers import error_body


class BodyLimit:
    """Answers 413 to a body of more than `limit` bytes; no more than that is read of it."""

    def __init__(self, app, limit: int):
        self.app, self.limit = app, limit

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")  # digits alone: the HTTP parser saw to it
        if int(announced) > self.limit:
            return await JSONResponse(error_body(self.message, "invalid_request_error"), 413)(scope, receive, send)
        read = 0

        async def counted() -> dict:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limit:
                raise HTTPException(413, self.message)
            return message

        await self.app(scope, counted, send)

    @property
    def message(self) -> str:
        return f"the body is longer than {self.limit:,} bytes; shorten it, or start the server with --max-body-bytes"
