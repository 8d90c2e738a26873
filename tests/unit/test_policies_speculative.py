"""Speculative prefill: what it may cost a real request, what it may see, what it counts, and what fails with it."""

import random

import pytest

from minillm.request import Status
from minillm.scheduler import Conversations, FrequentPrefixes, SpeculativePrefillScheduler
from tests.unit.fake_engine import FakeEngine

B = 4  # block size of the fake engine


def fake(**options):
    return FakeEngine(
        scheduling_policy="speculative_prefill",
        **{"max_model_len": 400, "num_blocks": 200, "max_num_batched_tokens": 256, **options},
    )


class Fixed:
    """A predictor of one's own: these guesses, whatever happens; it remembers what it was shown."""

    def __init__(self, *guesses):
        self.guesses, self.seen = guesses, []

    def arrived(self, request):
        self.seen.append(("arrived", request.request_id))

    def ended(self, request):
        self.seen.append(("ended", request.request_id))

    def predict(self):
        return [(tokens, len(tokens)) for tokens in self.guesses]


def with_predictor(predictor, **options):
    engine = fake(**options)
    engine.scheduler = SpeculativePrefillScheduler(engine.config, engine.pool, engine.max_model_len, predictor)
    return engine


def fresh(rng, length):
    return [rng.randrange(10**6) for _ in range(length)]


def test_a_guess_that_comes_true_is_found_in_the_cache(session_seed):
    rng = random.Random(session_seed)
    system = fresh(rng, 41)
    engine = with_predictor(Fixed(system))
    engine.idle()
    assert [sum(n for _, n in step) for step in engine.steps] == [40]
    request = engine.add([*system, *fresh(rng, 7)], max_tokens=2)
    engine.run()
    assert request.num_cached_tokens == 40
    counts = engine.scheduler.speculation
    assert (counts.num_warmed_tokens, counts.num_used_tokens, counts.num_wasted_tokens) == (40, 40, 0)
    engine.add([*system, *fresh(rng, 7)], max_tokens=2)
    engine.run()
    assert counts.num_used_tokens == 40, "warmed once, used once, however many find it"


@pytest.mark.parametrize(("option", "expected"), [(None, 64), (64, 64), (30, 28), (B, B)])
def test_a_real_request_waits_for_one_chunk_at_most(session_seed, option, expected):
    rng = random.Random(session_seed)
    engine = with_predictor(Fixed(fresh(rng, 199)), speculative_chunk_size=option)
    for _ in range(2):
        engine.step()
        assert sum(n for _, n in engine.steps[-1]) == expected
    request = engine.add(fresh(rng, 20), max_tokens=3, ignore_eos=True)
    for _ in range(3):
        engine.step()
    assert engine.steps[2:] == [[("r0", 20)], [("r0", 1)], [("r0", 1)]] and request.finished
    engine.step()
    assert engine.steps[-1] == [("guess", expected)], "the guess goes on where it was left"


def test_nothing_is_guessed_while_anyone_waits_or_runs(session_seed):
    rng = random.Random(session_seed)
    engine = with_predictor(Fixed(fresh(rng, 100)), max_num_seqs=1)
    for _ in range(3):
        engine.add(fresh(rng, 10), max_tokens=4)
    assert not engine.scheduler.has_idle_work
    engine.run()
    assert not any("guess" in dict(step) for step in engine.steps)
    assert engine.scheduler.has_idle_work


def test_without_repeats_nothing_is_used_and_what_was_warmed_is_wasted(session_seed):
    rng = random.Random(session_seed)
    engine = with_predictor(Conversations(), num_blocks=60)
    for _ in range(8):
        engine.add(fresh(rng, 70), max_tokens=4)
        engine.run()
        engine.pool.reset_prefix_cache()
        engine.idle()
    counts = engine.scheduler.speculation
    assert counts.num_used_tokens == 0 and counts.num_wasted_tokens == counts.num_warmed_tokens > 0


def test_the_default_predictor_guesses_nothing_from_prompts_that_share_nothing(session_seed):
    rng = random.Random(session_seed)
    engine = fake()
    for _ in range(8):
        engine.add(fresh(rng, 40), max_tokens=2)
        engine.run()
    engine.pool.reset_prefix_cache()
    assert not engine.scheduler.has_idle_work


def test_a_shared_system_prompt_is_warmed_after_the_cache_has_lost_it(session_seed):
    rng = random.Random(session_seed)
    system = fresh(rng, 8 * B + 1)
    engine = fake()
    for _ in range(2):
        engine.add([*system, *fresh(rng, 9)], max_tokens=2)
        engine.run()
    engine.pool.reset_prefix_cache()
    engine.idle()
    request = engine.add([*system, *fresh(rng, 9)], max_tokens=2)
    engine.run()
    assert request.num_cached_tokens == 8 * B == engine.scheduler.speculation.num_used_tokens
    assert engine.scheduler.speculation.num_wasted_tokens == 0


def test_a_conversation_is_warmed_with_its_answer(session_seed):
    rng = random.Random(session_seed)
    engine = fake(speculative_predictor="conversation")
    first = engine.add(fresh(rng, 30), max_tokens=11, ignore_eos=True)
    engine.run()
    engine.pool.reset_prefix_cache()
    engine.idle()
    follow_up = engine.add([*first.token_ids, *fresh(rng, 6)], max_tokens=2)
    engine.run()
    assert follow_up.num_cached_tokens == (30 + 11 - 1) // B * B


def test_a_conversation_that_was_continued_is_guessed_from_its_new_end_only(session_seed):
    rng = random.Random(session_seed)
    engine, predictor = fake(), Conversations(history=2)
    first, other = engine.add(fresh(rng, 9), max_tokens=3), engine.add(fresh(rng, 7), max_tokens=3)
    engine.run()
    predictor.ended(first)
    predictor.ended(other)
    assert [tokens for tokens, _ in predictor.predict()] == [other.token_ids, first.token_ids]
    follow_up = engine.add([*first.token_ids, 1, 2], max_tokens=3)
    predictor.arrived(follow_up)
    assert [tokens for tokens, _ in predictor.predict()] == [other.token_ids]
    engine.run()
    predictor.ended(follow_up)
    assert [tokens for tokens, _ in predictor.predict()] == [follow_up.token_ids, other.token_ids]


def test_frequent_prompts_come_first_and_old_ones_are_forgotten(session_seed):
    rng = random.Random(session_seed)
    engine = fake()
    often, twice, once = fresh(rng, 20), fresh(rng, 24), fresh(rng, 28)
    predictor = FrequentPrefixes(B, history=6)
    requests = [engine.add(tokens, max_tokens=1) for tokens in (twice, often, once, often, twice, often)]
    for request in requests:
        predictor.arrived(request)
    assert [(tokens[:n], n) for tokens, n in predictor.predict()] == [(often, 20), (twice, 24)]
    for _ in range(2):
        predictor.arrived(engine.add(once, max_tokens=1))
    assert [(tokens[:n], n) for tokens, n in predictor.predict()] == [(once, 28), (often, 20)]
    engine.run()


def test_the_guesses_depend_on_the_past_only(session_seed):
    """Two traces with one past and two futures: the same idle steps until the futures begin."""
    rng = random.Random(session_seed)
    system = fresh(rng, 33)
    past = [[*system, *fresh(rng, 5)] for _ in range(3)]
    logs = []
    for _ in range(2):
        engine = fake(num_blocks=40)
        for tokens in past:
            engine.add(tokens, max_tokens=3, ignore_eos=True)
            engine.run()
            engine.pool.reset_prefix_cache()
            engine.idle()
        logs.append(list(engine.steps))
        engine.add(fresh(rng, 50), max_tokens=3)
        engine.run()
    assert logs[0] == logs[1] and any("guess" in dict(step) for step in logs[0])


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_unused_guesses_hold_no_more_than_their_share_of_the_cache(session_seed, share):
    rng = random.Random(session_seed)
    engine = fake(num_blocks=50, speculative_memory_share=share)
    limit = int(50 * share) * B
    for _ in range(12):
        predictor = Fixed(*(fresh(rng, rng.randint(5, 60)) for _ in range(5)))
        engine.scheduler.predictor = predictor
        engine.idle()
        found = sum(len(engine.pool.lookup(tokens)[0]) * B for tokens in predictor.guesses)
        assert 0 < found <= limit
        assert sum(serial is not None for serial in map(engine.pool.serial, range(50))) * B <= limit


def test_guesses_that_do_not_fit_beside_each_other_are_not_computed_for_ever(session_seed):
    rng = random.Random(session_seed)
    guesses = [fresh(rng, 80) for _ in range(4)]
    engine = with_predictor(Fixed(*guesses), num_blocks=60, speculative_memory_share=1.0)
    engine.idle(max_steps=20)
    for _ in range(5):
        engine.add(fresh(rng, 200), max_tokens=2)
        engine.run()
        engine.idle(max_steps=20)
    assert engine.scheduler.speculation.num_warmed_tokens <= sum(map(len, guesses))


def test_a_guess_that_was_lost_is_warmed_again_when_it_was_seen_again(session_seed):
    rng = random.Random(session_seed)
    system = fresh(rng, 8 * B)
    engine = fake()
    for seen in range(1, 5):
        engine.add([*system, *fresh(rng, 3)], max_tokens=2)
        engine.run()
        for _ in range(2):
            engine.pool.reset_prefix_cache()
            engine.idle()
        assert engine.scheduler.speculation.num_warmed_tokens == max(0, seen - 1) * 8 * B


def test_a_predictor_of_ones_own_is_shown_arrivals_and_ends_in_order(session_seed):
    rng = random.Random(session_seed)
    predictor = Fixed(fresh(rng, 30))
    engine = with_predictor(predictor, max_num_seqs=1)
    engine.add(fresh(rng, 5), max_tokens=2, ignore_eos=True)
    aborted = engine.add(fresh(rng, 5), max_tokens=2)
    engine.abort(aborted)
    engine.run()
    engine.idle()
    assert predictor.seen == [("arrived", "r0"), ("arrived", "r1"), ("ended", "r0")]


def test_a_guess_whose_step_fails_leaves_nothing_behind(session_seed):
    rng = random.Random(session_seed)
    system = fresh(rng, 150)
    engine = with_predictor(Fixed(system))
    engine.step()
    engine.step(fail="forward")
    assert engine.pool.num_free == engine.pool.num_blocks
    request = engine.add([*system, 1, 2], max_tokens=3)
    engine.run()
    assert request.finished


def test_an_engine_that_does_not_tell_of_a_failed_guess_loses_no_block(session_seed):
    rng = random.Random(session_seed)
    engine = with_predictor(Fixed(fresh(rng, 150)))
    engine.scheduler.schedule(0.0)  # and nobody commits
    engine.check_pool()
    request = engine.add(fresh(rng, 9), max_tokens=1)
    engine.step()
    assert request.status is Status.FINISHED and engine.pool.num_free == engine.pool.num_blocks
