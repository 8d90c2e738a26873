"""What crosses the wire arrives whole; what is no plain data arrives as a name; what is no frame is an error."""

import json
import math
import random
import socket
import struct

import pytest
import torch

from minillm.course.grader import wire
from minillm.course.grader.task import difference


def test_plain_data_arrives_as_it_was():
    value = {"a": [1, -2.5, None, True, "é"], "big": 10**40, "empty": {}, "": [[]]}
    assert wire.roundtrip(value) == value
    assert wire.roundtrip((1, (2,))) == [1, [2]]
    inf, nan = wire.roundtrip([math.inf, math.nan])
    assert inf == math.inf and math.isnan(nan)


@pytest.mark.parametrize("dtype", wire.DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)], ids=str)
def test_tensors_of_every_dtype_arrive_bit_for_bit(dtype, shape):
    values = torch.randint(0, 2, shape) if dtype == torch.bool else torch.randint(0, 100, shape)
    sent = values.to(dtype)
    got = wire.roundtrip({"x": [sent]})["x"][0]
    assert got.dtype == dtype and got.shape == sent.shape
    assert torch.equal(got.float(), sent.float())


def test_views_and_parameters_arrive_as_dense_tensors():
    x = torch.randn(4, 6)
    for view in (x.T, x[:, ::2], x[None].expand(3, 4, 6), torch.nn.Parameter(x)):
        got = wire.roundtrip(view)
        assert torch.equal(got, view) and got.is_contiguous() and not got.requires_grad


@pytest.mark.parametrize(
    "value", [{1, 2}, b"x", object(), 1j, torch.randn(2).to_sparse(), torch.empty(2, device="meta"), {1: 2}, print]
)
def test_what_is_not_plain_data_arrives_as_the_name_of_its_type(value):
    got = wire.roundtrip([value])[0]
    assert isinstance(got, wire.Foreign) and type(got).__name__ == type(value).__name__


def test_a_judge_can_say_what_came_instead_of_a_tensor():
    import numpy

    got = wire.roundtrip({"out": numpy.zeros(2)})["out"]
    assert difference(got, torch.zeros(2)) == "the result is ndarray, not a tensor"


BAD = {
    "not JSON": (b"{", b""),
    "not UTF-8": (b'"\xff"', b""),
    "an unknown tag": (b'["pickle", "x"]', b""),
    "no tag": (b"[]", b""),
    "a bare dict": (b'{"token": "x"}', b""),
    "a list that is none": (b'["list", 3]', b""),
    "a dict that is none": (b'["dict", [1]]', b""),
    "a foreign name that is none": (b'["foreign", 3]', b""),
    "an unknown dtype": (b'["tensor", "object", [1]]', b"\0" * 8),
    "a dtype that is none": (b'["tensor", ["float32"], [1]]', b"\0" * 4),
    "a negative size": (b'["tensor", "float32", [-1]]', b""),
    "a size that is none": (b'["tensor", "float32", [true]]', b"\0" * 4),
    "a huge size": (b'["tensor", "float32", [99999999999]]', b""),
    "too many dimensions": (b'["tensor", "float32", [' + b"1," * 99 + b"1]]", b"\0" * 4),
    "too few bytes": (b'["tensor", "float32", [2]]', b"\0" * 7),
    "too many bytes": (b'["tensor", "float32", [2]]', b"\0" * 9),
    "nested without end": (b'["list", [' * 5_000 + b"]]" * 5_000, b""),
    "a number without end": (b"1" * 10_000, b""),
}


@pytest.mark.parametrize("why", BAD)
def test_what_is_no_frame_is_an_error_of_its_own(why):
    with pytest.raises(wire.WireError):
        wire.unpack(*BAD[why])


def test_random_bytes_and_bent_frames_never_raise_anything_else():
    frame = wire.pack({"a": torch.randn(3), "b": [1, "x", None]})
    length, _ = wire.HEADER.unpack(frame[:8])
    text, body = bytearray(frame[8 : 8 + length]), frame[8 + length :]
    for _ in range(2_000):
        bent = bytearray(text)
        for _ in range(random.randint(1, 3)):
            bent[random.randrange(len(bent))] = random.randrange(256)
        try:
            wire.unpack(bytes(bent), body)
        except wire.WireError:
            pass


def test_a_frame_that_claims_too_much_is_refused_before_it_is_read():
    a, b = socket.socketpair()
    with a, b:
        b.sendall(struct.pack(">II", 2**32 - 1, 0))
        with pytest.raises(wire.WireError, match="too large"):
            wire.receive(a, 5)


def test_too_much_is_not_sent():
    with pytest.raises(wire.WireError, match="allowed are"):
        wire.pack(torch.zeros(wire.MAX_TENSOR_BYTES + 1, dtype=torch.uint8))


def test_silence_ends_in_a_timeout_and_a_closed_end_in_eof():
    a, b = socket.socketpair()
    with a, b:
        b.sendall(b"\0\0")
        with pytest.raises(TimeoutError):
            wire.receive(a, 0.05)
        b.close()
        with pytest.raises(EOFError):
            wire.receive(a, 5)
        with pytest.raises(EOFError):
            wire.send(a, list(range(100_000)), 5)


def test_tags_cannot_be_forged_by_values():
    value = ["tensor", "float32", [1]]
    assert wire.roundtrip({"list": value}) == {"list": value}
    assert json.loads(wire.pack(value)[8:])[0] == "list"
