"""Random arrivals, pools, siblings, aborts and failures: whatever happens, every request ends as if alone.

What a single step must satisfy (budget, order, seats, no idle budget, every ready decode served) stands in
`fake_engine.Snapshot` and is demanded of every step here too, whole tiles under `align_prefill_tokens` among it.
"""

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from minillm import block_pool
from minillm.errors import PromptError
from minillm.option_words import SCHEDULING_POLICIES
from tests.unit.fake_engine import IN_ORDER, FakeEngine, solo

HEADS = ([1, 2, 3, 2, 1, 3, 3, 2, 1, 1, 2, 2], [1, 2, 3, 2, 3, 3, 1, 1, 2, 1, 2, 1], [0] * 12)  # two begin alike


@dataclass
class Arrival:
    prompt: list[int]
    max_tokens: int
    n: int
    wait: int  # steps before it arrives
    abort_after: int | None  # steps from its arrival
    priority: int = 0


@st.composite
def arrivals(draw):
    head = draw(st.sampled_from(HEADS))[: draw(st.integers(0, 12))]
    tail = draw(st.lists(st.integers(0, 2), max_size=4))
    return Arrival(
        prompt=[*head, *tail] or [1],
        max_tokens=draw(st.integers(1, 14)),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        wait=draw(st.sampled_from([0, 0, 0, 1, 3])),
        abort_after=draw(st.none() | st.none() | st.integers(0, 12)),
        priority=draw(st.sampled_from([0, 0, 0, -1, 3])),
    )


WHOLE_PROMPTS = ("static", "iteration", "similar_length")


def policy_options(policy, choose):
    """Options of one policy's own; `choose` picks one of a list."""
    if policy in ("static", "iteration"):
        return {"pad_batches": choose([True, False])}
    if policy == "similar_length":
        return {"pad_batches": choose([True, False]), "max_group_wait_steps": choose([None, 1, 3])}
    if policy == "interleaved":
        return {"max_long_partial_prefills": choose([None, 2]), "max_overtaken_steps": choose([None, 1, 4])}
    if policy == "speculative_prefill":
        return {
            "speculative_predictor": choose(["frequent", "conversation"]),
            "speculative_chunk_size": choose([None, 4, 9]),
            "speculative_memory_share": choose([None, 0.1, 1.0]),
        }
    return {}


@st.composite
def engines(draw, policies=SCHEDULING_POLICIES):
    policy = draw(st.sampled_from(["chunked", *policies]))
    whole = policy in WHOLE_PROMPTS
    chunked = not whole and (policy == "interleaved" or draw(st.sampled_from([True, True, True, False])))
    max_model_len = draw(st.integers(6, 24))
    budget = draw(st.sampled_from([16, 7, 5, 4, 2, 1])) if chunked else max_model_len
    block_size = draw(st.integers(1, budget if policy == "speculative_prefill" and budget < 4 else 4))
    return {
        "scheduling_policy": policy,
        "block_size": block_size,
        "num_blocks": draw(st.integers(2, 7) | st.integers(5, 16)),
        "max_model_len": max_model_len,
        "max_num_batched_tokens": budget,
        "max_num_seqs": draw(st.sampled_from([6, 4, 3, 2, 1])),
        "prefill_chunk_size": draw(st.none() | st.integers(1, 5)) if chunked else None,
        "align_prefill_tokens": draw(st.none() | st.integers(1, min(budget, 8))) if chunked else None,
        "enable_chunked_prefill": chunked or whole,
        "enable_prefix_caching": policy == "speculative_prefill" or draw(st.sampled_from([True, True, False])),
        **policy_options(policy, lambda values: draw(st.sampled_from(values))),
    }


def must_be_refused(arrival, options):
    length, rows = len(arrival.prompt), options["num_blocks"] * options["block_size"]
    seats = min(options["max_num_seqs"], options["max_num_batched_tokens"])
    return length >= options["max_model_len"] or length > rows or arrival.n > seats


def play(options, trace, failures=None):
    """Let the trace arrive, step until everything ended. Returns the engine and [(arrival, request)]."""
    engine, accepted, aborts = FakeEngine(**options), [], {}
    failures = dict(failures or {})

    def step():
        engine.step(fail=failures.pop(len(engine.steps), None))
        for request in aborts.pop(len(engine.steps), ()):
            engine.abort(request)

    for arrival in trace:
        for _ in range(arrival.wait):
            step()
        if must_be_refused(arrival, options):
            with pytest.raises(PromptError):
                engine.add(arrival.prompt, arrival.max_tokens, arrival.n)
            continue
        request = engine.add(arrival.prompt, arrival.max_tokens, arrival.n, priority=arrival.priority)
        accepted.append((arrival, request))
        if arrival.abort_after is not None:
            aborts.setdefault(len(engine.steps) + arrival.abort_after, []).append(request)
    while engine.scheduler.has_work:
        step()
    engine.idle()
    return engine, accepted


def check_the_end(engine, accepted):
    """Everything ended, every block is free, and every sequence has the tokens of its solo run."""
    assert engine.pool.num_free == engine.pool.num_blocks
    engine.check_pool()
    limits = {"max_model_len": engine.max_model_len, "num_rows": engine.pool.num_blocks * engine.pool.block_size}
    for arrival, request in accepted:
        (family,) = (family for family in engine.families if request in family)
        cut_short = {member.finish_reason for member in family} & {"abort", "error"}
        assert len(family) == arrival.n or cut_short
        for member in family:
            tokens, reason, stop = solo(arrival.prompt, request.params, member.index, **limits)
            if member.finish_reason in ("abort", "error"):
                assert member.token_ids == tokens[: member.num_tokens]
            else:
                assert (member.token_ids, member.finish_reason, member.stop_reason) == (tokens, reason, stop)


def check_the_length(engine):
    """The oldest request advances in every step, so there are no more steps than tokens, ends and idle steps.

    Where prompts go first it advances in the steps without prompts, where batches are closed its batch does, and a
    smaller priority may come between: there the fake engine's own bound on the number of steps has to do.
    """
    priorities = {member.priority for family in engine.families for member in family}
    if engine.config.scheduling_policy in ("prefill_first", "static") or len(priorities) > 1:
        return
    tokens = sum(member.num_tokens + 1 for family in engine.families for member in family)
    idle = sum(not step or step[0][0] == "guess" for step in engine.steps)
    assert len(engine.steps) <= tokens + idle + engine.failed_steps


@given(options=engines(), trace=st.lists(arrivals(), min_size=3, max_size=8), collide=st.booleans())
@settings(max_examples=250, deadline=None)
def test_random_traffic_ends_with_the_tokens_of_solo_runs_and_an_intact_pool(options, trace, collide):
    with pytest.MonkeyPatch.context() as patch:
        if collide:
            patch.setattr(block_pool, "hash_block", lambda parent_hash, tokens: 7)
        engine, accepted = play(options, trace)
    check_the_end(engine, accepted)
    check_the_length(engine)
    sequences = [member for family in engine.families for member in family]
    event(f"preempted: {any(r.num_preemptions for r in sequences)}")
    event(f"kv_cache_full: {any(r.stop_reason == 'kv_cache_full' for r in sequences)}")
    event(f"prefix hit: {any(r.num_cached_tokens for r in sequences)}")
    event(f"siblings: {any(len(family) > 1 for family in engine.families)}")


@given(seed=st.integers(0, 2**32), failing=st.booleans())
@settings(max_examples=80, deadline=None)
def test_crowds_in_a_pool_for_two_or_three_end_with_the_tokens_of_solo_runs(seed, failing):
    rng = random.Random(seed)
    block_size, max_model_len = rng.randint(1, 4), 32
    policy = rng.choice(SCHEDULING_POLICIES)
    whole = policy in WHOLE_PROMPTS
    budget = 32 if whole else rng.choice([4, 8, 32])
    options = {
        "scheduling_policy": policy,
        "block_size": block_size,
        "num_blocks": rng.randint(24, 60) // block_size,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": budget,
        "max_num_seqs": rng.choice([3, 4, 8]),
        "prefill_chunk_size": None if whole else rng.choice([None, None, 3, 5]),
        "align_prefill_tokens": None if whole else rng.choice([None, 2, 3, 4]),
        "enable_prefix_caching": policy == "speculative_prefill" or rng.random() < 0.7,
        **policy_options(policy, rng.choice),
    }
    trace = [
        Arrival(
            prompt=rng.choice(HEADS)[: rng.randint(1, 12)] + rng.choices(range(3), k=rng.randint(0, 6)),
            max_tokens=rng.randint(3, 16),
            n=rng.choice([1, 1, 2, 3]),
            wait=rng.choice([0, 0, 1, 2]),
            abort_after=rng.choice([None, None, None, None, rng.randint(0, 20)]),
        )
        for _ in range(rng.randint(8, 16))
    ]
    failures = {rng.randint(0, 60): rng.choice(["forward", "sample"]) for _ in range(3 * failing)}
    engine, accepted = play(options, trace, failures)
    check_the_end(engine, accepted)
    check_the_length(engine)
    event(f"preempted: {any(r.num_preemptions for family in engine.families for r in family)}")


@given(
    options=engines(),
    trace=st.lists(arrivals(), min_size=1, max_size=6),
    failures=st.dictionaries(st.integers(0, 12), st.sampled_from(["forward", "sample"]), min_size=1, max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_failed_steps_lose_their_own_requests_only_and_leave_nothing_wrong_in_the_cache(options, trace, failures):
    engine, accepted = play(options, trace, failures)
    check_the_end(engine, accepted)
    check_the_length(engine)
    again = [(arrival, engine.add(arrival.prompt, arrival.max_tokens, arrival.n)) for arrival, _ in accepted]
    engine.run()
    check_the_end(engine, again)


@given(options=engines(), trace=st.lists(arrivals(), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_the_same_traffic_gives_the_same_steps(options, trace):
    assert play(options, trace)[0].steps == play(options, trace)[0].steps


@given(options=engines(IN_ORDER), trace=st.lists(arrivals(), min_size=2, max_size=8))
@settings(max_examples=100, deadline=None)
def test_requests_start_in_the_order_of_their_arrival(options, trace):
    _, accepted = play(options, [replace(arrival, priority=0) for arrival in trace])
    starts = [r.first_scheduled_time for _, r in accepted if r.first_scheduled_time is not None]
    assert starts == sorted(starts)
