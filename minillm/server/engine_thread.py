"""One thread that drives the engine, and the way to it from an event loop.

The event loop never touches the engine: it posts commands (add, abort) and reads what comes of a call from the
call's own queue. The thread takes all commands between two steps, so an abort frees its blocks before the next
forward pass. Nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable

from minillm.engine import Engine
from minillm.errors import EngineClosedError, MinillmError, RankError, StepError
from minillm.outputs import RequestOutput, StreamChunk
from minillm.request import Request

logger = logging.getLogger(__name__)


class Call:
    """The requests that one client waits for together, and what has come of them so far."""

    def __init__(self, requests: list[Request]):
        self.requests = requests
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events: asyncio.Queue[StreamChunk | Exception] = asyncio.Queue()

    async def chunks(self, timeout_s: float | None = None) -> AsyncIterator[StreamChunk]:
        """Everything the engine adds to these requests, until each has its whole output.

        Raises what ended one of them, and TimeoutError when all together takes longer than `timeout_s`.
        """
        clock = asyncio.get_running_loop().time
        deadline = None if timeout_s is None else clock() + timeout_s
        missing = len(self.requests)
        while missing:
            event = await asyncio.wait_for(self.events.get(), None if deadline is None else deadline - clock())
            if isinstance(event, Exception):
                raise event
            missing -= event.output is not None
            yield event

    def accept(self, error: Exception | None) -> None:
        if self.accepted.done():  # whoever waited for it was cancelled
            return
        if error is None:
            self.accepted.set_result(None)
        else:
            self.accepted.set_exception(error)


class EngineThread:
    """Runs `engine` until `stop`. Made and used inside one running event loop.

    on_finish  called in the engine's thread with every RequestOutput, also of requests that were cut off
    """

    def __init__(self, engine: Engine, on_finish: Callable[[RequestOutput], None] = lambda output: None):
        self.engine = engine
        self.on_finish = on_finish
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._calls: dict[str, Call] = {}  # by request id; only the engine's thread uses it
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # ---- the event loop's side ---------------------------------------------------------------

    async def submit(self, requests: list[Request]) -> Call:
        """Queue all of these requests, or none. Raises what `Engine.add` raises.

        Whoever submits a call ends it with `abort`, whether it is finished or not.
        """
        call = Call(requests)
        self._commands.put(lambda: self._add(call))
        if not self.alive:
            self._refuse_commands()
        try:
            await call.accepted
        except BaseException:  # refused, or the caller was cancelled while the command lay in the queue
            self.abort(call)
            raise
        return call

    def abort(self, call: Call) -> None:
        """Let go of a call: what still runs of it loses its blocks before the next step."""
        self._commands.put(lambda: self._abort(call))

    def stop(self) -> None:
        """End the thread after the step it is in, and everything that still runs with it. Blocks until then."""
        self._commands.put(None)
        self._thread.join()

    # ---- the engine's thread -----------------------------------------------------------------

    def _run(self) -> None:
        error: MinillmError = EngineClosedError("the server is shutting down; try another one")
        try:
            while self._obey():
                self._step()
        except Exception as bug:  # not a failed step, which `_step` handles: nobody may wait for ever
            logger.exception("the engine's thread failed")
            error = StepError(f"the engine's thread failed and takes no more requests: {bug!r}")
        for request_id, call in list(self._calls.items()):
            self._cut_off(request_id)
            self._tell(call.events.put_nowait, error)
        self._refuse_commands()

    def _obey(self) -> bool:
        """Do what was posted, and wait for a command while the engine has nothing to compute. False: stop.

        A policy may have a use for idle time; then its next step is taken in place of waiting.
        """
        engine = self.engine
        while True:
            try:
                command = self._commands.get(block=not (engine.has_work or engine.scheduler.has_idle_work))
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _refuse_commands(self) -> None:
        """After the end: engines that are closed refuse what is added, and have nothing to abort."""
        self.engine.close()
        while not self._commands.empty():
            if command := self._commands.get():
                command()

    def _add(self, call: Call) -> None:
        error = None
        for request in call.requests:
            try:
                self.engine.add(request)
            except MinillmError as refused:
                error = refused
                break
            self._calls[request.request_id] = call
        if error is not None:
            self._abort(call)
        self._tell(call.accept, error)

    def _abort(self, call: Call) -> None:
        for request in call.requests:
            if self._calls.get(request.request_id) is call:
                self._cut_off(request.request_id)

    def _cut_off(self, request_id: str) -> None:
        del self._calls[request_id]
        output = self.engine.abort(request_id)
        if output is not None:
            self.on_finish(output)

    def _step(self) -> None:
        try:
            chunks = self.engine.step()
        except RankError:
            raise  # no later step can succeed: the thread ends, and /health says so
        except MinillmError as error:
            logger.error("%s", error)
            for request_id in [name for name in self._calls if not self.engine.is_running(name)]:
                self._tell(self._calls.pop(request_id).events.put_nowait, error)
            return
        news = []
        for chunk in chunks:
            call = self._calls[chunk.request_id]
            if chunk.output is not None:
                del self._calls[chunk.request_id]
                self.on_finish(chunk.output)
            news.append((call, chunk))
        self._tell(_deliver, news)

    def _tell(self, function: Callable, argument) -> None:
        """Call a function in the event loop, which may be gone already."""
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            logger.debug("the event loop is closed; nobody hears of this")


def _deliver(news: list[tuple[Call, StreamChunk]]) -> None:
    for call, chunk in news:
        call.events.put_nowait(chunk)
