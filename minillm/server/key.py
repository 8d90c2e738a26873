"""Callers without the key are turned away at the door, before anything of their request is read."""

from __future__ import annotations

import hmac

from starlette.responses import JSONResponse

from minillm.server.answers import error_body


class KeyCheck:
    """Answers 401 to paths under /v1 unless they bring `Authorization: Bearer <key>`; compared in constant time."""

    def __init__(self, app, key: str):
        self.app, self.wanted = app, b"Bearer " + key.encode()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.wanted):
                message = "this server wants a key: Authorization: Bearer <key>"
                body = error_body(message, "authentication_error", "invalid_api_key")
                return await JSONResponse(body, 401, {"www-authenticate": "Bearer"})(scope, receive, send)
        await self.app(scope, receive, send)
