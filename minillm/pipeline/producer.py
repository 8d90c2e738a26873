"""Text that arrives in pieces becomes token ids in another process, while this one computes.

Byte-pair encoding is Python, and Python runs in one thread of a process at a time: a thread would take its time from
the engine. Two threads here only wait: one reads the pieces, which may take as long as they like, and hands them over;
the other collects ids. The process is kept for the next text; one that was left in the middle of a text is ended.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import minillm
from minillm.errors import MinillmError, ProducerError, PromptError
from minillm.tokenizer import Tokenizer
from minillm.tokenizer.as_json import dumps
from minillm.tokenizer.pretokenize import check_text


class Producer:
    """Processes that tokenise, as many as there are texts at once; usually one, started by the first text."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._idle: list[subprocess.Popen] = []
        self._end_idle = weakref.finalize(self, _end_all, self._idle)  # also of a producer that nobody closes

    @contextmanager
    def read(
        self, pieces: Iterable[str], add_special_tokens: bool = True, clock: Callable[[], float] = time.perf_counter
    ) -> Iterator[Arriving]:
        """Inside, the ids of `pieces` arrive, from a str, a file, or anything that yields str.

        Leaving before the end gives up: the process is ended, and an iterator that is being waited for is not asked
        again. Raises ProducerError when no process can be started.
        """
        process = self._take_idle() or self._start()
        arriving = Arriving(process, [pieces] if isinstance(pieces, str) else pieces, add_special_tokens, clock)
        try:
            yield arriving
        finally:
            arriving.left = True
            if arriving.ended and self._end_idle.alive:
                self._idle.append(process)
            else:
                _end_all([process])

    def close(self) -> None:
        """End the processes that wait for a text. Closing twice is fine."""
        self._end_idle()

    def _take_idle(self) -> subprocess.Popen | None:
        while self._idle:
            process = self._idle.pop()
            if process.poll() is None:
                return process
            _end_all([process])
        return None

    def _start(self) -> subprocess.Popen:
        root = str(Path(minillm.__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "minillm.pipeline.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
                env=os.environ | {"PYTHONPATH": path},
                process_group=0,  # Ctrl-C in the terminal reaches this process alone, which decides
            )  # fmt: skip
        except OSError as error:
            raise ProducerError(f"the process that tokenises cannot be started: {error}") from error
        try:
            _write(process, dumps(self._tokenizer))
        except BaseException:
            _end_all([process])
            raise
        return process


class Arriving:
    """The ids of one text, as far as they have arrived. `clock` is the system's perf_counter, which processes share.

    began       clock seconds when reading began
    ended       all ids were taken
    pieces      the pieces that were read so far
    text_ended  clock seconds when the last one had been read; None before
    tokenize_s  seconds that the process has spent encoding
    hidden_s    those of them in which nobody waited in `take`
    waited_s    seconds that `take` has waited, for text or for its ids
    """

    def __init__(
        self, process: subprocess.Popen, pieces: Iterable[str], add_special_tokens: bool, clock: Callable[[], float]
    ):
        self.ended = self.left = False
        self.pieces: list[str] = []
        self.text_ended: float | None = None
        self.tokenize_s = self.hidden_s = self.waited_s = 0.0
        self.began = clock()
        self._clock = clock
        self._process = process
        self._arrived: queue.SimpleQueue[dict | MinillmError] = queue.SimpleQueue()
        settings = json.dumps({"add_special_tokens": add_special_tokens})
        for work in (lambda: self._hand_over(pieces, settings), self._collect):
            threading.Thread(target=work, daemon=True, name="minillm-producer").start()

    def take(self, wait: bool, enough: int) -> list[int]:
        """The ids that have arrived since the last call; with `wait`, once there are any or the text has ended.

        Of a text that comes faster than it is taken, the rest stays for the next call once there are `enough`.
        Raises PromptError when the iterator failed or gave something that is no text, ProducerError when the process
        died.
        """
        ids: list[int] = []
        start = self._clock()
        while not self.ended and len(ids) < enough:
            try:
                message = self._arrived.get(wait and not ids)
            except queue.Empty:
                break
            if isinstance(message, MinillmError):
                raise message
            ids += message["ids"]
            began, done = message["from"], message["to"]
            self.tokenize_s += done - began
            self.hidden_s += done - began - (max(0.0, done - max(began, start)) if wait else 0.0)
            self.ended = "last" in message
        self.waited_s += self._clock() - start if wait else 0.0
        return ids

    def _hand_over(self, pieces: Iterable[str], settings: str) -> None:
        """Thread: the pieces to the process."""
        try:
            _write(self._process, settings)
            for piece in pieces:
                if self.left:
                    return
                check_text(piece)
                self.pieces.append(piece)
                _write(self._process, json.dumps(piece))
            self.text_ended = self._clock()
            _write(self._process, "null")
        except ProducerError:
            return  # the process is gone, and the other thread says so
        except PromptError as error:
            self._arrived.put(error)
        except Exception as error:  # of the caller's iterator
            reason = f"{type(error).__name__}: {error}"  # the repr of a UnicodeDecodeError holds the whole piece
            problem = PromptError(f"the text stopped after {len(self.pieces)} pieces: {reason:.300}")
            problem.__cause__ = error
            self._arrived.put(problem)

    def _collect(self) -> None:
        """Thread: what the process tells."""
        try:
            for line in self._process.stdout:
                message = json.loads(line)
                self._arrived.put(message)
                if "last" in message:
                    return
        except ValueError:  # our end of the pipe was closed: nobody takes any more
            return
        status = self._process.wait()
        self._arrived.put(ProducerError(f"the process that tokenises ended with status {status}; start again"))


def _write(process: subprocess.Popen, line: str) -> None:
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except (OSError, ValueError) as error:  # its end of the pipe is closed, or ours
        raise ProducerError(f"the process that tokenises does not listen: {error}") from error


def _end_all(processes: list[subprocess.Popen]) -> None:
    """End them now, and give back what they used; the list is empty afterwards."""
    while processes:
        process = processes.pop()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            try:
                pipe.close()
            except OSError:  # what was still to be written has nobody to read it
                pass
