"""What a step's collectives cost: the sums by hand, and the bytes that running ranks count."""

import pytest

from minillm import roofline
from minillm.devices import find_device
from minillm.estimate import shape_of
from minillm.parallel.cost import communication_seconds, gathered_bytes, step_seconds, summed_bytes
from minillm.parallel.model import ParallelTransformer
from tests.unit.engines import attention
from tests.unit.test_parallel_model import FAMILIES, batches, logits_of, on_ranks, random_weights

LINK = 300e9


def test_a_70b_sums_5_mb_per_token_whatever_the_number_of_ranks():
    """2 sums x 80 layers x 8192 values x 2 bytes."""
    model = shape_of("70b")
    assert summed_bytes(model, 1) == 2 * 80 * 8192 * 2 == 2_621_440
    assert summed_bytes(model, 2048) == 2048 * 2_621_440
    assert gathered_bytes(model, 3) == 3 * 32000 * 2


@pytest.mark.parametrize("size", [2, 4])
def test_the_bytes_are_those_that_ranks_count(size):
    config = FAMILIES["untied"]
    weights, steps = random_weights(config), batches(config)

    def traffic(ranks):
        model, found = ParallelTransformer(config, weights, ranks), []
        for step in steps:
            before = dict(ranks.traffic.bytes)
            logits_of(model, [step], attention("naive"))
            found.append({kind: n - before.get(kind, 0) for kind, n in ranks.traffic.bytes.items()})
        return found

    expected = [
        {
            "all_reduce": summed_bytes(config, s.num_tokens, 4),
            "gather": gathered_bytes(config, len(s.logits_indices), 4),
        }
        for s in steps
    ]
    assert on_ranks(size, traffic) == [expected] * size


def test_a_ring_sends_almost_twice_what_is_summed_and_each_collective_has_its_latency():
    model = shape_of("70b")
    alone = communication_seconds(model, 100, 3, 1, LINK, 1.0)
    assert alone == 0.0
    moved = (2 * 100 * 2_621_440 + 3 * 32000 * 2) * 7 / 8
    assert communication_seconds(model, 100, 3, 8, LINK) == pytest.approx(moved / LINK, rel=1e-12)
    assert communication_seconds(model, 100, 3, 8, 1e30, 1.0) == pytest.approx(2 * 80 + 1)
    assert communication_seconds(model, 100, 0, 8, 1e30, 1.0) == pytest.approx(2 * 80)


def test_work_is_divided_and_overhead_is_not():
    model, device = shape_of("70b"), find_device("A100-80GB")
    sequences = [(512, 512), (1, 900)]
    alone = roofline.step_seconds(model, sequences, device, num_sampled=1, compute_efficiency=0.5)
    shared = step_seconds(model, sequences, device, 8, LINK, 1e-5, 1, compute_efficiency=0.5, overhead_s=0.25)
    talk = communication_seconds(model, 513, 1, 8, LINK, 1e-5)
    assert shared == pytest.approx(0.25 + alone / 8 + talk, rel=1e-12) and talk > 0
    assert step_seconds(model, [], device, 8, LINK) == 0.0
    assert step_seconds(model, sequences, device, 1, LINK, 1e-5) == roofline.step_seconds(model, sequences, device)
