"""First strategy of the article: prompts of similar length go into one prefill.

In a rectangular batch (`pad_batches`) short prompts are filled up to the longest, so a batch of equals
wastes little: denser compute. The price is paid by whoever has an unusual length and is passed over. A ragged
batch pads nothing, so there the price is all that is left of it. Built in lesson 13.
"""

from __future__ import annotations

from itertools import islice
from math import log2

from minillm.request import Request
from minillm.scheduler.base import Scheduler
from minillm.scheduler.rectangle import admit_side_by_side
from minillm.scheduler.step import Step

MAX_GROUP_WAIT_STEPS = 16
WINDOW = 128  # requests at the head of the queue among which groups are formed
CLASSES_PER_OCTAVE = 2  # lengths of one class differ by a factor of less than sqrt(2)


def length_class(num_tokens: int) -> int:
    """Prompts of one class count as similar."""
    return int(CLASSES_PER_OCTAVE * log2(num_tokens))


class SimilarLengthScheduler(Scheduler):
    """In each step the decodes and one group: the largest class of lengths among those who wait.

    A request that was passed over in `max_group_wait_steps` steps is due: its class goes next, the oldest due
    request's first, and until that one is in nobody else starts.
    """

    whole_prompts = True

    def __init__(self, config, block_pool, max_model_len):
        super().__init__(config, block_pool, max_model_len)
        self.pad_batches = config.pad_batches
        self.max_wait = config.max_group_wait_steps or MAX_GROUP_WAIT_STEPS
        self._waited: dict[Request, int] = {}  # steps that each request of the window has seen from the queue

    def plan(self, step: Step) -> None:
        budget = self.decode(step, self.max_num_batched_tokens)
        if not step.preempted:
            admit_side_by_side(self, self._next_group(), step, budget, self.pad_batches)

    def _next_group(self) -> list[Request]:
        """The class that is due, else the largest, its members in order of the queue."""
        window = [r for r in islice(self.waiting, WINDOW) if r.priority == self.waiting[0].priority]
        self._waited = {request: self._waited.get(request, -1) + 1 for request in window}
        classes: dict[int, list[Request]] = {}
        for request in window:
            classes.setdefault(length_class(request.num_tokens), []).append(request)
        due = next((r for r in window if self._waited[r] >= self.max_wait), None)
        if due is not None:
            group = classes[length_class(due.num_tokens)]
            return [due, *(r for r in group if r is not due)]
        return max(classes.values(), key=len, default=[])  # of equally large ones the one that was there first
