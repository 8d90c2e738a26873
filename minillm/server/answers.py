"""What clients get back, as JSON-ready dictionaries in the OpenAI API's form.

Completions and chats differ in where the text stands and in how log-probabilities are spelled; each is one class
with the same three methods, and the routes do not ask which they have. Beyond OpenAI's fields every whole answer
carries `metrics`, with the names of `RequestMetrics`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from minillm.errors import ConfigError, EngineClosedError, MinillmError, PromptError, QueueFullError
from minillm.outputs import CompletionOutput, RequestOutput, StreamChunk
from minillm.sampler import Logprob

STATUS = {
    PromptError: (400, "invalid_request_error"),
    ConfigError: (400, "invalid_request_error"),
    QueueFullError: (429, "rate_limit_error"),
    EngineClosedError: (503, "server_error"),
    MinillmError: (500, "server_error"),  # a failed step
}

LOWEST_LOGPROB = -9999.0
Row = dict[int, Logprob]  # one token's: the likeliest tokens, and the chosen one


class CompletionAnswer:
    """The shape of /v1/completions. `prefix` begins ids."""

    prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def opening(self, index: int) -> dict | None:
        """A choice that opens a stream; None where the protocol has none."""
        return None

    def piece(self, index: int, chunk: StreamChunk, offset: int) -> dict:
        logprobs = completion_logprobs(chunk.logprobs, chunk.token_ids, offset)
        return {"index": index, "text": chunk.text, "logprobs": logprobs, **ending(chunk)}

    def whole(self, index: int, output: CompletionOutput) -> dict:
        logprobs = completion_logprobs(output.logprobs, output.token_ids, 0)
        return {"index": index, "text": output.text, "logprobs": logprobs, **ending(output)}


class ChatAnswer:
    """The shape of /v1/chat/completions.

    token_bytes  the bytes of a token id; of parts of characters they are all that can be put together again
    num_rivals   how many of the likeliest tokens stand beside each token
    """

    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, token_bytes: Callable[[int], bytes], num_rivals: int = 0):
        self.token_bytes, self.num_rivals = token_bytes, num_rivals

    def opening(self, index: int) -> dict | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, chunk: StreamChunk, offset: int) -> dict:
        logprobs = self._logprobs(chunk.logprobs, chunk.token_ids)
        return {"index": index, "delta": {"content": chunk.text}, "logprobs": logprobs, **ending(chunk)}

    def whole(self, index: int, output: CompletionOutput) -> dict:
        logprobs = self._logprobs(output.logprobs, output.token_ids)
        message = {"role": "assistant", "content": output.text}
        return {"index": index, "message": message, "logprobs": logprobs, **ending(output)}

    def _logprobs(self, rows: list[Row] | None, token_ids: list[int]) -> dict | None:
        """A list of tokens, each with the `num_rivals` likeliest tokens at its place."""
        if rows is None:
            return None
        content = []
        for row, token in zip(rows, token_ids, strict=True):
            likeliest = [self._entry(*item) for item in list(row.items())[: self.num_rivals]]
            content.append({**self._entry(token, row[token]), "top_logprobs": likeliest})
        return {"content": content}

    def _entry(self, token: int, entry: Logprob) -> dict:
        return {"token": entry.decoded_token, "logprob": finite(entry), "bytes": list(self.token_bytes(token))}


def ending(part: CompletionOutput | StreamChunk) -> dict:
    return {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}


def usage(outputs: list[RequestOutput]) -> dict:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def metrics(outputs: list[RequestOutput]) -> list[dict]:
    """One dictionary of `RequestMetrics` per prompt."""
    return [asdict(output.metrics) for output in outputs]


def completion_logprobs(rows: list[Row] | None, token_ids: list[int], offset: int) -> dict | None:
    """Parallel lists, as in OpenAI's older API. offset: characters of the completion before the first token."""
    if rows is None:
        return None
    chosen = [row[token] for row, token in zip(rows, token_ids, strict=True)]
    offsets = []
    for entry in chosen:
        offsets.append(offset)
        offset += len(entry.decoded_token)
    return {
        "tokens": [entry.decoded_token for entry in chosen],
        "token_logprobs": [finite(entry) for entry in chosen],
        "top_logprobs": [by_text(row) for row in rows],
        "text_offset": offsets,
    }


def by_text(row: Row) -> dict[str, float]:
    """Text -> log-probability. Parts of characters all read as U+FFFD: the likeliest stands for them."""
    result: dict[str, float] = {}
    for entry in row.values():
        result.setdefault(entry.decoded_token, finite(entry))
    return result


def finite(entry: Logprob) -> float:
    """JSON has no infinity, and a token that a model rules out has a probability of 0."""
    return max(entry.logprob, LOWEST_LOGPROB)


def num_characters(chunk: StreamChunk) -> int:
    """Characters of a chunk's tokens as `text_offset` counts them; they are known where log-probabilities are."""
    rows = chunk.logprobs or []
    return sum(len(row[token].decoded_token) for row, token in zip(rows, chunk.token_ids, strict=False))


def failure(error: Exception) -> tuple[int, dict]:
    """The HTTP status of an error, and its body in OpenAI's form."""
    if isinstance(error, TimeoutError):
        return 504, error_body("the request took longer than the server allows (request_timeout_s)", "timeout_error")
    status, kind = next(row for cls, row in STATUS.items() if isinstance(error, cls))
    return status, error_body(str(error), kind)


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
