"""The grader's end of a learner's process: starts it, asks, waits no longer than allowed, and starts it again.

The socket to the process is not its standard output, and each answer has to repeat a word drawn for its question, so
nothing that learner code prints or sends ahead counts as an answer. What comes back is data, whatever was written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from minillm.course.grader import wire
from minillm.course.grader.cells import Cell
from minillm.course.grader.limits import TASK_SECONDS, environment
from minillm.course.grader.marks import Failure, shorten
from minillm.course.grader.task import Case, Task
from minillm.errors import GradeError

SOURCE = Path(__file__).resolve().parents[3]
START_SECONDS = 120.0
OUTPUT_BYTES = 2_000


class ProcessEnded(Exception):
    """The learner's process is gone; the message says why, as the end of a sentence that begins with "it"."""


class Child:
    """One process with the checks of an exercise loaded. Use as a context manager, or call close().

    Raises GradeError when it does not come up: then the machine is at fault, not the learner.
    """

    def __init__(self, exercise: str, package: str, source: Path = SOURCE, interpret: bool = True):
        self._folder = tempfile.TemporaryDirectory(prefix="minillm-grade-", ignore_cleanup_errors=True)
        home = Path(self._folder.name)
        self._output = tempfile.TemporaryFile()
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-m", "minillm.course.grader.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                cwd=home,
                env=environment(home, source, interpret),
                start_new_session=True,
            )
        try:
            self.network = self.ask({"exercise": exercise, "package": package}, START_SECONDS)["network"]
        except ProcessEnded as error:
            raise GradeError(f"the grading process did not start, {error}: {self.output() or 'no output'}") from error

    def ask(self, question: dict, seconds: float) -> dict:
        """The answer to one question. Raises ProcessEnded, with the process gone, when there is none."""
        token = secrets.token_hex(8)
        try:
            wire.send(self._channel, {**question, "token": token}, seconds)
            answer = wire.receive(self._channel, seconds)
            if not isinstance(answer, dict) or answer.get("token") != token:
                raise wire.WireError("an answer that belongs to no question")
            return answer
        except TimeoutError:
            why = f"did not end within {seconds:.0f} s"
        except EOFError:
            why = f"ended its process ({self._exit()})"
        except wire.WireError as error:
            why = f"sent no valid answer ({error})"
        self.stop()
        raise ProcessEnded(why)

    def output(self) -> str:
        """The end of what the process printed, for a person to read."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - OUTPUT_BYTES))
        return self._output.read().decode("utf-8", "replace")

    def stop(self) -> None:
        """End the process, what it started, and all of its session."""
        for process in self._descendants():
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self.stop()
        self._channel.close()
        self._output.close()
        self._folder.cleanup()

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _exit(self) -> str:
        try:
            code = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return "it closed the connection"
        return f"exit status {code}" if 0 <= code < 128 else f"signal {-code if code < 0 else code - 128}"


class Learner:
    """The cells of one notebook, run in a process that is started again without the cell or call that ended it.

    Kernel tasks have a second one, in which Triton compiles; it starts with the first of them.
    """

    def __init__(
        self,
        exercise: str,
        package: str,
        source: Path = SOURCE,
        seconds: float = TASK_SECONDS,
        interpret: bool = True,
    ):
        self.network = ""
        self.printed = ""
        self._start = lambda: Child(exercise, package, source, interpret)
        self._make_compiler = lambda: Learner(exercise, package, source, seconds, interpret=False)
        self._seconds = seconds
        self._child: Child | None = None
        self._compiler: Learner | None = None
        self._ran: list[Cell] = []

    def __enter__(self) -> Learner:
        self.network = self._running().network
        return self

    def __exit__(self, *exc) -> None:
        self._drop()
        if self._compiler is not None:
            self._compiler._drop()

    def run(self, cell: Cell, seconds: float) -> str:
        """Run a cell's definitions; "" or what went wrong."""
        try:
            error = _text(self._running().ask(_run(cell), seconds).get("error", ""))
        except ProcessEnded as ended:
            self._drop()
            return f"the cell {ended}"
        self._ran.append(cell)
        return error

    def drive(self, task: Task, case: Case, seconds: float, do: str = "drive") -> object:
        """What the task's object made of a case: a record, not yet looked at, or a Failure.

        Raises ProcessEnded when the call ended the process or took more than `seconds`.
        """
        try:
            answer = self._running().ask({"do": do, "task": task.id, "case": case}, seconds)
        except ProcessEnded:
            self._drop()
            raise
        if "error" in answer:
            return Failure(_text(answer["error"]), answer.get("unsolved") is True)
        return answer.get("record")

    def compile(self, task: Task, case: Case, seconds: float) -> object:
        """What the compiler made of the kernels that the task's launcher launches for a case; else as `drive`."""
        if self._compiler is None:
            self._compiler = self._make_compiler()
        self._compiler._follow(self._ran)
        return self._compiler.drive(task, case, seconds, do="compile")

    def _follow(self, cells: list[Cell]) -> None:
        for cell in cells:
            if cell not in self._ran:
                self.run(cell, self._seconds)

    def _running(self) -> Child:
        """The process, with every cell that ended well run in it."""
        while self._child is None:
            self._child = self._start()
            for cell in list(self._ran):
                try:
                    self._child.ask(_run(cell), self._seconds)
                except ProcessEnded:  # it went well before: not again, and once more without it
                    self._ran.remove(cell)
                    self._drop()
                    break
        return self._child

    def _drop(self) -> None:
        if self._child is not None:
            self.printed = self._child.output() or self.printed
            self._child.close()
            self._child = None


def _run(cell: Cell) -> dict:
    return {"do": "run", "number": cell.number, "source": cell.source, "task": cell.task}


def _text(value: object) -> str:
    return shorten(value) if isinstance(value, str) else "gave an error that is no text"
