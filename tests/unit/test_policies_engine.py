"""Every policy drives the real engine: tiny random model, float32, real cache, tokens equal to those of solo runs."""

import json
import random

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.batch import Batch
from minillm.cli import main
from minillm.errors import ConfigError, StepError
from minillm.kv_cache import KVLayer, copy_rows_and_padding
from minillm.option_words import SCHEDULING_POLICIES
from minillm.scheduler import SpeculativePrefillScheduler
from tests.unit.engines import GREEDY, MAX_LEN, make_engine, random_prompts, run, sure_prompts

ARMS = {policy: {} for policy in SCHEDULING_POLICIES}
ARMS["static, padded"] = {"scheduling_policy": "static", "pad_batches": True}
ARMS["iteration, padded"] = {"scheduling_policy": "iteration", "pad_batches": True}
ARMS["similar_length, padded"] = {"scheduling_policy": "similar_length", "pad_batches": True}
WHOLE_PROMPTS = ("static", "iteration", "similar_length")


def engine_of(tiny, arm, **options):
    options = {"scheduling_policy": arm, **ARMS[arm], **options}
    if options["scheduling_policy"] in WHOLE_PROMPTS:
        options["max_num_batched_tokens"] = MAX_LEN
    return make_engine(tiny, **options)


@pytest.fixture(scope="module")
def answered(tiny, session_seed):
    return sure_prompts(tiny, [3, 40, 17, 16, 1, 90, 33], session_seed)


@pytest.mark.parametrize("body", ["cpu", "sdpa", "naive"])
@pytest.mark.parametrize("arm", ARMS)
def test_tokens_equal_those_of_a_solo_run(tiny, answered, arm, body):
    prompts, alone = answered
    assert run(engine_of(tiny, arm, body=body), prompts) == alone
    assert run(engine_of(tiny, arm, body=body, num_blocks=9), prompts) == alone  # with preemptions
    assert run(engine_of(tiny, arm, body=body, max_num_seqs=2), prompts) == alone


@pytest.mark.parametrize("arm", ["static, padded", "iteration, padded", "similar_length, padded"])
def test_a_rectangle_is_really_computed_and_leaves_nothing_in_the_cache(tiny, session_seed, arm):
    engine = engine_of(tiny, arm)
    seen, build = [], engine.make_batch

    def spy(step, *args):
        batch = build(step, *args)
        seen.append((step, batch))
        return batch

    engine.make_batch = spy
    run(engine, random_prompts(tiny, [20, 23, 22, 9, 60], session_seed))
    assert any(step.padding for step, _ in seen)
    for step, batch in seen:
        tokens = step.num_tokens
        assert batch.num_tokens == step.num_rows == tokens + sum(step.padding)
        assert (batch.slot_mapping[:tokens] >= 0).all() and (batch.slot_mapping[tokens:] == -1).all()
        assert len(batch.logits_indices) <= len(step.scheduled)


def test_padding_rows_stand_behind_the_requests_like_fresh_prompts():
    batch = Batch.build([[4, 5, 6], [9]], [7, 10], [[2, 5], [7, 1, 3]], 4, padding=[5, 2])
    assert batch.token_ids.tolist() == [4, 5, 6, 9] + [0] * 7
    assert batch.positions.tolist() == [4, 5, 6, 9, 0, 1, 2, 3, 4, 0, 1]
    assert batch.slot_mapping.tolist() == [20, 21, 22, 13] + [-1] * 7
    assert batch.query_start_loc.tolist() == [0, 3, 4, 9, 11] and batch.context_lens == [7, 10, 5, 2]
    assert batch.logits_indices.tolist() == [2, 3]


def test_a_device_writes_the_same_pages_without_a_look_at_the_slots(session_seed):
    torch.manual_seed(session_seed)
    rows, slots = torch.randn(7, 2, 4), torch.tensor([*torch.randperm(12)[:4].tolist(), -1, -1, -1])
    for count in (7, 4, 1):  # with padding, and without
        pages = torch.full((3, 4, 2, 4), torch.nan)
        wanted = pages.clone()
        wanted.flatten(0, 1)[slots[: min(count, 4)]] = rows[: min(count, 4)]
        copy_rows_and_padding(pages, rows[:count], slots[:count])
        assert torch.equal(pages.nan_to_num(7), wanted.nan_to_num(7))
    pages, rows, slots = pages.to("meta"), rows.to("meta"), slots.to("meta")  # no values to look at
    KVLayer(pages, pages).write(rows, rows, slots)


def longest_gap(tiny, policy, budget, seed):
    """Most tokens that were computed between two tokens of a request, while prompts kept arriving."""
    engine = make_engine(tiny, scheduling_policy=policy, max_num_batched_tokens=budget, max_num_seqs=8)
    rng = random.Random(seed)
    prompts = random_prompts(tiny, [rng.randint(40, 60) for _ in range(12)], seed)
    reader = engine.make_request(prompts.pop(), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    engine.add(reader)
    schedule, tokens, gap, longest = engine.scheduler.schedule, 0, 0, 0

    def spy(now):
        nonlocal tokens
        step = schedule(now)
        tokens += step.num_tokens
        return step

    engine.scheduler.schedule = spy
    while not reader.finished:
        held, before = len(reader.token_times), tokens
        if held and prompts:
            params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
            engine.add(engine.make_request(prompts.pop(), params))
        engine.step()
        gap += tokens - before
        if len(reader.token_times) > held:
            longest, gap = max(longest, gap if held else 0), 0
    return longest


def test_the_same_trace_has_a_decode_gap_of_one_budget_under_chunked_and_three_under_prefill_first(tiny, session_seed):
    budget = 32
    assert longest_gap(tiny, "chunked", budget, session_seed) <= budget
    assert longest_gap(tiny, "prefill_first", budget, session_seed) >= 3 * budget


def test_a_guess_is_computed_by_the_engine_in_steps_of_nobody_and_changes_no_token(tiny, session_seed):
    system, a, b, c = random_prompts(tiny, [35, 9, 9, 9], session_seed)
    prompts = [system + tail for tail in (a, b, c)]
    alone = [run(make_engine(tiny), [prompt])[0] for prompt in prompts]
    engine = engine_of(tiny, "speculative_prefill")
    assert isinstance(engine.scheduler, SpeculativePrefillScheduler)
    assert run(engine, prompts[:2]) == alone[:2]
    engine.scheduler.block_pool.reset_prefix_cache()
    steps = 0
    while engine.scheduler.has_idle_work:
        assert engine.step() == []
        steps += 1
    assert steps == 1 and not engine.has_work
    request = engine.make_request(prompts[2], GREEDY)
    engine.add(request)
    while engine.has_work:
        engine.step()
    assert request.output_token_ids == alone[2] and request.num_cached_tokens == 32
    assert engine.scheduler.speculation.num_used_tokens == engine.scheduler.speculation.num_warmed_tokens == 32


def test_policies_are_chosen_in_python_and_wrong_options_are_refused_there():
    prompts = [[1, 2, 3], list(range(40)), [7]]
    with LLM("random:tiny", dtype="float32") as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    for options in ARMS.values():
        options = options or {"scheduling_policy": "interleaved", "max_long_partial_prefills": 2}
        with LLM("random:tiny", dtype="float32", max_model_len=256, **options) as llm:
            assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == expected
    with pytest.raises(ConfigError, match="max_long_partial_prefills"):
        LLM("random:tiny", max_long_partial_prefills=2)


def test_policies_are_chosen_on_the_command_line(capsys):
    model = ["--model", "random:tiny", "--dtype", "float32", "--max-model-len", "256", "--max-tokens", "5", "--json"]
    texts = []
    for policy in (["chunked"], ["static", "--pad-batches"], ["similar_length", "--max-group-wait-steps", "3"]):
        assert main(["generate", "Hello", "Good morning to you", *model, "--scheduling-policy", *policy]) == 0
        texts.append([row["text"] for row in json.loads(capsys.readouterr().out)])
    assert texts[0] == texts[1] == texts[2]
    assert main(["generate", "Hello", *model, "--pad-batches"]) == 2
    assert "pad_batches" in capsys.readouterr().err


def test_a_guess_whose_step_fails_leaves_no_block_behind(tiny, session_seed):
    system, a, b = random_prompts(tiny, [35, 9, 9], session_seed)
    engine = engine_of(tiny, "speculative_prefill")
    run(engine, [system + a, system + b])
    pool = engine.scheduler.block_pool
    pool.reset_prefix_cache()
    forward, engine.model = engine.model.forward, Failing(engine.model)
    with pytest.raises(StepError, match="device lost"):
        engine.step()
    pool.check([])
    assert pool.num_free == pool.num_blocks and not pool.lookup(system)[0]
    engine.model.forward = forward
    assert run(engine, [system + a]) == run(make_engine(tiny), [system + a])


class Failing:
    """A model whose forward raises until it is given another."""

    def __init__(self, model):
        self.inner = model

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def forward(self, *inputs):
        raise RuntimeError("device lost")
