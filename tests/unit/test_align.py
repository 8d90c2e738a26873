"""`align_prefill_tokens`: which chunks are shortened, that nobody starves, that answers stay the same, and what a GPU
whose products are a staircase would gain. Every step of random traffic is looked at in test_scheduler_properties.py.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.config import EngineConfig
from minillm.devices import find_device
from minillm.errors import ConfigError
from minillm.estimate import shape_of
from minillm.option_words import CHUNKING
from minillm.request import Request
from minillm.sampling_params import SamplingParams
from minillm.scheduler import Step
from minillm.scheduler.align import trim_to_multiple
from minillm.simulator import RooflineStepTime, make_simulated_scheduler, poisson, simulate
from tests.tolerances import LOGITS_FP32
from tests.unit.engines import GREEDY, B, make_engine, note_preemptions, random_prompts, run, sure_prompts, whole
from tests.unit.fake_engine import FakeEngine

DECODE = (1, 1)


def planned(*pairs):
    """A step of (n, uncomputed) pairs."""
    requests = [(Request(f"r{i}", [0] * uncomputed, SamplingParams()), n) for i, (n, uncomputed) in enumerate(pairs)]
    return Step(scheduled=requests)


def trimmed(multiple, *pairs):
    step = planned(*pairs)
    trim_to_multiple(step, multiple)
    return [n for _, n in step.scheduled]


# ---- the trim alone ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "left"),
    [
        ([DECODE, DECODE, (8, 30)], [1, 1, 6]),  # decodes count, and are not touched
        ([(9, 30)], [8]),
        ([(8, 30)], [8]),
        ([(9, 9)], [9]),  # the last chunk of a prompt ends where it ends
        ([(5, 5), (6, 30)], [5, 3]),
        ([(6, 30), (5, 30)], [6, 2]),  # the newest gives first
        ([(7, 30), (2, 30), (2, 30)], [6, 1, 1]),  # and keeps a token
        ([(3, 30)], [3]),  # less than a tile: as planned
        ([DECODE, DECODE, DECODE, (1, 30)], [1, 1, 1, 1]),
        ([DECODE] * 5 + [(1, 30)], [1] * 6),  # the token that could be taken is somebody's last
        ([DECODE] * 4, [1] * 4),
        ([], []),
    ],
)
def test_chunks_that_are_cut_anyway_end_where_a_tile_of_four_does(pairs, left):
    assert trimmed(4, *pairs) == left


@given(
    st.lists(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sampled_from([n, n + 1, n + 50])))),
    st.integers(1, 20),
)
def test_the_nearest_multiple_below_or_the_plan_itself(pairs, multiple):
    before, after = [n for n, _ in pairs], trimmed(multiple, *pairs)
    least = sum(1 if n < uncomputed else n for n, uncomputed in pairs)
    reachable = [total for total in range(least, sum(before) + 1) if total % multiple == 0]
    assert sum(after) == (max(reachable) if reachable and sum(before) - max(reachable) < multiple else sum(before))
    for (n, uncomputed), m in zip(pairs, after, strict=True):
        assert (1 <= m <= n) if n < uncomputed else m == n
    shorter = [i for i, (n, m) in enumerate(zip(before, after, strict=True)) if m < n]
    cut = [i for i, (n, uncomputed) in enumerate(pairs) if n < uncomputed]
    if shorter:  # whoever stands behind the first one that gave has given all it could
        assert all(after[i] == 1 for i in cut if i > shorter[0])


# ---- in a scheduler ------------------------------------------------------------------------------


def test_a_chunk_makes_room_for_the_decodes_beside_it():
    engine = FakeEngine(max_num_batched_tokens=32, prefill_chunk_size=16, align_prefill_tokens=8)
    for seed in range(3):
        engine.add([seed] * 4, max_tokens=50, ignore_eos=True)
    engine.step()
    engine.add([5] * 40, max_tokens=1)
    for _ in range(4):
        engine.step()
    chunks = [[n for name, n in step if name == "r3"] for step in engine.steps]
    assert chunks == [[], [13], [13], [14], []]  # 13 + 3 = 16; the last chunk ends where the prompt does


@pytest.mark.parametrize("policy", CHUNKING)
@pytest.mark.parametrize("multiple", [2, 5, 16])
def test_a_budget_that_decodes_fill_computes_the_prompt_all_the_same(policy, multiple):
    """Sixteen seats, fifteen of them taken: a token per step is left, and it must not be taken away."""
    engine = FakeEngine(
        scheduling_policy=policy, max_num_batched_tokens=16, max_num_seqs=16, align_prefill_tokens=multiple
    )
    for seed in range(15):
        engine.add([seed], max_tokens=40, ignore_eos=True)
    engine.step()
    late = engine.add([9] * 10, max_tokens=1)
    for _ in range(10):
        engine.step()
    assert late.finished and late.num_tokens == 11


@pytest.mark.parametrize("policy", [policy for policy in CHUNKING if policy != "prefill_first"])  # it has no bound
def test_the_gap_between_two_tokens_stays_within_one_budget(policy):
    model = shape_of("8b")
    trace = poisson(150, 6.0, 0, input_median=600, output_median=60)
    config = EngineConfig(
        scheduling_policy=policy,
        max_num_batched_tokens=700,
        prefill_chunk_size=300,
        align_prefill_tokens=128,
        max_model_len=8192,
    )
    time = RooflineStepTime(model, find_device("A100-80GB"))
    result = simulate(trace, make_simulated_scheduler(model, config, 5000), time)
    assert len(result.records) == 150
    assert 300 < result.longest_gap_tokens <= 700


def test_long_prompts_of_interleaved_are_shortened_and_short_ones_still_overtake():
    engine = FakeEngine(
        scheduling_policy="interleaved",
        max_num_batched_tokens=40,
        prefill_chunk_size=15,
        align_prefill_tokens=8,
        max_long_partial_prefills=2,
        num_blocks=200,
        max_model_len=200,
    )
    engine.add([1] * 60, max_tokens=1)
    engine.add([2] * 60, max_tokens=1)
    short = engine.add([3] * 5, max_tokens=1)
    engine.step()
    assert engine.steps == [[("r0", 15), ("r1", 4), ("r2", 5)]]  # 15 and 5 of the long ones' half of 40: 25 in all
    assert short.finished
    engine.run()


# ---- in the engine -------------------------------------------------------------------------------

REGIMES = [
    {"align_prefill_tokens": 8, "max_num_batched_tokens": 61},
    {"align_prefill_tokens": 7, "prefill_chunk_size": 17},
    {"align_prefill_tokens": B + 1, "max_num_batched_tokens": 2 * B + 5},
    {"align_prefill_tokens": 16, "max_num_batched_tokens": 37, "num_blocks": 6},
    {"align_prefill_tokens": 5, "max_num_batched_tokens": 13, "num_blocks": 7},
    {"align_prefill_tokens": 16, "scheduling_policy": "interleaved", "prefill_chunk_size": 18},
    {"align_prefill_tokens": 6, "scheduling_policy": "prefill_first", "prefill_chunk_size": 11},
    {"align_prefill_tokens": 6, "scheduling_policy": "speculative_prefill", "prefill_chunk_size": 20},
]


@pytest.fixture(scope="module")
def answered(tiny, session_seed):
    return sure_prompts(tiny, [1, B - 1, B, 2 * B + 1, 53, 70], session_seed)


@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_tokens_equal_recomputing_everything_also_after_preemptions_and_prefix_hits(tiny, answered, regime):
    prompts, expected = answered
    engine = make_engine(tiny, **regime)
    preempted, chunks = note_preemptions(engine), note_shortened(engine)
    assert run(engine, prompts) == expected
    assert run(engine, prompts) == expected  # from the prefix cache
    assert chunks, "the regime was meant to shorten chunks"
    assert preempted or regime.get("num_blocks", 64) > 6, "the pool was meant to be too small"


def note_shortened(engine):
    """A list to which every step is added in which a chunk is shortened from now on."""
    shortened, align = [], engine.scheduler.align

    def noting(step):
        before = step.num_tokens
        align(step)
        if step.num_tokens < before:
            assert step.num_tokens % engine.scheduler.align_prefill_tokens == 0
            shortened.append(step)

    engine.scheduler.align = noting
    return shortened


@pytest.mark.parametrize("multiple", [3, B - 1, B, B + 1, 30])
def test_the_logits_behind_aligned_chunks_equal_one_shot_logits(tiny, session_seed, multiple):
    (prompt, other) = random_prompts(tiny, [61, 9], session_seed)
    engine = make_engine(tiny, align_prefill_tokens=multiple, prefill_chunk_size=34)
    seen, sampler = {}, engine.sampler

    def noting(logits, requests):
        seen.update({r.request_id: row for r, row in zip(requests, logits, strict=True) if r.num_tokens == 61})
        return sampler(logits, requests)

    engine.sampler = noting
    run(engine, [other, prompt], GREEDY)
    (logits,) = seen.values()
    expected = whole(tiny, prompt)[-1]
    assert (logits - expected).abs().max() / expected.abs().max() < LOGITS_FP32


# ---- on a virtual clock --------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 512])
def test_the_staircase_of_the_simulator_rises_at_the_edge_of_a_tile_and_keeps_the_roof_of_memory(window):
    device, model = find_device("A100-80GB"), replace(shape_of("8b"), sliding_window=window)
    stairs, slope = (RooflineStepTime(model, device, tile_rows=rows) for rows in (128, 1))
    for n in (1, 64, 127, 256, 384, 1024):  # fewer than a tile, or whole tiles
        assert stairs([(n, n)], 1) == slope([(n, n)], 1)
    for n in (257, 300, 383):
        more = slope([(384, 384)], 1) - slope([(n, n)], 1)
        attention = stairs([(384, 384)], 1) - stairs([(n, n)], 1)  # all that still depends on n
        assert stairs([(n, n)], 1) - slope([(n, n)], 1) == pytest.approx(more - attention)
        assert 0 < attention < 0.1 * more
    decodes = [(1, 4000)] * 257
    assert stairs(decodes, 257) > slope(decodes, 257)


def test_a_tile_of_no_rows_is_refused():
    with pytest.raises(ConfigError, match="tile_rows=0"):
        RooflineStepTime(shape_of("8b"), find_device("A100-80GB"), tile_rows=0)


def test_alignment_pays_where_products_are_a_staircase_and_nowhere_else():
    model, device = shape_of("8b"), find_device("A100-80GB")
    trace = poisson(300, 4.0, 0, input_median=1500, output_median=150)

    def median_ttft(tile, multiple):
        config = EngineConfig(prefill_chunk_size=384, align_prefill_tokens=multiple, max_model_len=16384)
        scheduler = make_simulated_scheduler(model, config, 20_000)
        result = simulate(trace, scheduler, RooflineStepTime(model, device, tile_rows=tile))
        return sorted(record.ttft_s for record in result.records)[150]

    assert median_ttft(128, 128) < 0.85 * median_ttft(128, None)
    assert 0.9 < median_ttft(1, 128) / median_ttft(1, None) < 1.1


def test_the_trace_of_both_sides_is_the_same_work():
    trace = poisson(50, 4.0, random.randrange(1000), input_median=800, output_median=30)
    model = shape_of("8b")
    rows = []
    for multiple in (None, 128):
        config = EngineConfig(prefill_chunk_size=384, align_prefill_tokens=multiple, max_model_len=16384)
        result = simulate(trace, make_simulated_scheduler(model, config, 20_000), lambda sequences, sampled: 0.01)
        rows.append((result.num_rows, [record.output_len for record in result.records]))
    assert rows[0] == rows[1]
