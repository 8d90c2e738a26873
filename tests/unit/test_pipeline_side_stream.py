"""A step's numbers in one buffer over a link: the batch and the tokens are those that were copied at once."""

from dataclasses import fields

import pytest
import torch

from minillm import LLM
from minillm.batch import Batch
from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.pipeline.side_stream import ALIGNMENT, CopiedAhead
from tests.unit.engines import make_engine, random_prompts, run


class Link:
    """Copies at once, and overwrites what was sent as soon as the next tensor is."""

    def __init__(self):
        self.sent = []

    def send(self, tensor):
        for before in self.sent:
            before.fill_(255)
        self.sent.append(tensor)
        return tensor.clone(), lambda: None


def test_batches_are_equal_field_by_field_and_tokens_with_them(tiny, session_seed):
    prompts = random_prompts(tiny, [45, 1, 16, 33, 7], session_seed)
    options = dict(max_num_batched_tokens=17, num_blocks=9, scheduling_policy="chunked")
    expected = run(make_engine(tiny, **options), prompts)
    engine, link = make_engine(tiny, **options), Link()
    ahead, steps = CopiedAhead(link), []

    def compared(step, block_size, device):
        plain, ours = Batch.from_step(step, block_size, device), ahead(step, block_size, device)
        for field in fields(Batch):
            a, b = getattr(plain, field.name), getattr(ours, field.name)
            if isinstance(a, torch.Tensor):
                assert a.dtype == b.dtype and torch.equal(a, b), field.name
                assert field.name == "host_token_ids" or b.storage_offset() * b.itemsize % ALIGNMENT == 0
            else:
                assert a == b, field.name
        steps.append(step)
        return ours

    engine.make_batch = compared
    assert run(engine, prompts) == expected
    assert len(link.sent) == len(steps) > 20


def test_padding_and_no_sampled_row_travel_too(tiny, session_seed):
    prompts = random_prompts(tiny, [20, 31, 3], session_seed)
    options = dict(scheduling_policy="static", pad_batches=True, max_num_batched_tokens=128)
    engine = make_engine(tiny, **options)
    engine.make_batch = CopiedAhead(Link())
    assert run(engine, prompts) == run(make_engine(tiny, **options), prompts)


def test_on_a_cpu_and_for_several_ranks_the_option_is_refused():
    with pytest.raises(ConfigError, match="overlap_copies is for a GPU"):
        LLM("random:tiny", device="cpu", overlap_copies=True)
    with pytest.raises(ConfigError, match="overlap_copies has no meaning for 2 ranks"):
        EngineConfig(overlap_copies=True, tensor_parallel_size=2)
