"""Directions that papers and the article report, found again in the simulator: Sarathi-Serve's, and two optima."""

import pytest

from minillm.config import EngineConfig
from minillm.devices import find_device
from minillm.model_config import ModelConfig
from minillm.simulator import (
    Arrival,
    RooflineStepTime,
    conversations,
    make_simulated_scheduler,
    poisson,
    shared_prompt,
    simulate,
    summarize,
)

MISTRAL_7B = ModelConfig(32000, 4096, 14336, 32, 32, 8, 128, max_position_embeddings=32768)
TIME = RooflineStepTime(MISTRAL_7B, find_device("A100-80GB"))


def serve(trace, num_blocks=20_000, **options):
    config = EngineConfig(**{"max_num_seqs": 128, "max_model_len": 8192, **options})
    result = simulate(trace, make_simulated_scheduler(MISTRAL_7B, config, num_blocks), TIME)
    return result, summarize(result.records, result.duration)


@pytest.fixture(scope="module")
def chat():
    trace = poisson(80, 2.0, 0, 1730, 150)
    return [a._replace(prompt_len=min(a.prompt_len, 6000)) for a in trace]


def test_a_smaller_budget_buys_shorter_gaps_and_pays_with_ttft(chat):
    """Sarathi-Serve's shape: strict SLOs want 512 tokens a step, relaxed ones 2,048; without chunks both are missed."""
    strict, relaxed = (serve(chat, max_num_batched_tokens=budget) for budget in (512, 2048))
    whole = serve(chat, scheduling_policy="iteration", max_num_batched_tokens=8192)
    first = serve(chat, scheduling_policy="prefill_first", max_num_batched_tokens=8192)
    gaps = [summary["p99_itl_ms"] for _, summary in (strict, relaxed, whole)]
    assert gaps == sorted(gaps) and gaps[2] > 5 * gaps[0]
    assert strict[0].longest_gap_tokens <= 512 and relaxed[0].longest_gap_tokens <= 2048
    assert first[0].longest_gap_tokens > 3 * 2048
    assert strict[1]["median_ttft_ms"] > relaxed[1]["median_ttft_ms"]


def test_the_budget_that_is_best_for_one_prompt_alone_is_not_the_one_that_serves_most():
    """A20. Alone, fewer steps are better without end; together, prompts that fill a step leave decodes to run by
    themselves, and reading the weights for them alone costs more than a few rows beside a prompt."""
    budgets = (512, 2048, 16384)
    together = poisson(400, 8.0, 0, 1730, 200)
    options = {"max_model_len": 32768}
    alone = {b: serve([Arrival(0, 8192, 2)], max_num_batched_tokens=b, **options)[1]["mean_ttft_ms"] for b in budgets}
    rate = {b: serve(together, max_num_batched_tokens=b, **options)[1]["output_throughput"] for b in budgets}
    assert min(alone, key=alone.get) == 16384
    assert max(rate, key=rate.get) == 2048


def test_in_a_rectangle_similar_lengths_save_rows_and_time_and_in_a_ragged_batch_only_the_tail_is_left():
    trace = poisson(400, 40.0, 0, 256, 8)
    options = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "enable_prefix_caching": False}
    arms = {
        (policy, pad): serve(trace, scheduling_policy=policy, pad_batches=pad, **options)
        for policy in ("iteration", "similar_length")
        for pad in (True, False)
    }
    rows = {arm: result.num_rows for arm, (result, _) in arms.items()}
    tail = {arm: summary["p99_ttft_ms"] for arm, (_, summary) in arms.items()}
    assert rows["iteration", True] > 1.5 * rows["similar_length", True]
    assert arms["iteration", True][0].busy_s > 1.3 * arms["similar_length", True][0].busy_s
    assert rows["iteration", False] == rows["similar_length", False] < rows["similar_length", True]
    assert tail["similar_length", False] > tail["iteration", False]


@pytest.mark.parametrize("make", [shared_prompt, conversations])
def test_guesses_save_ttft_where_prompts_come_again_and_are_all_wasted_where_none_does(make):
    def both(trace, predictor):
        plain, _ = serve(trace, num_blocks=700)
        options = {"speculative_predictor": predictor, "speculative_memory_share": 0.5}
        guessing, _ = serve(trace, num_blocks=700, scheduling_policy="speculative_prefill", **options)
        saved = sum(a.ttft_s - b.ttft_s for a, b in zip(plain.records, guessing.records, strict=True))
        return guessing.speculation, saved

    if make is shared_prompt:
        again, predictor = shared_prompt(80, 0.5, 0, 1024, 16, prefix_len=512, num_prompts=8), "frequent"
    else:
        talks = conversations(40, 0.25, 0, 256, 16, turns=4, think_s=20)
        again, predictor = sorted([*talks, *poisson(40, 0.25, 0, 1500, 16)], key=lambda a: a.time), "conversation"
    again = [a._replace(prompt_len=min(a.prompt_len, 8000)) for a in again]
    counts, saved = both(again, predictor)
    assert counts.num_used_tokens > 0
    assert saved > 0 or make is conversations  # where guesses push out what would have been found, they may cost
    counts, saved = both(poisson(40, 0.5, 0, 1024, 16), "conversation")
    assert counts.num_used_tokens == 0 < counts.num_wasted_tokens and saved <= 0
