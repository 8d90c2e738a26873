"""How plain data crosses between the grader and the process that runs a learner's code.

A frame is two lengths, JSON, and the raw bytes of the tensors. Reading one runs no code, whoever wrote it: no pickle,
no eval, a known list of dtypes, limits on every size. Whatever is not plain data arrives as a `Foreign` object that
bears the name of its type, so that a judge can say "the result is ndarray, not a tensor" and nothing else can happen.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time

import torch

from minillm.errors import GradeError

HEADER = struct.Struct(">II")
MAX_JSON_BYTES = 4 << 20
MAX_TENSOR_BYTES = 128 << 20
MAX_DIMS = 16
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    )
}


class WireError(GradeError):
    """The other side sent something that is no frame, too large a one, or nothing in time."""


class Foreign:
    """Stands for a value that is not plain data; type(value).__name__ is the name of the original type."""


def pack(value: object) -> bytes:
    """One frame. Tuples become lists; objects that are not plain data become their type's name."""
    blobs: list[bytes] = []
    text = json.dumps(_to_json(value, blobs)).encode()
    body = b"".join(blobs)
    if len(text) > MAX_JSON_BYTES or len(body) > MAX_TENSOR_BYTES:
        raise WireError(
            f"{len(text):,} bytes of values and {len(body):,} of tensors; "
            f"allowed are {MAX_JSON_BYTES:,} and {MAX_TENSOR_BYTES:,}"
        )
    return HEADER.pack(len(text), len(body)) + text + body


def unpack(text: bytes, body: bytes) -> object:
    """The value of a frame. Raises WireError for anything that `pack` cannot have written."""
    try:
        value, end = _from_json(json.loads(text), memoryview(body), 0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, RuntimeError) as error:
        raise WireError(f"not a frame: {type(error).__name__}") from error
    if end != len(body):
        raise WireError(f"not a frame: {len(body) - end} bytes too many")
    return value


def roundtrip(value: object) -> object:
    """`value` as the other side of the wire would see it."""
    frame = pack(value)
    length, _ = HEADER.unpack(frame[: HEADER.size])
    return unpack(frame[HEADER.size : HEADER.size + length], frame[HEADER.size + length :])


def send(channel: socket.socket, value: object, seconds: float) -> None:
    channel.settimeout(seconds)
    try:
        channel.sendall(pack(value))
    except OSError as error:
        raise _lost(error) from error


def receive(channel: socket.socket, seconds: float | None) -> object:
    """The next value, waiting for at most `seconds`. Raises TimeoutError, EOFError or WireError."""
    deadline = None if seconds is None else time.monotonic() + seconds
    text_length, body_length = HEADER.unpack(_read(channel, HEADER.size, deadline))
    if text_length > MAX_JSON_BYTES or body_length > MAX_TENSOR_BYTES:
        raise WireError(f"a frame of {text_length + body_length:,} bytes is too large")
    text = _read(channel, text_length, deadline)
    return unpack(text, _read(channel, body_length, deadline))


def _read(channel: socket.socket, length: int, deadline: float | None) -> bytes:
    pieces = bytearray()
    while len(pieces) < length:
        if deadline is not None:
            channel.settimeout(max(deadline - time.monotonic(), 1e-3))
        try:
            piece = channel.recv(min(length - len(pieces), 1 << 20))
        except OSError as error:
            raise _lost(error) from error
        if not piece:
            raise EOFError("the other process ended")
        pieces += piece
    return bytes(pieces)


def _lost(error: OSError) -> Exception:
    return error if isinstance(error, TimeoutError) else EOFError(f"the other process ended: {error}")


def _to_json(value: object, blobs: list[bytes]) -> object:
    """None, booleans, numbers and strings as they are; the rest as [tag, ...], so that no two things look alike."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        return ["list", [_to_json(item, blobs) for item in value]]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return ["dict", {key: _to_json(item, blobs) for key, item in value.items()}]
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type != "meta":
        name = str(value.dtype).removeprefix("torch.")
        if name in DTYPES:
            plain = value.detach().cpu().contiguous().reshape(-1)
            blobs.append(plain.view(torch.uint8).numpy().tobytes())
            return ["tensor", name, list(value.shape)]
    return ["foreign", kind.__name__[:50]]


def _from_json(value: object, body: memoryview, at: int) -> tuple[object, int]:
    """(value, position behind its tensors in `body`)."""
    if value is None or isinstance(value, bool | int | float | str):
        return value, at
    tag, rest = value[0], value[1]
    if tag == "list":
        items = []
        for item in rest:
            item, at = _from_json(item, body, at)
            items.append(item)
        return items, at
    if tag == "dict":
        pairs = {}
        for key, item in rest.items():
            pairs[key], at = _from_json(item, body, at)
        return pairs, at
    if tag == "foreign":
        name = rest if rest.isidentifier() else "object"
        return type(name, (Foreign,), {"__slots__": ()})(), at
    if tag == "tensor":
        return _tensor(DTYPES[rest], value[2], body, at)
    raise ValueError(f"unknown tag {tag!r:.20}")


def _tensor(dtype: torch.dtype, shape: list[int], body: memoryview, at: int) -> tuple[torch.Tensor, int]:
    if len(shape) > MAX_DIMS or not all(type(size) is int and 0 <= size < 1 << 31 for size in shape):
        raise ValueError("not a shape")
    end = at + math.prod(shape) * dtype.itemsize
    if end > len(body):
        raise ValueError("too few bytes")
    if end == at:
        return torch.empty(shape, dtype=dtype), end
    return torch.frombuffer(bytearray(body[at:end]), dtype=torch.uint8).view(dtype).reshape(shape), end
