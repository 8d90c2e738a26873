"""The routes: OpenAI's /v1/models, /v1/completions and /v1/chat/completions, and /health and /metrics.

A route checks what it was sent, hands requests to the engine's thread and waits for what comes back; tokenising runs
in a worker thread. So the event loop never computes, and /health answers while the engine is at its limit. Every
error has OpenAI's form, and its status says whose fault it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from minillm.errors import ConfigError, EngineClosedError, MinillmError, PromptError
from minillm.llm import LLM
from minillm.outputs import RequestOutput, StreamChunk
from minillm.server import answers
from minillm.server.answers import ChatAnswer, CompletionAnswer
from minillm.server.body_limit import BodyLimit
from minillm.server.engine_thread import EngineThread
from minillm.server.invalid import describe
from minillm.server.key import KeyCheck
from minillm.server.metrics import Metrics
from minillm.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from minillm.server.streams import EventStream, server_sent_events

RETRY_AFTER_S = 1
CLIENT_LEFT = 499  # nginx's number; nobody reads it


@dataclass(frozen=True)
class ServerConfig:
    """Options of the server itself; those of the engine are EngineConfig's.

    api_key            callers of /v1 must bring it; None: nobody is asked
    request_timeout_s  a request that takes longer is cut off; None: never
    max_body_bytes     a longer request body is answered with 413
    """

    api_key: str | None = None
    request_timeout_s: float | None = None
    max_body_bytes: int = 4 * 2**20

    def __post_init__(self):
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("api_key is empty; give a key, or leave it out to ask for none")
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise ConfigError(f"request_timeout_s={self.request_timeout_s} must be more than 0; leave it out for none")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes={self.max_body_bytes} must be at least 1")


def make_app(llm: LLM, config: ServerConfig | None = None) -> FastAPI:
    """The ASGI application of one LLM, whose engine it drives while it runs and closes when it ends."""
    config = config or ServerConfig()
    server = Server(llm, config)
    about = {"title": "minillm", "description": "One engine behind the OpenAI API."}
    app = FastAPI(**about, lifespan=server.lifespan)
    app.state.server = server
    documented = {status: {"description": text} for status, text in REFUSED.items()}
    app.get("/health", responses={503: {"description": "the engine has stopped"}})(server.health)
    app.get("/metrics", response_class=Response)(server.metrics_text)
    app.get("/v1/models", responses={401: documented[401]})(server.models)
    app.post("/v1/completions", responses=documented)(server.completions)
    app.post("/v1/chat/completions", responses=documented)(server.chat_completions)

    app.add_exception_handler(MinillmError, failed)
    app.add_exception_handler(TimeoutError, failed)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, refused)
    app.add_middleware(BodyLimit, limit=config.max_body_bytes)
    if config.api_key is not None:
        app.add_middleware(KeyCheck, key=config.api_key)
    return app


REFUSED = {
    400: "what was sent is not valid",
    401: "the key is missing or wrong",
    404: "no such model",
    413: "the body is too long",
    429: "the queue is full; Retry-After says when to come again",
    500: "the step that computed this request failed",
    503: "the server is shutting down",
    504: "the request took longer than the server allows",
}


class Server:
    """One LLM, its engine's thread and its counters; the methods without underscore are routes."""

    def __init__(self, llm: LLM, config: ServerConfig):
        self.llm, self.config = llm, config
        self.engine = llm.engine
        self.metrics = Metrics(self.engine.scheduler)
        self.started = int(time.time())
        self.thread: EngineThread | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.thread = EngineThread(self.engine, self.metrics.finished)
        try:
            yield
        finally:
            await asyncio.to_thread(self.thread.stop)

    async def health(self):
        if not self.thread.alive:
            raise EngineClosedError("the engine has stopped; restart the server")
        return {"status": "ok"}

    async def metrics_text(self):
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self):
        card = {"id": self.llm.model_name, "object": "model", "created": self.started, "owned_by": "minillm"}
        return {"object": "list", "data": [{**card, "max_model_len": self.llm.max_model_len}]}

    async def completions(self, body: CompletionRequest, request: Request):
        params = body.sampling_params(self.llm.default_sampling_params)
        return await self._answer(body, request, CompletionAnswer(), body.prompts, params, chat=False)

    async def chat_completions(self, body: ChatRequest, request: Request):
        default = self.llm.default_sampling_params.updated(max_tokens=self.llm.max_model_len)
        params = body.sampling_params(default)
        prompt = self.llm.tokenizer.apply_chat_template([message.for_template() for message in body.messages])
        answer = ChatAnswer(self.llm.tokenizer.token_bytes, params.logprobs or 0)
        return await self._answer(body, request, answer, [prompt], params, chat=True)

    async def _answer(self, body: GenerationRequest, request: Request, answer, prompts, params, chat: bool):
        if body.model not in (None, self.llm.model_name):
            raise HTTPException(404, f"the model {body.model!r} is not here; this server has {self.llm.model_name!r}")
        name = f"{answer.prefix}-{uuid.uuid4().hex}"
        requests = await asyncio.to_thread(self._make_requests, name, prompts, params, chat)
        call = await self.thread.submit(requests)
        head = {"id": name, "created": int(time.time()), "model": self.llm.model_name}
        chunks = call.chunks(self.config.request_timeout_s)
        if body.stream:
            with_usage = bool(body.stream_options and body.stream_options.include_usage)
            events = server_sent_events(chunks, answer, head, requests, with_usage)
            return EventStream(events, on_end=lambda: self.thread.abort(call))
        try:
            outputs = await unless_disconnected(request, collect(chunks))
        finally:
            self.thread.abort(call)
        if outputs is None:
            return Response(status_code=CLIENT_LEFT)
        outputs = [outputs[r.request_id] for r in requests]
        completions = [completion for output in outputs for completion in output.outputs]
        return {
            **head,
            "object": answer.whole_object,
            "choices": [answer.whole(index, completion) for index, completion in enumerate(completions)],
            "usage": answers.usage(outputs),
            "metrics": answers.metrics(outputs),
        }

    def _make_requests(self, name: str, prompts, params, chat: bool):
        """Tokenise and check all prompts, in a worker thread. Raises PromptError."""
        room = self.engine.scheduler.max_queued_requests
        if room is not None and len(prompts) > room:  # not a 429: it would be refused each time it came again
            raise PromptError(f"{len(prompts)} prompts in one request, and max_queued_requests={room}; send fewer")
        requests = []
        for index, prompt in enumerate(prompts):
            requests.append(self.engine.make_request(prompt, params, f"{name}-{index}", chat=chat))
            self.engine.scheduler.check(requests[-1])
        return requests


async def collect(chunks: AsyncIterator[StreamChunk]) -> dict[str, RequestOutput]:
    return {chunk.request_id: chunk.output async for chunk in chunks if chunk.output is not None}


async def unless_disconnected(request: Request, work: Coroutine):
    """The result of `work`, or None if the client leaves first; then the work is cancelled."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(disconnected(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ---- errors in OpenAI's form -----------------------------------------------------------------------


async def failed(request: Request, error: Exception) -> JSONResponse:
    status, body = answers.failure(error)
    if status == 429:
        request.app.state.server.metrics.refused.inc()
    return JSONResponse(body, status, {"retry-after": str(RETRY_AFTER_S)} if status in (429, 503) else None)


async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    """The first thing that is wrong with a body, named by its path."""
    message, path = describe(error.errors())
    return JSONResponse(answers.error_body(message, "invalid_request_error", param=path), 400)


async def refused(request: Request, error: HTTPException) -> JSONResponse:
    message, code = str(error.detail), None
    if error.status_code == 404 and request.method == "POST":
        code = "model_not_found"
    body = answers.error_body(message, "invalid_request_error", code)
    return JSONResponse(body, error.status_code, error.headers)
