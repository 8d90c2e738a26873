"""The engine's promises when things end early, fail, or are measured: random tiny model, real parts."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from minillm import LLM, SamplingParams
from minillm.engine import Engine
from minillm.errors import EngineClosedError, NumericsError, PromptError, QueueFullError, StepError
from minillm.profiler import PART_NAMES
from tests.unit.engines import GREEDY, make_engine, random_prompts, run, sure_prompts


def drain(engine):
    outputs = {}
    for _ in range(2000):
        if not engine.has_work:
            return outputs
        for chunk in engine.step():
            if chunk.output:
                outputs[chunk.request_id] = chunk.output
    raise AssertionError("no progress in 2,000 steps")


def all_blocks_are_free(engine):
    pool = engine.scheduler.block_pool
    pool.check([])
    return pool.num_free == pool.num_blocks and not engine.scheduler.running and not engine.scheduler.waiting


class FailsAt:
    """The real model, but forward number `k` raises after it has written K and V."""

    def __init__(self, model, k, error):
        self.inner, self.k, self.error, self.calls = model, k, error, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def forward(self, *args):
        self.calls += 1
        logits = self.inner.forward(*args)
        if self.calls == self.k:
            raise self.error
        return logits


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_an_exception_in_a_step_returns_every_block_and_the_engine_goes_on(tiny, session_seed, k):
    prompts, expected = sure_prompts(tiny, [40, 17, 16, 3], session_seed)
    engine = make_engine(tiny, max_num_batched_tokens=32)
    engine.model = FailsAt(engine.model, k, RuntimeError("device lost"))
    requests = [engine.make_request(p, GREEDY) for p in prompts]
    for request in requests:
        engine.add(request)
    with pytest.raises(StepError, match="device lost") as caught:
        drain(engine)
    lost = [r for r in requests if r.finish_reason == "error"]
    assert lost and {r.request_id for r in lost} == set(caught.value.request_ids)
    engine.scheduler.block_pool.check([r.block_table for r in engine.scheduler.running])
    drain(engine)
    survivors = [(r, tokens) for r, tokens in zip(requests, expected, strict=True) if r not in lost]
    assert all(r.output_token_ids == tokens for r, tokens in survivors)
    assert all_blocks_are_free(engine)
    assert run(engine, prompts) == expected  # nothing of the failed step may be found in the prefix cache


def test_nan_weights_are_reported_and_leave_no_block_behind(session_seed):
    with LLM("random:tiny", dtype="float32") as llm:
        forward = llm.engine.model.forward
        llm.engine.model.forward = lambda *args: forward(*args) * float("nan")
        with pytest.raises(NumericsError, match="NaN"):
            llm.generate([1, 2, 3], use_tqdm=False)
        assert all_blocks_are_free(llm.engine)
        llm.engine.model.forward = forward
        assert llm.generate([1, 2, 3], use_tqdm=False)[0].finished


def test_a_keyboard_interrupt_frees_everything_and_the_engine_stays_usable(session_seed):
    with LLM("random:tiny", dtype="float32") as llm:
        expected = llm.generate([[1, 2, 3], [4, 5]], GREEDY, use_tqdm=False)
        llm.engine.model = FailsAt(llm.engine.model, 3, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3], [4, 5]], GREEDY, use_tqdm=False)
        assert all_blocks_are_free(llm.engine) and not llm.engine.has_work
        again = llm.generate([[1, 2, 3], [4, 5]], GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in expected]


def test_ctrl_c_at_any_line_of_adding_a_request_leaves_nothing_behind():
    with LLM("random:tiny", dtype="float32") as llm:
        adding = {f.__code__ for f in (Engine.add, Engine._enter, type(llm.engine.scheduler).add)}
        for stop_at in range(1, 100):
            lines = 0

            def trace(frame, event, arg, stop_at=stop_at):
                nonlocal lines
                lines += event == "line"
                if event == "line" and lines == stop_at:
                    raise KeyboardInterrupt
                return trace if frame.f_code in adding else None

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                llm.generate([1, 2, 3], SamplingParams(max_tokens=1), use_tqdm=False)
                break
            except KeyboardInterrupt:
                assert all_blocks_are_free(llm.engine)
                assert not llm.engine.has_work and not llm.engine.scheduler.waiting
            finally:
                sys.settrace(before)
        assert stop_at > 10 and lines < stop_at, "each line was interrupted once, and then none"


def test_leaving_a_stream_early_frees_its_blocks():
    with LLM("random:tiny", dtype="float32") as llm:
        stream = llm.stream([1, 2, 3], GREEDY)
        next(stream)
        assert llm.engine.scheduler.running
        stream.close()
        assert all_blocks_are_free(llm.engine) and not llm.engine.has_work


def test_abort_gives_what_there_is_and_frees_the_blocks_at_once(tiny, session_seed):
    engine = make_engine(tiny)
    a, b = (engine.make_request(p, GREEDY) for p in random_prompts(tiny, [20, 30], session_seed))
    engine.add(a)
    engine.add(b)
    for _ in range(4):
        engine.step()
    output = engine.abort(a.request_id)
    assert output.outputs[0].finish_reason == "abort" and output.outputs[0].token_ids == a.output_token_ids != []
    engine.scheduler.block_pool.check([b.block_table])
    assert engine.abort(a.request_id) is None
    drain(engine)
    assert b.finish_reason == "length" and all_blocks_are_free(engine)


def test_aborting_one_of_n_siblings_before_their_birth_leaves_no_sibling(tiny):
    engine = make_engine(tiny, prefill_chunk_size=8)
    request = engine.make_request(list(range(30)), SamplingParams(n=3, temperature=1.0, seed=1))
    engine.add(request)
    engine.step()
    engine.abort(request.request_id)
    assert all_blocks_are_free(engine) and not engine.has_work


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_random_arrivals_and_aborts_in_a_tiny_pool_end_with_the_tokens_of_a_solo_run(tiny, data):
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    prompts, alone = sure_prompts(tiny, lengths, data.draw(st.integers(0, 10**6)), 12)
    news = data.draw(st.lists(st.integers(1, 12), min_size=len(prompts), max_size=len(prompts)))
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in news]
    chunk = data.draw(st.sampled_from([None, 1, 7, 16]))
    engine = make_engine(tiny, num_blocks=data.draw(st.integers(5, 9)), prefill_chunk_size=chunk)
    requests = [engine.make_request(p, s) for p, s in zip(prompts, params, strict=True)]
    late = data.draw(st.integers(0, len(requests)))
    for request in requests[late:]:
        engine.add(request)
    for request in requests[:late]:
        engine.step()
        engine.add(request)
    victims = data.draw(st.sets(st.sampled_from(range(len(requests)))))
    for victim in victims:
        engine.step()
        engine.abort(requests[victim].request_id)
        engine.scheduler.block_pool.check([r.block_table for r in engine.scheduler.running])
    drain(engine)
    assert all_blocks_are_free(engine)
    for i, request in enumerate(requests):
        expected = alone[i][: news[i]]
        assert request.finished
        assert request.output_token_ids == expected[: len(request.output_token_ids)]
        if i not in victims:
            assert request.output_token_ids == expected


def test_one_sequence_that_fills_every_block_ends_with_a_clear_length(tiny, session_seed):
    engine = make_engine(tiny, num_blocks=2)
    request = engine.make_request(
        random_prompts(tiny, [20], session_seed)[0], SamplingParams(max_tokens=100, ignore_eos=True)
    )
    engine.add(request)
    outputs = drain(engine)
    completion = outputs[request.request_id].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("length", "kv_cache_full")
    assert 20 + len(completion.token_ids) == 2 * 16 + 1  # the last token needs no block of its own
    assert all_blocks_are_free(engine)
    run(engine, [[1, 2, 3]])


def test_a_request_that_ended_in_a_step_that_fails_is_still_delivered(tiny, session_seed):
    engine = make_engine(tiny, num_blocks=2)
    fills_the_pool, waits = random_prompts(tiny, [20, 3], session_seed)
    first = engine.make_request(fills_the_pool, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    second = engine.make_request(waits, GREEDY)
    engine.model = FailsAt(engine.model, 2 * 16 - 20 + 2, RuntimeError("device lost"))  # the second one's first step
    engine.add(first)
    engine.add(second)
    with pytest.raises(StepError):
        drain(engine)
    assert second.finish_reason == "error" and first.stop_reason == "kv_cache_full"
    assert engine.has_work and list(drain(engine)) == [first.request_id]
    assert all_blocks_are_free(engine)


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers(tiny):
    engine = make_engine(tiny, num_blocks=2)
    with pytest.raises(PromptError, match="3.*2|40.*32"):
        engine.add(engine.make_request([1] * 40, GREEDY))
    with pytest.raises(PromptError, match="200.*128"):
        engine.add(engine.make_request([1] * 200, GREEDY))
    assert not engine.has_work and all_blocks_are_free(engine)


@pytest.mark.parametrize("prompt", ["", [], [-1], [10**6], [1.5], ["a"], None, 7, {"a": 1}])
def test_bad_prompts_are_refused_before_anything_is_queued(prompt):
    with LLM("random:tiny", dtype="float32") as llm:
        with pytest.raises(PromptError):
            llm.generate([[1, 2], prompt], GREEDY, use_tqdm=False)
        assert not llm.engine.has_work and all_blocks_are_free(llm.engine)


def test_a_full_queue_refuses_and_loses_nothing():
    with LLM("random:tiny", dtype="float32", max_queued_requests=2) as llm:
        with pytest.raises(QueueFullError, match="2"):
            llm.generate([[1], [2], [3]], GREEDY, use_tqdm=False)
        assert not llm.engine.has_work and all_blocks_are_free(llm.engine)
        assert len(llm.generate([[1], [2]], GREEDY, use_tqdm=False)) == 2


def test_a_closed_engine_says_so_and_closing_twice_is_fine():
    llm = LLM("random:tiny", dtype="float32")
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.generate([1, 2], GREEDY, use_tqdm=False)


def test_several_engines_live_side_by_side_and_give_their_memory_back():
    import gc
    import weakref

    tensors = []
    for _ in range(3):
        with LLM("random:tiny", dtype="float32") as a, LLM("random:tiny-qwen3", dtype="float32") as b:
            first = a.generate([1, 2, 3], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
            b.generate([1, 2, 3], GREEDY, use_tqdm=False)
            assert a.generate([1, 2, 3], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == first
            tensors += [weakref.ref(t) for llm in (a, b) for t in llm.engine.kv_cache.tensors]
    gc.collect()
    assert all(ref() is None for ref in tensors)


# ---- stopping ------------------------------------------------------------------------------------


def greedy_tokens(llm, prompt, n=24):
    params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


def test_a_stop_token_ends_the_text_before_it_and_is_reported():
    with LLM("random:tiny", dtype="float32") as llm:
        tokens = greedy_tokens(llm, [5, 6, 7])
        stop = tokens[10]
        first = tokens.index(stop)
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop_token_ids=[stop])
        completion = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0]
        assert completion.token_ids == tokens[: first + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.text == llm.tokenizer.decode(tokens[:first])


def test_min_tokens_keeps_the_stop_token_from_being_chosen_too_early():
    with LLM("random:tiny", dtype="float32") as llm:
        tokens = greedy_tokens(llm, [5, 6, 7])
        stop = tokens[2]
        params = SamplingParams(temperature=0.0, max_tokens=24, min_tokens=9, ignore_eos=True, stop_token_ids=[stop])
        completion = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0]
        assert stop not in completion.token_ids[:9]


def test_max_tokens_counts_exactly():
    with LLM("random:tiny", dtype="float32") as llm:
        for n in (1, 2, 17):
            assert len(greedy_tokens(llm, [5, 6, 7], n)) == n


def test_stream_and_generate_give_the_same_text_and_tokens():
    with LLM("random:tiny", dtype="float32") as llm:
        whole = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0]
        chunks = list(llm.stream([5, 6, 7], GREEDY))
        assert "".join(c.text for c in chunks) == whole.text
        assert [t for c in chunks for t in c.token_ids] == whole.token_ids
        assert [c.finished for c in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].output.outputs[0].text == whole.text


def test_streams_that_take_turns_and_a_generate_between_them_lose_nothing():
    with LLM("random:tiny", dtype="float32") as llm:
        prompts = [[5, 6, 7], [8, 9], [10]]
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
        first, second = (llm.stream(prompt, GREEDY) for prompt in prompts[:2])
        got = [list(next(first).token_ids), list(next(second).token_ids)]
        got[1] += [t for _ in range(3) for t in next(second).token_ids]
        third = llm.generate(prompts[2], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        got[1] += [t for chunk in second for t in chunk.token_ids]
        got[0] += [t for chunk in first for t in chunk.token_ids]
        assert [*got, third] == expected
        assert all_blocks_are_free(llm.engine) and not llm._mailboxes


def test_a_step_that_fails_is_reported_to_every_stream_that_lost_its_request():
    with LLM("random:tiny", dtype="float32") as llm:
        first, second = (llm.stream(prompt, GREEDY) for prompt in ([5, 6, 7], [8, 9]))
        next(first), next(second)
        llm.engine.model = FailsAt(llm.engine.model, 1, RuntimeError("device lost"))
        for stream in (second, first):
            with pytest.raises(StepError, match="device lost"):
                list(stream)
        assert all_blocks_are_free(llm.engine) and not llm._mailboxes


# ---- metrics and profile -------------------------------------------------------------------------


def test_metrics_add_up(session_seed):
    with LLM("random:tiny", dtype="float32") as llm:
        for output in llm.generate([[1] * 30, [2] * 5], GREEDY, use_tqdm=False):
            m = output.metrics
            assert m.ttft_s == pytest.approx(m.tokenize_s + m.queue_s + m.prefill_s)
            assert len(m.itl_s) == len(output.outputs[0].token_ids) - 1
            assert m.e2e_s == pytest.approx(m.ttft_s + sum(m.itl_s))
            assert m.tpot_s == pytest.approx(sum(m.itl_s) / len(m.itl_s))
            assert m.ttft_parts is None and m.num_preemptions == 0


def test_the_parts_of_ttft_sum_to_it_and_every_part_is_seen():
    with LLM("random:tiny", dtype="float32", prefill_chunk_size=16) as llm:
        m = llm.generate([3] * 100, GREEDY, use_tqdm=False, profile=True)[0].metrics
        assert list(m.ttft_parts) == ["tokenize", "queue", *PART_NAMES, "other"]
        assert sum(m.ttft_parts.values()) == pytest.approx(m.ttft_s, rel=0.02)
        assert all(seconds > 0 for seconds in m.ttft_parts.values())
        assert llm.generate([3] * 10, GREEDY, use_tqdm=False)[0].metrics.ttft_parts is None


def test_parts_are_measured_twice_the_layers_double_attention_and_linear_but_not_the_head(session_seed):
    """The profiler's clock counts floating point operations here, so the test is exact and cannot be slow."""
    from dataclasses import replace

    from minillm.checkpoint import load
    from minillm.model import Transformer

    counted = []
    for layers in (1, 2):
        checkpoint = load("random:tiny")
        config = replace(checkpoint.config, num_hidden_layers=layers)
        names = [k for k in checkpoint.weights if "layers." not in k or int(k.split(".")[2]) < layers]
        weights = {name: checkpoint.weights[name] for name in names}
        model = Transformer(config, weights)
        engine = make_engine((replace(checkpoint, config=config), model), body="naive")
        engine.profile = True
        with FlopCounterMode(display=False) as counter:
            engine._device_clock = counter.get_total_flops
            engine._parts.clock = counter.get_total_flops
            engine.add(engine.make_request([1] * 20, GREEDY))
            engine.step()
        counted.append(dict(engine._parts.seconds))
    one, two = counted
    assert one["attention"] > 0 and one["linear"] > 0 and one["lm_head"] > 0
    assert two["attention"] == 2 * one["attention"]
    assert two["linear"] == 2 * one["linear"]
    assert two["lm_head"] == one["lm_head"]


def test_score_gives_the_log_probability_of_every_next_token(session_seed):
    generator = torch.Generator().manual_seed(session_seed)
    tokens = torch.randint(0, 300, (300,), generator=generator).tolist()
    with LLM("random:tiny", dtype="float32", max_num_batched_tokens=64) as llm:
        scores = llm.score(tokens)
        assert len(scores) == len(tokens) - 1
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=320)
        for cut in (1, 63, 64, 65, 128, 299):
            (output,) = llm.generate(tokens[:cut], params, use_tqdm=False)
            assert scores[cut - 1] == pytest.approx(output.outputs[0].logprobs[0][tokens[cut]].logprob, abs=1e-4)
        assert all_blocks_are_free(llm.engine)
