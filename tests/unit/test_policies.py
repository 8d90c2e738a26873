"""What each scheduling policy promises, case by case, on the fake engine whose every read of the cache is checked."""

import random

import pytest

from minillm.block_pool import BlockPool
from minillm.config import EngineConfig
from minillm.errors import ConfigError, QueueFullError
from minillm.option_words import POLICIES_WITH, SCHEDULING_POLICIES
from minillm.request import Status
from minillm.scheduler import make_scheduler
from minillm.scheduler.rectangle import padding
from minillm.scheduler.similar_length import WINDOW, length_class
from tests.unit.fake_engine import FakeEngine, solo

B = 4  # block size of the fake engine
WHOLE_PROMPTS = ("static", "iteration", "similar_length")
LEGAL = {"speculative_predictor": "frequent", "speculative_memory_share": 0.5, "pad_batches": True}


def prompt(length, seed=0):
    return [(seed * 7 + i * i) % 11 + 4 for i in range(length)]


def fake(policy, **options):
    """A fake engine whose budget is large enough for whole prompts where the policy wants them."""
    if policy in WHOLE_PROMPTS:
        options["max_num_batched_tokens"] = max(options.get("max_num_batched_tokens", 0), options["max_model_len"])
    return FakeEngine(scheduling_policy=policy, **options)


def starts(engine, request):
    """Number of the first step that computes this request, infinite if there is none yet."""
    return next((i for i, step in enumerate(engine.steps) if request.request_id in dict(step)), float("inf"))


def alone(engine, request):
    rows = engine.pool.num_blocks * engine.pool.block_size
    limits = {"max_model_len": engine.max_model_len, "num_rows": rows}
    return solo(request.prompt_token_ids, request.params, request.index, **limits)[0]


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
@pytest.mark.parametrize("option", POLICIES_WITH)
def test_an_option_of_one_policy_is_refused_with_another_and_the_message_names_both(policy, option):
    given = {option: LEGAL.get(option, 64), "scheduling_policy": policy}
    if policy in POLICIES_WITH[option]:
        assert getattr(EngineConfig(**given), option) == given[option]
        return
    with pytest.raises(ConfigError, match=f"{option}=.* belongs to .*{POLICIES_WITH[option][0]}.*'{policy}'"):
        EngineConfig(**given)


@pytest.mark.parametrize("policy", WHOLE_PROMPTS)
def test_a_policy_of_whole_prompts_needs_a_budget_for_the_longest_prompt(policy):
    config = EngineConfig(scheduling_policy=policy, max_num_batched_tokens=63)
    with pytest.raises(ConfigError, match=f"{policy}.*max_num_batched_tokens=63.*max_model_len=64"):
        make_scheduler(config, BlockPool(4, B), 64)
    make_scheduler(config, BlockPool(4, B), 63)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheduling_policy": "newest"}, "static, iteration, prefill_first"),
        ({"scheduling_policy": "interleaved", "enable_chunked_prefill": False}, "enable_chunked_prefill=True"),
        ({"scheduling_policy": "speculative_prefill", "enable_prefix_caching": False}, "prefix cache"),
        ({"scheduling_policy": "speculative_prefill", "speculative_chunk_size": 8}, "8 is less than one block of 16"),
        ({"scheduling_policy": "speculative_prefill", "max_num_batched_tokens": 8}, "8 is less than one block of 16"),
        ({"scheduling_policy": "speculative_prefill", "speculative_predictor": "oracle"}, "frequent, conversation"),
        ({"scheduling_policy": "speculative_prefill", "speculative_memory_share": 1.5}, "0, 1"),
        ({"scheduling_policy": "similar_length", "max_group_wait_steps": 0}, "at least 1"),
        ({"align_prefill_tokens": 128, "max_num_batched_tokens": 127}, "=128 is more than max_num_batched_tokens=127"),
        ({"align_prefill_tokens": 0}, "align_prefill_tokens=0 .* at least 1"),
        ({"align_prefill_tokens": 16, "enable_chunked_prefill": False}, "align_prefill_tokens=16 has no meaning with"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**options)


# ---- static, iteration, prefill_first ------------------------------------------------------------


def test_static_lets_nobody_in_before_the_longest_answer_of_the_batch_has_ended():
    engine = fake("static", max_model_len=64, max_num_seqs=2)
    short = engine.add(prompt(5), max_tokens=1, ignore_eos=True)
    long = engine.add(prompt(6, 1), max_tokens=9, ignore_eos=True)
    late = engine.add(prompt(7, 2), max_tokens=1, ignore_eos=True)
    engine.run()
    assert engine.steps[0] == [("r0", 5), ("r1", 6)]
    assert short.finished and starts(engine, late) == 9 == long.num_tokens - 6


def test_iteration_lets_the_next_one_in_as_soon_as_a_seat_is_free():
    engine = fake("iteration", max_model_len=64, max_num_seqs=2)
    engine.add(prompt(5), max_tokens=1, ignore_eos=True)
    engine.add(prompt(6, 1), max_tokens=9, ignore_eos=True)
    late = engine.add(prompt(7, 2), max_tokens=1, ignore_eos=True)
    engine.run()
    assert starts(engine, late) == 1 and engine.steps[1] == [("r1", 1), ("r2", 7)]


def test_prefill_first_never_mixes_and_decodes_only_when_no_prompt_can_be_computed():
    engine = fake("prefill_first", max_num_batched_tokens=8, max_num_seqs=4)
    engine.add(prompt(3), max_tokens=5, ignore_eos=True)
    engine.step()
    engine.add(prompt(12, 1), max_tokens=5, ignore_eos=True)
    engine.add(prompt(6, 2), max_tokens=5, ignore_eos=True)
    for _ in range(4):
        engine.step()
    assert engine.steps[1:] == [[("r1", 8)], [("r1", 4), ("r2", 4)], [("r2", 2)], [("r0", 1), ("r1", 1), ("r2", 1)]]
    engine.run()


@pytest.mark.parametrize(("policy", "at_least", "at_most"), [("chunked", 12, 12), ("prefill_first", 36, 10**6)])
def test_the_longest_decode_gap_is_one_budget_under_chunked_and_many_under_prefill_first(policy, at_least, at_most):
    budget = 12
    engine = FakeEngine(
        scheduling_policy=policy, max_num_batched_tokens=budget, max_num_seqs=6, num_blocks=256, max_model_len=200
    )
    decode = engine.add(prompt(3), max_tokens=30, ignore_eos=True)
    gap, longest, held = 0, 0, decode.num_tokens
    for i in range(200):
        if not decode.finished and i < 60:
            engine.add(prompt(40, i), max_tokens=2)
        gap += engine.step().num_tokens
        if decode.num_tokens > held:
            longest, gap, held = max(longest, gap), 0, decode.num_tokens
    assert decode.finished and at_least <= longest <= at_most


# ---- padded batches ------------------------------------------------------------------------------


def test_padding_fills_every_sequence_up_to_the_longest():
    assert padding([3, 8, 8, 5]) == [5, 3]
    assert padding([]) == padding([4]) == padding([2, 2]) == []


def test_a_static_rectangle_pads_the_prompts_and_keeps_the_rows_of_those_who_have_ended():
    engine = fake("static", max_model_len=30, pad_batches=True)
    engine.add(prompt(9), max_tokens=4, ignore_eos=True)
    engine.add(prompt(2, 1), max_tokens=2, ignore_eos=True)
    engine.add(prompt(5, 2), max_tokens=1, ignore_eos=True)
    engine.add(prompt(8, 3), max_tokens=1, ignore_eos=True)  # 4 rows of 9 are more than the budget of 30
    steps = [engine.step() for _ in range(4)]
    assert [(step.num_tokens, step.padding) for step in steps] == [(16, [7, 4]), (2, [1]), (1, [1, 1]), (1, [1, 1])]
    assert all(step.num_rows <= 30 for step in steps)
    engine.run()


def rows_of(policy, lengths, pad):
    """(rows computed, rows that belong to someone) until all these prompts, which arrive at once, have one token."""
    engine = fake(
        policy, max_model_len=256, num_blocks=4000, max_num_seqs=8, pad_batches=pad, enable_prefix_caching=False
    )
    for seed, length in enumerate(lengths):
        engine.add(prompt(length, seed), max_tokens=1, ignore_eos=True)
    steps = []
    while engine.scheduler.has_work:
        steps.append(engine.step())
    return sum(step.num_rows for step in steps), sum(step.num_tokens for step in steps)


def test_similar_lengths_save_padding_in_a_rectangle_and_a_ragged_batch_has_none_to_save(session_seed):
    rng = random.Random(session_seed)
    lengths = [rng.choice([9, 10, 11, 90, 100, 110]) for _ in range(60)]
    in_order, tokens = rows_of("iteration", lengths, pad=True)
    by_length, same_tokens = rows_of("similar_length", lengths, pad=True)
    assert tokens == same_tokens == sum(lengths)
    assert in_order - tokens > 2 * (by_length - tokens) > 0
    assert rows_of("iteration", lengths, pad=False) == rows_of("similar_length", lengths, pad=False) == (tokens, tokens)


# ---- similar_length ------------------------------------------------------------------------------


def test_the_largest_class_of_lengths_goes_first_and_no_step_prefills_two_classes(session_seed):
    rng = random.Random(session_seed)
    engine = fake("similar_length", max_model_len=256, num_blocks=4000, max_num_seqs=64)
    lengths = [100] + [rng.choice([8, 9, 10]) for _ in range(5)] + [rng.randint(20, 22) for _ in range(3)]
    for seed, length in enumerate(lengths):
        engine.add(prompt(length, seed), max_tokens=1, ignore_eos=True)
    engine.run()
    for step in engine.steps:
        assert len({length_class(n) for _, n in step}) == 1
    assert [len(step) for step in engine.steps] == [5, 3, 1]


@pytest.mark.parametrize("bound", [1, 5, 16])
def test_an_unusual_length_is_passed_over_in_a_bounded_number_of_steps(bound):
    engine = fake("similar_length", max_model_len=128, num_blocks=4000, max_num_seqs=8, max_group_wait_steps=bound)
    odd = engine.add(prompt(100), max_tokens=1, ignore_eos=True)
    seed = 1
    while odd.status is Status.WAITING:
        while len(engine.scheduler.waiting) < 10:
            engine.add(prompt(9, seed), max_tokens=1, ignore_eos=True)
            seed += 1
        engine.step()
    assert starts(engine, odd) == bound
    engine.run()


def test_one_who_is_due_and_does_not_fit_is_passed_by_nobody():
    engine = fake("similar_length", max_model_len=64, num_blocks=16, max_num_seqs=8, max_group_wait_steps=2)
    holder = engine.add(prompt(30), max_tokens=12, ignore_eos=True)
    engine.step()
    large = engine.add(prompt(40, 1), max_tokens=1, ignore_eos=True)  # 10 blocks, while 8 are free
    small = [engine.add(prompt(5, 2 + i), max_tokens=1, ignore_eos=True) for i in range(2)]
    engine.step()
    later = []
    while large.status is Status.WAITING:
        later.append(engine.add(prompt(5, len(engine.steps)), max_tokens=1, ignore_eos=True))
        engine.step()
    assert holder.finished and all(starts(engine, r) <= 3 for r in small)
    assert all(starts(engine, r) >= starts(engine, large) for r in later[2:])
    engine.run()


def test_groups_are_formed_among_the_requests_at_the_head_of_a_long_queue():
    engine = fake("similar_length", max_model_len=128, num_blocks=4000, max_num_seqs=8)
    for seed in range(WINDOW):
        engine.add(prompt(9, seed), max_tokens=1, ignore_eos=True)
    far = [engine.add(prompt(40, seed), max_tokens=1, ignore_eos=True) for seed in range(2 * WINDOW)]
    engine.step()
    assert all(r.status is Status.WAITING for r in far)
    engine.run()


# ---- interleaved ---------------------------------------------------------------------------------


def test_short_prompts_overtake_a_long_one_that_advances_in_every_step():
    engine = fake("interleaved", max_num_batched_tokens=16, max_model_len=300, num_blocks=200, prefill_chunk_size=6)
    long = engine.add(prompt(100), max_tokens=1, ignore_eos=True)
    engine.step()
    waits = []
    while not long.finished:
        asked = len(engine.steps)
        short = engine.add(prompt(5, asked), max_tokens=1, ignore_eos=True)
        engine.step()
        waits.append(starts(engine, short) - asked)
        assert (
            dict(engine.steps[-1]).get("r0", 0) >= min(6, long.num_tokens - long.num_computed_tokens) or long.finished
        )
    assert waits == [0] * len(waits) and len(engine.steps) == -(-100 // 6)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_only_so_many_long_prompts_are_in_progress_at_once(at_once):
    engine = fake(
        "interleaved", max_num_batched_tokens=40, max_model_len=300, num_blocks=500, prefill_chunk_size=5,
        max_long_partial_prefills=at_once,
    )  # fmt: skip
    longs = [engine.add(prompt(60, i), max_tokens=1) for i in range(5)]
    short = engine.add(prompt(4, 9), max_tokens=1)
    seen = set()
    while engine.scheduler.has_work:
        engine.step()
        seen.add(sum(r.status is Status.RUNNING and r.num_uncomputed_tokens > 5 for r in longs))
    assert max(seen) == at_once and starts(engine, short) == 0


@pytest.mark.parametrize("bound", [1, 7, 64])
def test_a_long_prompt_without_room_is_overtaken_in_a_bounded_number_of_steps(bound):
    """Short ones that keep coming would hold the blocks for ever."""
    engine = fake(
        "interleaved", max_num_batched_tokens=16, max_model_len=64, num_blocks=12, prefill_chunk_size=8,
        max_overtaken_steps=bound, enable_prefix_caching=False, max_num_seqs=16,
    )  # fmt: skip
    for i in range(3):
        engine.add(prompt(6, i), max_tokens=3, ignore_eos=True)
    engine.step()
    long = engine.add(prompt(40, 7), max_tokens=1)  # 10 of 12 blocks
    passed = 0
    while long.status is Status.WAITING:
        shorts = [engine.add(prompt(6, 8 + len(engine.steps)), max_tokens=3, ignore_eos=True) for _ in range(2)]
        engine.step()
        passed += any(r.status is not Status.WAITING for r in shorts)
        assert len(engine.steps) < 500
    names = {f"r{i}" for i in range(4, 4 + 2 * len(engine.steps))}
    new = set()
    overtaking = 0
    for step in engine.steps[: starts(engine, long)]:
        entered = {name for name, _ in step} & names - new
        new |= entered
        overtaking += bool(entered)
    assert overtaking == bound
    engine.run()


def test_a_short_prompt_has_its_first_token_in_one_step_while_the_fcfs_one_waits_for_the_whole_long_prompt():
    def ttft_steps(policy, **options):
        engine = fake(policy, max_num_batched_tokens=16, max_model_len=300, num_blocks=200, **options)
        engine.add(prompt(160), max_tokens=1, ignore_eos=True)
        engine.step()
        short = engine.add(prompt(6, 1), max_tokens=1, ignore_eos=True)
        steps = 0
        while not short.finished:
            engine.step()
            steps += 1
        return steps

    assert ttft_steps("interleaved", long_prefill_token_threshold=8) == 1
    assert ttft_steps("chunked") == 10


# ---- priority ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_smaller_priority_numbers_start_first_and_equal_ones_in_order_of_arrival(policy):
    engine = fake(policy, max_model_len=64, max_num_seqs=1)
    requests = [engine.add(prompt(9, i), max_tokens=2, priority=p) for i, p in enumerate([2, 0, 1, 0, -1])]
    engine.run()
    order = sorted(requests, key=lambda r: starts(engine, r))
    assert [r.request_id for r in order] == ["r4", "r1", "r3", "r2", "r0"]


def test_who_gives_way_when_blocks_run_out_is_the_least_important_one():
    engine = FakeEngine(num_blocks=4, enable_prefix_caching=False)
    minor = engine.add(prompt(2 * B), max_tokens=6, ignore_eos=True, priority=1)
    engine.step()
    major = engine.add(prompt(B, 1), max_tokens=6, ignore_eos=True)
    engine.step()
    while not minor.num_preemptions:
        engine.step()
    assert major.num_preemptions == 0
    engine.run()
    assert [minor.token_ids, major.token_ids] == [alone(engine, minor), alone(engine, major)]


# ---- overload ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_ten_times_more_than_can_be_served_is_refused_at_the_door_and_the_rest_is_served(policy, session_seed):
    """An open loop at ten times the capacity: the queue stays within its limit, everyone who got in ends."""
    rng = random.Random(session_seed)
    engine = fake(policy, max_model_len=64, num_blocks=40, max_num_seqs=4, max_queued_requests=12)
    accepted, refused = [], 0
    for i in range(80):
        for _ in range(4):  # a request takes about ten steps, four run at once
            try:
                length = rng.choice([3, 5, 8, 30])
                accepted.append(engine.add(prompt(length, rng.randrange(9)), max_tokens=rng.randint(6, 12)))
            except QueueFullError:
                refused += 1
        engine.step()
        assert len(engine.scheduler.waiting) <= 12 + 4, i  # preempted ones return to a full queue
    engine.run()
    assert refused > 5 * len(accepted) / 2
    assert [r.token_ids for r in accepted] == [alone(engine, r) for r in accepted]


@pytest.mark.parametrize("policy", ["iteration", "chunked", "similar_length", "interleaved", "speculative_prefill"])
def test_in_an_overload_no_decode_waits_longer_than_one_step(policy, session_seed):
    rng = random.Random(session_seed)
    engine = fake(policy, max_model_len=64, num_blocks=400, max_num_seqs=6)
    decode = engine.add(prompt(3), max_tokens=40, ignore_eos=True)
    engine.step()
    while not decode.finished:
        engine.add(prompt(rng.randint(1, 40), rng.randrange(99)), max_tokens=9)
        held = decode.num_tokens
        engine.step()
        assert decode.num_tokens == held + 1
