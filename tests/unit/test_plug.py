"""Small functions as parts of the engine: same tokens as the reference, every call counted, wrong answers refused."""

import math
import random

import pytest
import torch

from minillm.attention import naive
from minillm.batch import Batch
from minillm.block_pool import BlockPool
from minillm.config import EngineConfig
from minillm.course import plug
from minillm.errors import GradeError, StepError
from tests.unit.engines import MAX_LEN, B, make_engine, random_prompts, run
from tests.unit.fake_engine import FakeEngine, Snapshot, solo


def dense(q, k, v):
    """Causal attention from its definition, as a learner may write it."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,shd->hns", q, k) / math.sqrt(q.shape[2])
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + k.shape[0] - q.shape[0])
    return torch.einsum("hns,shd->nhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def masked(q, k, v, mask):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,shd->hns", q, k) / math.sqrt(q.shape[2])
    return torch.einsum("hns,shd->nhd", scores.masked_fill(~mask, -math.inf).softmax(-1), v)


def causal(n, keys, window=None):
    distance = torch.arange(keys - n, keys)[:, None] - torch.arange(keys)
    return (distance >= 0) & (distance < (window or keys))


def join(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse == -math.inf, 0.0)  # behind a window a row may have seen no key in either piece
    return out_a * (lse_a - base).exp()[..., None] + out_b * (lse_b - base).exp()[..., None], lse


def slots(block_table, positions, block_size):
    return block_table[positions // block_size] * block_size + positions % block_size


def first_come(waiting, running, budget, free_blocks):
    """Decodes first, then prefill in order of arrival; the newest go when blocks are short."""
    plan, keep = [], list(running)
    needed = lambda: sum(r.blocks_needed for r in keep)  # noqa: E731
    while keep and needed() > free_blocks:
        newest = keep.pop()
        plan.append((newest.id, 0))
        free_blocks += newest.blocks_held
    preempted = bool(plan)
    free_blocks -= needed()
    for r in [r for r in keep if r.num_uncomputed == 1] + [r for r in keep if r.num_uncomputed > 1]:
        if n := min(r.num_uncomputed, budget):
            plan.append((r.id, n))
            budget -= n
    for r in waiting if not preempted else ():
        if not budget or r.blocks_needed > free_blocks:
            break
        n = min(r.num_uncomputed, budget)
        plan.append((r.id, n))
        budget, free_blocks = budget - n, free_blocks - r.blocks_needed
    return plan


@pytest.fixture
def prompts(tiny, session_seed):
    shared = random_prompts(tiny, [2 * B], session_seed)[0]
    tails = random_prompts(tiny, [1, 5, B - 1, B, B + 1, 40], session_seed + 1)
    return [shared + tail for tail in tails[:3]] + tails[3:]


@pytest.fixture
def expected(tiny, prompts):
    return run(make_engine(tiny), prompts)


# ---- the same tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [lambda: plug.attention(dense), lambda: plug.attention(masked, mask=causal), lambda: plug.merge(join, num_keys=7)],
    ids=["dense", "dense with a mask", "merge"],
)
def test_learner_attention_gives_the_engines_tokens_and_its_calls_are_counted(tiny, prompts, expected, part):
    engine = make_engine(tiny)
    engine.attend = part = part()
    assert run(engine, prompts) == expected
    assert part.calls >= 2 * 20 * len(prompts)  # layers x tokens x requests


def test_learner_slots_and_hash_give_the_engines_tokens_and_its_hits(tiny, prompts, expected):
    engine = make_engine(tiny)
    pool = engine.scheduler.block_pool = BlockPool(
        64, B, hash_fn=(hashes := plug.hash_block(lambda parent, tokens: parent * 31 + sum(tokens)))
    )
    engine.make_batch = mapping = plug.slot_mapping(slots)
    assert run(engine, prompts) == expected
    assert mapping.calls >= 20 * len(prompts) and hashes.calls >= 6
    assert len(pool.lookup(prompts[0])[0]) == 2


def test_learner_slots_leave_the_padding_of_a_rectangle_out_of_the_cache(tiny, prompts, expected):
    options = {"scheduling_policy": "iteration", "pad_batches": True, "max_num_batched_tokens": MAX_LEN}
    engine = make_engine(tiny, **options)
    engine.make_batch = plug.slot_mapping(slots)
    assert run(engine, prompts) == expected


def test_a_constant_hash_costs_comparisons_and_no_token(tiny, prompts, expected):
    engine = make_engine(tiny)
    engine.scheduler.block_pool = BlockPool(64, B, hash_fn=plug.hash_block(lambda parent, tokens: 7))
    assert run(engine, prompts) == expected


@pytest.mark.parametrize("num_blocks, budget", [(64, 64), (9, 64), (9, 7), (7, 16)])
def test_learner_schedule_gives_the_engines_tokens_also_when_it_has_to_preempt(
    tiny, prompts, expected, num_blocks, budget
):
    engine = make_engine(tiny, num_blocks=num_blocks)
    config = EngineConfig(block_size=B, max_num_batched_tokens=budget, max_num_seqs=6)
    part = plug.schedule(first_come)
    engine.scheduler = part(config, engine.scheduler.block_pool, MAX_LEN)
    assert run(engine, prompts) == expected
    assert part.calls > 20


@pytest.mark.parametrize("alone", [True, False], ids=["no sharing", "siblings and shared prefixes"])
@pytest.mark.parametrize("turn", range(4))
def test_a_schedule_function_keeps_every_promise_of_the_scheduler(turn, alone, session_seed, monkeypatch):
    """Random requests on the engine without tensors that proves each read row. Where blocks are shared, a function
    that sees numbers from before the step may start a request one step late, or with fewer tokens than it turns out to
    have left when another one takes the block that it would have found; and as each of two siblings frees no block that
    both hold, it may preempt everybody, for one step. The other promises stay."""
    if not alone:
        monkeypatch.setattr(Snapshot, "_has_no_room", lambda *args: True)
        monkeypatch.setattr(Snapshot, "knows_hits", False)
        monkeypatch.setattr(Snapshot, "knows_family_blocks", False)
    rng = random.Random(session_seed + turn)
    sizes = dict(num_blocks=rng.randint(8, 30), max_num_batched_tokens=rng.randint(3, 20), max_num_seqs=5)
    engine = FakeEngine(enable_prefix_caching=not alone, **sizes)
    engine.scheduler = plug.schedule(first_come)(engine.config, engine.pool, engine.max_model_len)
    jobs = []
    for _ in range(12):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
        n = 1 if alone else rng.randint(1, 3)
        jobs.append((prompt, engine.add(prompt, max_tokens=rng.randint(1, 12), n=n, ignore_eos=True)))
        for _ in range(rng.randrange(4)):
            if engine.scheduler.has_work:
                engine.step()
    engine.run()
    rows = engine.pool.num_blocks * engine.pool.block_size
    for family, (prompt, request) in zip(engine.families, jobs, strict=True):
        for member in family:
            wanted = solo(prompt, request.params, member.index, max_model_len=engine.max_model_len, num_rows=rows)
            assert (member.token_ids, member.finish_reason, member.stop_reason) == wanted


# ---- answers that cannot be used -------------------------------------------------------------------


def test_attention_of_the_wrong_shape_is_not_broadcast(tiny):
    engine = make_engine(tiny)
    engine.attend = plug.attention(lambda q, k, v: q[:1] if len(q) > 1 else q)
    with pytest.raises(GradeError, match=r"<lambda> returned shape \[1, 4, 16\].* \[5, 4, 16\]"):
        run(engine, [[1, 2, 3, 4, 5]])
    assert engine.scheduler.block_pool.num_free == 64


def test_attention_without_a_mask_is_refused_where_a_layer_has_a_window():
    q, k = torch.randn(3, 2, 8), torch.randn(9, 1, 8)
    wanted = naive.attention(q, k, k, 4)[0]
    body = plug.attention(dense)
    with pytest.raises(GradeError, match="window of 4"):
        body._body._output(q, k, k, 4)
    assert torch.allclose(plug.attention(masked, causal)._body._output(q, k, k, 4), wanted, atol=1e-5)
    assert torch.allclose(plug.merge(join, 2)._body._output(q, k, k, 4), wanted, atol=1e-5)


def test_an_error_in_a_learners_function_costs_its_step_and_no_block(tiny):
    engine = make_engine(tiny)
    engine.attend = plug.attention(lambda q, k, v: q @ torch.ones(3, 3))
    with pytest.raises(StepError):
        run(engine, [[1, 2, 3]])
    assert engine.scheduler.block_pool.num_free == 64


def test_slots_of_the_wrong_kind_and_hashes_that_are_no_int_are_refused(tiny):
    engine = make_engine(tiny)
    engine.make_batch = plug.slot_mapping(lambda table, positions, size: [0])
    with pytest.raises(GradeError, match="returned list"):
        run(engine, [[1, 2, 3]])
    with pytest.raises(GradeError, match="returned list; the block pool needs an int"):
        plug.hash_block(lambda parent, tokens: [1])(0, (1, 2))


PLANS = {
    "a name nobody has": (lambda w, r, b, f: [("x", 1)], "names 'x'"),
    "more than there is": (lambda w, r, b, f: [(w[0].id, 99)], "'r0' 99 tokens; it has 6"),
    "nothing of a waiting one": (lambda w, r, b, f: [(w[0].id, 0)], "'r0' 0 tokens"),
    "half a token": (lambda w, r, b, f: [(w[0].id, 1.5)], "'r0' 1.5 tokens"),
    "twice": (lambda w, r, b, f: [(w[0].id, 1), (w[0].id, 1)], "twice"),
    "no progress": (lambda w, r, b, f: [], "no progress"),
    "over budget": (lambda w, r, b, f: [(c.id, c.num_uncomputed) for c in w[:2]], "12 tokens of a budget of 8"),
    "more blocks than free": (lambda w, r, b, f: [(c.id, 1) for c in w], "needs 6 blocks and 5 are free"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_cannot_be_is_refused_before_anything_of_it_happened(name):
    fn, message = PLANS[name]
    engine = FakeEngine(num_blocks=5, max_num_batched_tokens=8, enable_prefix_caching=False)
    for _ in range(3):
        engine.add([1, 2, 3, 0, 1, 2])
    scheduler = plug.schedule(fn)(engine.config, engine.pool, engine.max_model_len)
    scheduler.waiting = engine.scheduler.waiting
    with pytest.raises(GradeError, match=message):
        scheduler.schedule(0.0)
    assert len(scheduler.waiting) == 3 and engine.pool.num_free == 5 and not scheduler.running


def test_part_of_a_prompt_is_refused_where_prompts_run_in_one_step():
    config = EngineConfig(block_size=4, max_num_batched_tokens=64, enable_chunked_prefill=False)
    scheduler = plug.schedule(lambda w, r, b, f: [(w[0].id, 2)])(config, BlockPool(8, 4), 64)
    engine = FakeEngine()
    scheduler.waiting.append(engine.add([1, 2, 3, 0]))
    with pytest.raises(GradeError, match="2 of 4 tokens"):
        scheduler.schedule(0.0)


def test_a_candidate_says_what_it_would_take():
    seen = []

    def schedule(waiting, running, budget, free_blocks):
        seen.append((list(waiting), list(running), budget, free_blocks))
        return first_come(waiting, running, budget, free_blocks)

    engine = FakeEngine(num_blocks=9, block_size=4, max_num_batched_tokens=6)
    engine.scheduler = plug.schedule(schedule)(engine.config, engine.pool, engine.max_model_len)
    engine.add([1, 1, 1, 1, 1], max_tokens=8, ignore_eos=True)
    engine.step()
    engine.add([1, 1, 1, 1, 2, 2], max_tokens=8, ignore_eos=True)
    engine.step()
    (first, *_), (second, *_) = seen[0][0], seen[1][0]
    assert first == ("r0", 5, 0, 2, 0) and seen[0][2:] == (6, 9)
    assert second == ("r1", 6, 4, 1, 0), "its first block lies in the cache and is in use"
    assert seen[1][1] == [("r0", 6, 5, 0, 2)] and seen[1][3] == 7


def test_batches_of_the_plugged_mapping_are_those_of_the_reference():
    table = [3, 0, 5]
    batch = Batch.build([[1, 2], [7]], [6, 9], [table[:2], table], 4)
    part = plug.slot_mapping(slots)
    parts = [
        part.tensor(p.shape, t, p, 4) for p, t in zip(batch.positions.split([2, 1]), batch.block_tables, strict=True)
    ]
    assert torch.cat(parts).tolist() == batch.slot_mapping.tolist() and part.calls == 2
