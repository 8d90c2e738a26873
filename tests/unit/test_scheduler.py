"""The chunked scheduler, case by case, on the fake engine whose every read of the cache is checked."""

import ast
from pathlib import Path

import pytest

from minillm import block_pool, scheduler
from minillm.block_pool import BlockPool
from minillm.config import EngineConfig
from minillm.errors import ConfigError, PromptError, QueueFullError
from minillm.request import Request, Status
from minillm.sampling_params import SamplingParams
from minillm.scheduler import ChunkedScheduler, make_scheduler
from tests.unit.fake_engine import FakeEngine, solo

B = 4  # block size of the fake engine


def prompt(length, seed=0):
    return [(seed * 7 + i * i) % 11 + 4 for i in range(length)]


def expected(engine, request):
    """(tokens, finish_reason, stop_reason) that this request has when it is alone in the world."""
    rows = engine.pool.num_blocks * engine.pool.block_size
    limits = {"max_model_len": engine.max_model_len, "num_rows": rows}
    return solo(request.prompt_token_ids, request.params, request.index, **limits)


def outcome(request):
    return request.token_ids, request.finish_reason, request.stop_reason


def endless(engine, length, seed=0):
    """A request that goes on until something other than itself ends it."""
    return engine.add(prompt(length, seed), max_tokens=10**6, ignore_eos=True)


def computed(engine, request):
    """Tokens computed for this request, over all steps."""
    return sum(n for step in engine.steps for name, n in step if name == request.request_id)


# ---- budget, order, chunks -----------------------------------------------------------------------


def test_a_step_mixes_decodes_and_a_prefill_that_fills_the_budget():
    engine = FakeEngine(max_num_batched_tokens=16)
    engine.add(prompt(5), max_tokens=30, ignore_eos=True)
    engine.add(prompt(6, 1), max_tokens=30, ignore_eos=True)
    engine.step()
    engine.add(prompt(50, 2))
    engine.step()
    assert engine.steps == [[("r0", 5), ("r1", 6)], [("r0", 1), ("r1", 1), ("r2", 14)]]


@pytest.mark.parametrize("option", ["prefill_chunk_size", "long_prefill_token_threshold"])
@pytest.mark.parametrize("chunk", [1, 3, B - 1, B, B + 1, 100])
def test_no_step_computes_more_of_one_prompt_than_the_chunk_size(option, chunk):
    engine = FakeEngine(max_num_batched_tokens=16, **{option: chunk})
    request = engine.add(prompt(30), max_tokens=1)
    engine.run()
    sizes = [n for step in engine.steps for _, n in step]
    limit = min(chunk, 16)
    assert sizes == [limit] * (30 // limit) + [30 % limit] * (30 % limit > 0)
    assert outcome(request) == expected(engine, request)


def test_several_prompts_advance_in_one_step_when_each_is_limited_to_a_chunk():
    engine = FakeEngine(max_num_batched_tokens=10, prefill_chunk_size=4)
    for seed in range(3):
        engine.add(prompt(9, seed))
    engine.step()
    assert engine.steps == [[("r0", 4), ("r1", 4), ("r2", 2)]]


def test_without_chunked_prefill_a_prompt_is_computed_whole_or_not_yet():
    engine = FakeEngine(enable_chunked_prefill=False, max_num_batched_tokens=20, max_model_len=20)
    for seed, length in enumerate((12, 9, 3)):
        engine.add(prompt(length, seed), max_tokens=2)
    engine.run()
    assert engine.steps[0] == [("r0", 12)]  # r1 does not fit beside it, and r2 does not overtake
    assert [("r1", 9), ("r2", 3)] == engine.steps[1][-2:]


def test_without_chunked_prefill_the_budget_must_hold_the_longest_prompt():
    config = EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=63)
    with pytest.raises(ConfigError, match="max_num_batched_tokens=63.*max_model_len=64"):
        make_scheduler(config, BlockPool(4, B), 64)
    make_scheduler(config, BlockPool(4, B), 63)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 20, 33])
def test_never_more_sequences_run_than_allowed_and_all_seats_are_used(max_num_seqs):
    engine = FakeEngine(max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    requests = [engine.add(prompt(1 + i % 5, i), max_tokens=5) for i in range(40)]
    engine.run()
    assert max(len(step) for step in engine.steps) == min(max_num_seqs, 33)
    assert [outcome(r) for r in requests] == [expected(engine, r) for r in requests]


def test_admission_goes_on_after_many_requests_with_siblings_were_aborted_before_their_birth():
    engine = FakeEngine(max_num_seqs=4, prefill_chunk_size=3)
    for i in range(10):
        request = engine.add(prompt(9, i), n=4)
        engine.step()
        engine.abort(request)
    last = engine.add(prompt(9), n=4)
    engine.run()
    assert last.finished and last.finish_reason != "abort"


def test_decodes_wait_one_budget_at_most_while_prompts_keep_arriving():
    budget = 12
    engine = FakeEngine(max_num_batched_tokens=budget, max_num_seqs=6, num_blocks=256, max_model_len=200)
    decode = engine.add(prompt(3), max_tokens=60, ignore_eos=True)
    gap, longest, tokens = 0, 0, decode.num_tokens
    for i in range(60):
        engine.add(prompt(40, i), max_tokens=2)
        step = engine.step()
        gap += step.num_tokens
        if decode.num_tokens > tokens:
            longest, gap, tokens = max(longest, gap), 0, decode.num_tokens
        if decode.finished:
            break
    assert decode.finished and len(engine.steps) == decode.num_tokens - 3
    assert longest == budget


def test_siblings_that_are_born_do_not_starve_the_decodes_behind_them():
    engine = FakeEngine(
        max_num_batched_tokens=8, max_num_seqs=8, prefill_chunk_size=6, num_blocks=256, max_model_len=256
    )
    engine.add([5], n=5, max_tokens=50)
    engine.add(prompt(200), max_tokens=2)
    decode = engine.add([6], max_tokens=50)
    for _ in range(20):
        before = decode.num_tokens
        engine.step()
        assert decode.finished or decode.num_tokens == before + 1


def test_the_same_arrivals_give_the_same_steps():
    def log():
        engine = FakeEngine(num_blocks=9, prefill_chunk_size=5)
        for i in range(9):
            engine.add(prompt(3 * i % 13 + 1, i), n=1 + i % 3)
            engine.step()
        return engine.run().steps

    assert log() == log()


def test_the_first_step_of_a_request_is_stamped_with_the_given_time_and_never_again():
    engine = FakeEngine(num_blocks=3, max_num_batched_tokens=4)
    a, b = engine.add(prompt(4), max_tokens=9, ignore_eos=True), engine.add(prompt(4, 1), max_tokens=9, ignore_eos=True)
    engine.run()
    assert b.num_preemptions > 0
    assert (a.first_scheduled_time, b.first_scheduled_time) == (0.0, 1.0)


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 3 * B])
def test_a_sequence_of_exactly_max_model_len_never_owns_a_block_too_many(length):
    for max_model_len in range(length + 1, length + 2 * B + 2):
        engine = FakeEngine(max_model_len=max_model_len)
        request = endless(engine, length)
        engine.run()
        assert request.num_tokens == max_model_len and request.stop_reason == "max_model_len"


# ---- refusals ------------------------------------------------------------------------------------


def test_a_prompt_larger_than_the_whole_pool_is_refused_with_both_numbers():
    engine = FakeEngine(num_blocks=3)
    with pytest.raises(PromptError, match="13 tokens needs 4 KV blocks.*has 3"):
        engine.add(prompt(13))
    assert not engine.scheduler.has_work
    engine.add(prompt(12))
    engine.run()


@pytest.mark.parametrize("length", [32, 33, 64])
def test_a_prompt_that_leaves_no_room_within_max_model_len_is_refused_with_both_numbers(length):
    engine = FakeEngine(max_model_len=32)
    with pytest.raises(PromptError, match=f"{length} tokens.*max_model_len=32"):
        engine.add(prompt(length))
    engine.add(prompt(31))
    engine.run()


def test_an_empty_prompt_is_refused():
    with pytest.raises(PromptError, match="empty"):
        FakeEngine().add([])


@pytest.mark.parametrize("options", [{"max_num_seqs": 3}, {"max_num_seqs": 9, "max_num_batched_tokens": 3}])
def test_more_completions_than_can_run_at_once_are_refused(options):
    engine = FakeEngine(**options)
    with pytest.raises(PromptError, match="n=4.* 3 "):
        engine.add(prompt(3), n=4)
    engine.add(prompt(3), n=3)
    engine.run()


def test_a_full_queue_refuses_and_frees_its_place_as_soon_as_a_request_starts():
    engine = FakeEngine(max_queued_requests=2, max_num_seqs=1)
    engine.add(prompt(3))
    engine.add(prompt(3))
    with pytest.raises(QueueFullError, match="2 requests.*max_queued_requests=2"):
        engine.add(prompt(3))
    engine.step()
    engine.add(prompt(3))
    assert len(engine.scheduler.waiting) == 2
    engine.run()


# ---- running out of blocks -----------------------------------------------------------------------


@pytest.mark.parametrize(("num_blocks", "room"), [(1, 0), (1, 1), (2, 0), (2, 1), (2, B), (5, 0), (5, 1), (5, B)])
def test_one_sequence_that_fills_every_block_ends_with_a_clear_length_and_the_engine_lives(num_blocks, room):
    rows = num_blocks * B
    engine = FakeEngine(num_blocks=num_blocks)
    request = endless(engine, rows - room)
    engine.run(max_steps=rows + 2)
    assert (request.finish_reason, request.stop_reason) == ("length", "kv_cache_full")
    assert request.num_tokens == rows + 1, "the last token needs no row of its own"
    assert request.num_preemptions == 0
    after = engine.add(prompt(rows, 9), max_tokens=1)
    engine.run(max_steps=rows + 2)
    assert outcome(after) == expected(engine, after)


def test_the_step_in_which_a_sequence_outgrows_the_pool_lists_it_and_computes_others():
    engine = FakeEngine(num_blocks=1)
    request = endless(engine, B)
    other = engine.add(prompt(2))
    engine.step()
    step = engine.step()
    assert step.ended == [request] and not step.preempted
    assert step.scheduled == [(other, 2)]


def test_siblings_that_fill_the_pool_together_all_end_as_each_would_alone():
    engine = FakeEngine(num_blocks=2)
    parent = engine.add(prompt(2 * B), n=3)
    engine.run(max_steps=20)
    family = engine.families[0]
    assert len(family) == 3 and family[0] is parent
    assert [outcome(r) for r in family] == [expected(engine, r) for r in family]


def test_the_newest_running_request_gives_way_and_returns_to_the_front_of_the_queue():
    engine = FakeEngine(num_blocks=4, enable_prefix_caching=False)
    old = engine.add(prompt(2 * B), max_tokens=6, ignore_eos=True)
    new = engine.add(prompt(2 * B, 1), max_tokens=6, ignore_eos=True)
    last = engine.add(prompt(B, 2))
    engine.step()
    assert engine.scheduler.running == [old, new]
    step = engine.step()
    assert step.preempted == [new] and step.scheduled == [(old, 1)]
    assert list(engine.scheduler.waiting) == [new, last]
    assert (new.status, new.num_preemptions, new.num_computed_tokens, new.block_table) == (Status.WAITING, 1, 0, [])
    engine.run()
    assert [outcome(r)[0] for r in (old, new, last)] == [expected(engine, r)[0] for r in (old, new, last)]


def test_a_request_that_is_itself_the_newest_gives_way_to_the_older_ones():
    engine = FakeEngine(num_blocks=4, enable_prefix_caching=False)
    old = engine.add(prompt(2 * B + 1), max_tokens=6, ignore_eos=True)
    new = engine.add(prompt(B), max_tokens=6, ignore_eos=True)
    engine.step()
    step = engine.step()
    assert step.preempted == [new] and step.scheduled == [(old, 1)]
    engine.run()
    assert old.num_preemptions == 0


def test_nobody_is_admitted_in_a_step_that_preempted():
    engine = FakeEngine(num_blocks=4, enable_prefix_caching=False)
    engine.add(prompt(2 * B), max_tokens=6, ignore_eos=True)
    engine.add(prompt(2 * B, 1), max_tokens=6, ignore_eos=True)
    engine.add([5])
    engine.step()
    step = engine.step()
    assert step.preempted and engine.pool.num_free > 0 and len(step.scheduled) == 1


def test_a_resumed_request_computes_prompt_and_generated_tokens_again():
    engine = FakeEngine(num_blocks=5, enable_prefix_caching=False)
    engine.add(prompt(B), max_tokens=9, ignore_eos=True)
    new = engine.add(prompt(2 * B, 1), max_tokens=6, ignore_eos=True)
    while not new.num_preemptions:
        engine.step()
    held, before = new.num_tokens, computed(engine, new)
    assert held > 2 * B, "it was meant to have generated something"
    engine.run()
    assert computed(engine, new) - before == new.num_tokens - 1  # all but the last, which nobody continues


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [5, 6, 8])
def test_a_tiny_pool_gives_the_same_complete_text_as_a_large_one(num_blocks, caching):
    tokens = []
    for blocks in (num_blocks, 200):
        engine = FakeEngine(num_blocks=blocks, enable_prefix_caching=caching)
        requests = [engine.add(prompt(5 + 3 * i % 7, i), max_tokens=10) for i in range(8)]
        engine.run()
        tokens.append([r.token_ids for r in requests])
        preemptions = sum(r.num_preemptions for r in requests)
        assert (preemptions > 0) == (blocks == num_blocks)
    assert tokens[0] == tokens[1]


def test_a_prompt_longer_than_the_budget_is_not_started_before_all_of_it_has_room():
    """Admitted by its first chunk, it would be preempted by the decodes and start again, for ever."""
    engine = FakeEngine(num_blocks=8, max_num_batched_tokens=4, enable_prefix_caching=False)
    decode = engine.add(prompt(4), max_tokens=10, ignore_eos=True)
    engine.step()
    long = engine.add(prompt(7 * B, 1), max_tokens=1)
    while not decode.finished:
        assert long.status is Status.WAITING or len(long.block_table) == 7
        engine.step()
    engine.run(max_steps=10)
    assert long.num_preemptions <= 1 and computed(engine, long) < 2 * 7 * B


def test_when_every_sequence_is_gone_an_empty_step_is_legal():
    engine = FakeEngine()
    step = engine.step()
    assert (step.scheduled, step.block_copies, step.preempted, step.ended, step.num_tokens) == ([], [], [], [], 0)
    requests = [engine.add(prompt(9, i)) for i in range(3)]
    engine.step()
    for request in requests:
        engine.abort(request)
    assert not engine.scheduler.has_work
    assert engine.step().scheduled == []
    assert engine.pool.num_free == engine.pool.num_blocks


# ---- prefix cache --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [k * B + d for k in (1, 2, 65) for d in (-1, 0, 1)])
def test_a_repeated_prompt_computes_only_what_the_cache_does_not_hold(length):
    engine = FakeEngine(max_model_len=400, num_blocks=150, max_num_batched_tokens=512)
    first = engine.add(prompt(length), max_tokens=3)
    engine.run()
    again = engine.add(prompt(length), max_tokens=3)
    engine.step()
    cached = (length - 1) // B * B
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, cached)
    assert engine.steps[-1] == [(again.request_id, length - cached)]
    engine.run()
    assert again.token_ids == first.token_ids


def test_identical_prompts_in_one_step_are_both_computed_and_a_third_finds_the_first():
    engine = FakeEngine(max_num_batched_tokens=32)
    first, second = engine.add(prompt(9), max_tokens=5), engine.add(prompt(9), max_tokens=5)
    engine.step()
    assert engine.steps[-1] == [("r0", 9), ("r1", 9)]
    assert set(first.block_table).isdisjoint(second.block_table)
    table = list(first.block_table)
    third = engine.add(prompt(9), max_tokens=5)
    engine.step()
    assert third.num_cached_tokens == 8 and third.block_table[:2] == table[:2]
    engine.run()


def test_a_prompt_arriving_between_the_chunks_of_its_twin_finds_what_is_computed():
    engine = FakeEngine(max_num_batched_tokens=10, prefill_chunk_size=6)
    engine.add(prompt(20), max_tokens=2)
    engine.step()
    twin = engine.add(prompt(20), max_tokens=2)
    engine.step()
    assert twin.num_cached_tokens == B
    engine.run()


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("how", ["abort", "forward", "sample"])
def test_after_an_abort_or_a_failure_in_mid_prefill_only_sound_blocks_are_found(steps, how):
    engine = FakeEngine(max_num_batched_tokens=6)
    victim = engine.add(prompt(20), max_tokens=2)
    for _ in range(steps):
        engine.step()
    if how == "abort":
        engine.abort(victim)
    else:
        engine.step(fail=how)
    assert victim.finished and engine.pool.num_free == engine.pool.num_blocks
    again = engine.add(prompt(20), max_tokens=2)
    engine.run()
    assert again.num_cached_tokens == (6 * steps // B * B if how == "abort" else 0)
    assert outcome(again) == expected(engine, again)


def test_a_request_that_failed_does_not_take_the_sound_work_of_others_away():
    engine = FakeEngine(max_num_batched_tokens=32)
    sound = engine.add(prompt(9), max_tokens=9)
    engine.step()
    engine.abort(sound)
    other = engine.add(prompt(9, 1), max_tokens=9)
    engine.step(fail="forward")
    assert other.finish_reason == "error"
    again = engine.add(prompt(9), max_tokens=9)
    engine.run()
    assert again.num_cached_tokens == 8


def test_cached_blocks_in_the_free_list_are_not_counted_twice_at_admission():
    engine = FakeEngine(num_blocks=4, max_num_batched_tokens=32)
    engine.add(prompt(2 * B), max_tokens=1)
    engine.run()
    holder = engine.add(prompt(B - 1, 1), max_tokens=4, ignore_eos=True)
    engine.step()
    again = engine.add([*prompt(2 * B), 4, 4, 4, 4, 4], max_tokens=1)  # needs 2 cached and 2 new, 3 are free
    engine.run()
    assert holder.finished and outcome(again)[0] == expected(engine, again)[0]


def test_colliding_hashes_leave_every_result_right(monkeypatch):
    monkeypatch.setattr(block_pool, "hash_block", lambda parent_hash, tokens: 7)
    engine = FakeEngine(num_blocks=30, max_num_batched_tokens=64)
    for _ in range(3):
        requests = [engine.add(prompt(length, seed)) for seed in range(3) for length in (4, 5, 9, 13)]
        engine.run()
        assert [outcome(r) for r in requests] == [expected(engine, r) for r in requests]


def test_cached_tokens_are_those_of_the_first_admission():
    engine = FakeEngine(num_blocks=4)
    engine.add(prompt(B), max_tokens=9, ignore_eos=True)
    victim = engine.add(prompt(B + 1, 1), max_tokens=9, ignore_eos=True)
    engine.run()
    assert victim.num_preemptions > 0 and victim.num_cached_tokens == 0


# ---- siblings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_siblings_share_the_prompt_and_copy_only_what_they_write(n, length):
    engine = FakeEngine(max_num_batched_tokens=64)
    parent = engine.add(prompt(length), n=n, max_tokens=B + 2, ignore_eos=True)
    engine.step()
    family = engine.families[0]
    assert [(r.index, r.request_id) for r in family] == [(0, "r0")] + [(i, f"r0-{i}") for i in range(1, n)]
    assert all(r.params is parent.params and r.prompt_token_ids == prompt(length) for r in family)
    assert all(r.block_table == parent.block_table for r in family)
    assert engine.pool.num_free == 64 - engine.pool.blocks_for(length)
    step = engine.step()
    assert len(step.block_copies) == (n - 1 if length % B else 0)
    full = length // B
    assert all(r.block_table[:full] == parent.block_table[:full] for r in family)
    assert len({r.block_table[full] for r in family}) == n
    engine.run()
    assert [outcome(r) for r in family] == [expected(engine, r) for r in family]


def test_siblings_inherit_the_times_of_the_prompt_they_share():
    engine = FakeEngine()
    parent = engine.add(prompt(5), n=3)
    parent.arrival_time, parent.tokenize_s, parent.prompt = -2.0, 0.5, "text"
    engine.step()
    for child in engine.families[0][1:]:
        assert (child.arrival_time, child.tokenize_s, child.first_scheduled_time) == (-2.0, 0.5, 0.0)
        assert child.prompt == "text"
    engine.run()


def test_a_request_with_siblings_to_come_waits_until_all_have_a_seat():
    engine = FakeEngine(max_num_seqs=4, max_num_batched_tokens=32)
    engine.add(prompt(3), max_tokens=5, ignore_eos=True)
    engine.add(prompt(3, 1), max_tokens=3, ignore_eos=True)
    three = engine.add(prompt(3, 2), n=3)
    single = engine.add(prompt(3, 3))
    engine.step()
    assert list(engine.scheduler.waiting) == [three, single], "the seat left over is not given to a later request"
    engine.step()
    engine.step()
    engine.step()
    assert three.status is Status.RUNNING and single.status is Status.WAITING
    engine.run()


def test_when_not_every_sibling_can_get_a_copy_the_newest_gives_way_and_the_last_writes_in_place():
    engine = FakeEngine(num_blocks=3, max_num_batched_tokens=32)
    engine.add(prompt(2 * B - 1), n=3, max_tokens=3, ignore_eos=True)
    engine.step()
    family = engine.families[0]
    step = engine.step()
    assert step.preempted == family[2:] and len(step.block_copies) == 1 and len(step.scheduled) == 2
    engine.run()
    assert [outcome(r) for r in family] == [expected(engine, r) for r in family]


def test_a_copy_is_right_although_its_source_is_freed_and_reused_in_the_same_step():
    """The chunked policy never does this; another policy on the same books may."""
    engine = FakeEngine(num_blocks=3, max_num_batched_tokens=32)
    engine.add(prompt(2 * B - 1), n=3, ignore_eos=True)
    engine.step()
    first, second, third = engine.families[0]
    other = engine.add(prompt(B, 1))

    def plan(step):
        assert engine.scheduler.make_room(first, step)
        step.scheduled.append((first, 1))
        engine.scheduler.preempt(third, step)
        engine.scheduler.preempt(second, step)
        assert engine.scheduler.admit(other, 16, step) == B

    engine.scheduler.plan = plan
    step = engine.scheduler.schedule(1.0)
    ((src, _),) = step.block_copies
    assert other.block_table == [src]
    engine._forward(step)
    engine._attend(first, 2 * B)
    engine._attend(other, B)


def test_a_sibling_may_end_before_the_others_have_written():
    engine = FakeEngine(max_num_batched_tokens=32)
    engine.add(prompt(5), n=3, max_tokens=6, ignore_eos=True)
    engine.step()
    first, second, third = engine.families[0]
    engine.scheduler.finish(first, "stop")
    step = engine.step()
    assert len(step.block_copies) == 1
    engine.run()
    assert [outcome(r) for r in (second, third)] == [expected(engine, r) for r in (second, third)]


# ---- the end -------------------------------------------------------------------------------------


def test_finish_works_from_every_status_and_only_the_first_reason_counts():
    engine = FakeEngine(max_num_seqs=1)
    running, waiting = engine.add(prompt(5)), engine.add(prompt(5))
    stranger = Request("never added", prompt(5), SamplingParams())
    engine.step()
    for request in (running, waiting, stranger):
        engine.scheduler.finish(request, "abort", "why")
        engine.scheduler.finish(request, "stop")
        assert (request.status, request.finish_reason, request.stop_reason) == (Status.FINISHED, "abort", "why")
        assert request.block_table == []
    assert not engine.scheduler.has_work
    assert engine.pool.num_free == engine.pool.num_blocks


def test_a_request_that_ends_between_schedule_and_commit_is_not_published():
    engine = FakeEngine()
    request = engine.add(prompt(9))
    step = engine.scheduler.schedule(0.0)
    engine.scheduler.finish(request, "abort")
    engine.scheduler.commit(step)
    engine.check_pool()
    assert engine.pool.lookup(prompt(10))[0] == []


def test_the_policy_is_chosen_by_name():
    assert type(make_scheduler(EngineConfig(scheduling_policy="chunked"), BlockPool(4, B), 16)) is ChunkedScheduler


def test_no_scheduler_reads_a_clock_or_imports_torch():
    for path in sorted(Path(scheduler.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert imported and not {name.split(".")[0] for name in imported} & {"torch", "numpy", "time", "datetime"}, path
