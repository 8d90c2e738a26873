"""A step that was written as numbers is read as the same step."""

import random

import pytest
import torch

from minillm.batch import Batch
from minillm.parallel.plan import HEADER, Work, header, lengths_of, num_integers, pack, unpack


def random_batch(padding):
    rng = random.Random(int(torch.randint(2**31, ())))
    num = rng.randint(1, 5)
    queries = [rng.randint(1, 9) for _ in range(num)]
    contexts = [n + rng.randint(0, 20) for n in queries]
    tables = [[rng.randrange(50) for _ in range(-(-n // 4) + rng.randrange(3))] for n in contexts]
    tokens = [[rng.randrange(300) for _ in range(n)] for n in queries]
    return Batch.build(tokens, contexts, tables, 4, [rng.random() < 0.5 for _ in queries], padding=padding)


@pytest.mark.parametrize("padding", [None, [3, 1]], ids=["ragged", "padded"])
def test_a_batch_arrives_as_it_was_sent(padding):
    sent = random_batch(padding)
    lengths = lengths_of(sent)
    numbers = pack(sent)
    assert numbers.dtype == torch.int64 and len(numbers) == num_integers(lengths)
    received = unpack(numbers, tuple(header(Work.FORWARD, *lengths).tolist()[1:]))
    for name, value in vars(sent).items():
        found = getattr(received, name)
        if isinstance(value, torch.Tensor):
            assert found.dtype == value.dtype and torch.equal(found, value), name
        else:
            assert found == value, name


@pytest.mark.parametrize("work", Work)
def test_every_header_has_one_length(work):
    assert header(work).tolist() == [work, 0, 0, 0, 0] and len(header(work, 1, 2, 3, 4)) == HEADER
