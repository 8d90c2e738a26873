"""On which stream and into which memory a recording goes, told by a stand-in for a GPU that notes it."""

from contextlib import contextmanager
from itertools import count

import pytest
import torch

from minillm.cuda_capture import CudaCapture


class Gpu:
    """torch.cuda as far as a recording needs it: it knows the current stream, and has its quirk where one fails."""

    def __init__(self):
        self.numbers = count()
        self.current = self.Stream()
        self.recorded, self.modes = [], set()  # (pool, stream) of each

    def Stream(self):
        return Stream(next(self.numbers))

    def current_stream(self):
        return self.current

    def graph_pool_handle(self):
        return next(self.numbers)

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode="global"):
        self.modes.add(capture_error_mode)
        before, self.current = self.current, stream
        yield  # an invalid recording raises again when it is ended, and its stream stays the current one
        self.current = before
        self.recorded.append((pool, stream.number))

    class CUDAGraph:
        def replay(self):
            pass


class Stream:
    def __init__(self, number):
        self.number, self.waits_for = number, []

    def wait_stream(self, other):
        self.waits_for.append(other.number)


@pytest.fixture
def gpu(monkeypatch):
    fake = Gpu()
    for name in ("Stream", "current_stream", "graph_pool_handle", "stream", "graph", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def test_graphs_of_one_engine_share_a_pool_and_a_stream_that_no_other_engine_uses(gpu):
    first, second = CudaCapture(), CudaCapture()
    seen = []
    for capture in (first, second, first):
        assert capture(lambda: seen.append(gpu.current.number) or "result")() == "result"
    (pool, stream), other, again = gpu.recorded
    assert again == (pool, stream) and not {pool, stream} & {*other}
    assert seen == [stream, stream, other[1], other[1], stream, stream], "run once before, on the same stream"


def test_no_other_thread_is_kept_from_its_gpu_work_while_one_records(gpu):
    """In the mode "global" an allocation by any thread fails, and spoils the recording."""
    CudaCapture()(lambda: None)
    assert gpu.modes == {"thread_local"}


@pytest.mark.parametrize("works", [0, 1])
def test_a_recording_that_fails_leaves_the_current_stream_as_it_was(gpu, works):
    """It may fail in the first run, whose kernels are waited for all the same, or while it is recorded."""
    computing, runs = gpu.current, []

    def run():
        runs.append(gpu.current.number)
        if len(runs) > works:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        CudaCapture()(run)
    assert gpu.current is computing and computing.waits_for == [runs[0]]
    assert len(runs) == works + 1 and gpu.recorded == []
