"""Perplexity over overlapping windows, beside transformers in float64 and sums by hand; the text that is shipped."""

import math
import random
import statistics

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minillm import LLM
from minillm.checkpoint import load
from minillm.errors import PromptError
from minillm.perplexity import JARGON_FILE, Perplexity, perplexity


@pytest.fixture(scope="module")
def llm():
    with LLM("random:tiny", dtype="float32", max_num_batched_tokens=37) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle():
    """The same random model in transformers, float64."""
    checkpoint = load("random:tiny")
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    names = names.split() + ["head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"]
    config = LlamaConfig(**{name: getattr(checkpoint.config, name) for name in names}, attn_implementation="eager")
    config.rope_parameters = {"rope_type": "default", "rope_theta": checkpoint.config.rope_theta}
    model = LlamaForCausalLM(config).double().eval()
    left = model.load_state_dict({name: checkpoint.weights[name].double() for name in checkpoint.weights}, strict=False)
    assert left.missing_keys == ["lm_head.weight"] and not left.unexpected_keys
    model.tie_weights()
    return model


def some_ids(n):
    return [random.randrange(256) for _ in range(n)]


@pytest.mark.parametrize(("n", "window", "stride"), [(200, 64, 32), (131, 64, 63), (97, 96, 1), (65, 64, 7)])
def test_every_token_but_the_first_is_scored_once_with_all_of_its_window_before_it(llm, oracle, n, window, stride):
    ids = some_ids(n)
    measured = perplexity(llm, ids, window, stride, use_tqdm=False)
    assert measured.tokens == n - 1
    losses, token = [], 1
    while token < n:  # a window by hand, `stride` tokens further than the one before
        end = min(n, max(window, token + stride))
        begin = max(0, token + stride - window) if token > 1 else 0
        with torch.no_grad():
            logprobs = oracle(torch.tensor([ids[begin:end]])).logits[0].log_softmax(-1)
        losses.append([-float(logprobs[i - 1 - begin, ids[i]]) for i in range(token, end)])
        token = end
    assert measured.counts == tuple(map(len, losses))
    assert measured.losses == pytest.approx([sum(window) for window in losses], rel=1e-5)
    assert measured.value == pytest.approx(math.exp(sum(map(sum, losses)) / (n - 1)), rel=1e-5)


def test_the_standard_error_of_equal_windows_is_that_of_their_means():
    means = [random.uniform(2, 4) for _ in range(9)]
    measured = Perplexity(tuple(20 * mean for mean in means), (20,) * 9)
    assert measured.nats == pytest.approx(statistics.fmean(means))
    error = statistics.stdev(means) / 9**0.5
    assert measured.standard_error == pytest.approx(math.exp(statistics.fmean(means)) * error)


def test_the_standard_error_holds_what_it_promises():
    """Over many texts of 30 windows, unequal in length, means scatter as much as one text's own error says."""
    means, errors = [], []
    for _ in range(400):
        counts = [random.choice([40, 80]) for _ in range(30)]
        measured = Perplexity(tuple(count * random.gauss(3, 0.2) for count in counts), tuple(counts))
        means.append(measured.nats)
        errors.append(measured.standard_error / measured.value)
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(means), rel=0.25)


def test_two_measurements_are_compared_window_by_window():
    """What makes windows differ from each other is in both, so the difference is known far better than either."""
    counts = (50,) * 20
    one = Perplexity(tuple(random.uniform(100, 200) for _ in counts), counts)
    two = Perplexity(tuple(loss + 5 + random.uniform(-0.5, 0.5) for loss in one.losses), counts)
    mean, error = two.nats_above(one)
    assert mean == pytest.approx(0.1, abs=0.01) and mean == pytest.approx(two.nats - one.nats)
    assert 0 < error < 0.01 < one.standard_error / one.value
    with pytest.raises(ValueError, match="windows differ"):
        one.nats_above(Perplexity((1.0, 2.0), (3, 4)))


def test_scores_from_a_later_start_and_in_small_steps_are_the_same(llm):
    ids = some_ids(80)
    whole = llm.score(ids)
    for start in (1, 2, 37, 38, 79, 80):
        assert llm.score(ids, start) == pytest.approx(whole[start - 1 :], abs=1e-5)
    for step in (1, 3, 80):
        steps = list(llm.logits(ids, 70, step))
        assert torch.cat([wanted for _, wanted in steps]).tolist() == ids[70:]
        assert len(steps[0][1]) == min(step, 10)
        logprobs = torch.cat([logits.log_softmax(-1).gather(1, wanted[:, None]) for logits, wanted in steps])
        assert logprobs[:, 0].tolist() == pytest.approx(whole[69:], abs=1e-4)


def test_a_step_of_one_token_is_a_decode_behind_a_prefill(llm, monkeypatch):
    passes = []
    hidden = llm.engine.model.hidden
    monkeypatch.setattr(
        llm.engine.model, "hidden", lambda batch, *rest: passes.append(len(batch.token_ids)) or hidden(batch, *rest)
    )
    list(llm.logits(some_ids(80), 76, step=1))
    assert passes == [37, 37, 1] + [1] * 5
    passes.clear()
    llm.score(some_ids(80), 76)
    assert passes == [37, 37, 6]


def test_a_caller_that_stops_listening_gives_the_blocks_back(llm):
    pool = llm.engine.scheduler.block_pool
    free = pool.num_free
    logits = llm.logits(some_ids(80), step=1)
    next(logits)
    assert pool.num_free < free
    logits.close()
    assert pool.num_free == free


@pytest.mark.parametrize("start", [0, -1, 81])
def test_a_start_outside_the_prompt_is_refused(llm, start):
    with pytest.raises(PromptError, match=f"start={start} must be from 1.* to 80"):
        llm.score(some_ids(80), start)


@pytest.mark.parametrize(
    ("n", "window", "stride", "match"),
    [(64, 64, 32, "64 tokens are one window"), (99, 64, 64, "stride=64"), (99, 64, 0, "stride=0")],
)
def test_windows_that_give_no_standard_error_are_refused(llm, n, window, stride, match):
    with pytest.raises(PromptError, match=match):
        perplexity(llm, some_ids(n), window, stride)


def test_the_shipped_text_is_plain_and_names_its_source():
    text = JARGON_FILE.read_text(encoding="utf-8")
    assert 100_000 < len(text.encode()) < 110_000
    assert text.startswith("Chapter 1. Hacker Slang") and "\n:awk: /awk/\n" in text
    assert not set(text) & set("\t\r\xa0“”‘’│─") and "\n\n\n" not in text
    source = (JARGON_FILE.parent / "README.md").read_text(encoding="utf-8")
    assert "version 4.4.7, 29 Dec 2003" in source and "public domain" in source and "Eric S. Raymond" in source


def test_the_shipped_text_surprises_a_random_model_at_least_as_a_uniform_guess_would(llm, capsys):
    """Of 320 rows; the progress bar goes to stderr."""
    ids = llm.tokenizer.encode(JARGON_FILE.read_text(encoding="utf-8"))[:400]
    measured = perplexity(llm, ids, 128, 64)
    shown = capsys.readouterr()
    assert shown.out == "" and "6/6" in shown.err
    assert 200 < measured.value < 1500 and 0 < measured.standard_error < measured.value / 5
