"""A step's tokens on a multiple of a tile: the 257th row of a product costs as much as the next 127 together.

A GPU multiplies in tiles of rows, and a tile that is begun is computed whole. What the scheduler can choose is where
a chunk ends, so a chunk is shortened until decodes and chunks of a step fill their tiles: nothing is computed for
nobody. That costs a long prompt a few more steps, and it pays where tiles decide the time of a step, which
`minillm bench --compare alignment` measures. Lesson 10; SARATHI (Agrawal et al. 2023, arXiv 2308.16369) chooses its
chunks in this way: 128, 256 and 257 tokens took 55, 69.8 and 92.3 ms there.
"""

from __future__ import annotations

from minillm.scheduler.step import Step


def trim_to_multiple(step: Step, multiple: int) -> None:
    """Shorten chunks, the newest first, until the tokens of the step are a multiple.

    A decode and the last chunk of a prompt stay as they are, and every shortened chunk keeps a token. Where less than
    a multiple would be left, or there is not enough to shorten, the step stays as it was planned.
    """
    excess = step.num_tokens % multiple
    cut = [i for i, (request, n) in enumerate(step.scheduled) if n < request.num_uncomputed_tokens]
    if sum(step.scheduled[i][1] - 1 for i in cut) < excess:
        return
    for i in reversed(cut):
        request, n = step.scheduled[i]
        taken = min(excess, n - 1)
        step.scheduled[i] = (request, n - taken)
        excess -= taken
