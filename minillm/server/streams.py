"""Tokens to server-sent events: one `data:` line for every piece of text, `data: [DONE]` at the end.

The status line is long gone when a step fails or time runs out, so an error becomes an event of its own; then the
stream ends without [DONE].
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable

from starlette.responses import StreamingResponse

from minillm.errors import MinillmError
from minillm.outputs import StreamChunk
from minillm.request import Request
from minillm.server import answers


class EventStream(StreamingResponse):
    """A stream that calls `on_end` when it is over: at its end, after an error, or when the client has left."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self.on_end = on_end

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.on_end()


async def server_sent_events(
    chunks: AsyncIterator[StreamChunk], answer, head: dict, requests: list[Request], with_usage: bool
) -> AsyncIterator[str]:
    """The events of one call. `head` stands in each of them: id, created, model.

    with_usage  one more event before the end, without choices, with the counts of the whole call
    """
    head = {**head, "object": answer.piece_object}
    first_choice = {}  # of each request; its n completions follow one another
    for request in requests:
        first_choice[request.request_id] = sum(r.params.n for r in requests[: len(first_choice)])
    opened: set[int] = set()
    offsets: dict[int, int] = {}  # characters of each choice so far, as its tokens spell them
    outputs = {}
    try:
        async for chunk in chunks:
            index = first_choice[chunk.request_id] + chunk.index
            if index not in opened and (opening := answer.opening(index)):
                yield event({**head, "choices": [opening]})
            opened.add(index)
            if chunk.output is not None:
                outputs[chunk.request_id] = chunk.output
            if chunk.text or chunk.logprobs or chunk.finished:
                choice = answer.piece(index, chunk, offsets.get(index, 0))
                offsets[index] = offsets.get(index, 0) + answers.num_characters(chunk)
                yield event({**head, "choices": [choice]})
        if with_usage:
            whole = [outputs[r.request_id] for r in requests]
            yield event({**head, "choices": [], "usage": answers.usage(whole), "metrics": answers.metrics(whole)})
        yield "data: [DONE]\n\n"
    except (MinillmError, TimeoutError) as error:
        yield event(answers.failure(error)[1])


def event(data: dict) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
