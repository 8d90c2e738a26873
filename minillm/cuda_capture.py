"""Recording what a function sends to a GPU as a CUDA graph, so that it can be sent again as one.

All graphs of a `CudaCapture` share one pool of memory, because only one of them runs at a time, and one stream of their
own. A stream brings cuBLAS a workspace, whose address is recorded: with a stream for each graph there would be a
workspace for each, and on the stream that PyTorch lends to everybody, the end of another engine's graphs would take the
workspace from these (in PyTorch of 2026 the first graph that is destroyed does, pytorch issue 193402). So these graphs
are to be kept, and to be dropped, together. What other threads do with the GPU meanwhile, with another LLM for
instance, does not spoil a recording. Built in lesson 17.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Replay = Callable[[], torch.Tensor]


class CudaCapture:
    """run -> what replays it: run() returns a tensor, and replay() computes it anew in the same memory.

    Raises RuntimeError, as PyTorch does, where memory ends or `run` does what no graph can hold, such as waiting for
    the GPU; the current stream is then what it was before.
    """

    def __init__(self):
        self.pool = self.stream = None  # until there is something to record

    def __call__(self, run: Replay) -> Replay:
        if self.pool is None:
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        computing = torch.cuda.current_stream()
        self.stream.wait_stream(computing)
        try:
            with torch.cuda.stream(self.stream):
                run()  # what compiles or allocates at its first call must do so before the recording
        finally:
            computing.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local")
        with torch.cuda.stream(computing), recording:  # the outer one ends also where the inner one fails to
            result = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
