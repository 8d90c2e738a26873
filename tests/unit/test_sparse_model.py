"""Sparse attention on the real model's queries and keys: what is kept beats chance, or it is said that it does not."""

import math

import pytest
import torch

from minillm import LLM
from minillm.attention import naive
from minillm.attention.sparse import seen_keys
from minillm.compare_attention import TEXT, Look, forward, kept_attention, perplexity
from minillm.sparse_options import parse
from tests.unit.attention_cases import random_sequence

METHODS = {
    "sliding_window(64, sinks=4)": {"random", "random+"},
    "sliding_window(64)": {"random"},  # without the first key most of the mass is gone
    "dynamic_blocks(top=3, block=32)": {"random", "random+"},
    "dynamic_blocks(mass=0.7, block=32)": {"random", "random+"},
    "lsh(rounds=4, bucket=16, sinks=1)": {"random", "random+"},
    "lsh(rounds=4, bucket=16)": {"random"},
}


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32", num_kv_blocks=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def ids(llm):
    return llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:300]


@pytest.fixture(scope="module")
def found(llm, ids):
    look = Look([parse(name) for name in METHODS], llm.engine.attend)
    with torch.inference_mode():
        forward(llm.engine.model, ids, look)
    return dict(zip(METHODS, look.means(), strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_the_kept_keys_hold_more_attention_than_random_ones(found, name):
    row = found[name]
    assert row["kept"] < 0.6
    assert {key for key in ("random", "random+") if row["mass"] > row[key]} == METHODS[name]


@pytest.mark.parametrize("text", ["sliding_window(300, sinks=4)", "dynamic_blocks(mass=1, block=64)"])
def test_a_whole_budget_keeps_the_model_s_perplexity(llm, ids, text):
    from minillm.attention import choose_attention

    model = llm.engine.model
    with torch.inference_mode():
        dense = perplexity(model, ids, llm.engine.attend)
        assert perplexity(model, ids, choose_attention("cpu", torch.float32, text)[0]) == pytest.approx(dense, rel=1e-4)
    scores = llm.score(ids)
    assert dense == pytest.approx(math.exp(-sum(scores) / len(scores)), rel=1e-4)


def test_what_is_reported_of_a_mask_by_hand():
    """One head, three keys, all probabilities equal; the last row keeps its first and its own key."""
    p = torch.tensor([[[1.0, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]]])
    v = torch.tensor([0.0, 0.0, 3.0])[:, None, None]
    seen = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    seen[0, 2, 1] = False
    report = kept_attention(p, v, seen)
    assert report["kept"] == pytest.approx(5 / 6)
    assert report["mass"] == pytest.approx((1 + 1 + 2 / 3) / 3)
    assert report["random"] == pytest.approx((1 + 1 + 2 / 3) / 3)
    assert report["random+"] == pytest.approx((1 + 1 + 2 / 3) / 3)
    assert report["error"] == pytest.approx(0.5)  # the last row gives 1.5 in place of 1


def test_the_expected_mass_of_random_keys_is_that_of_drawn_ones():
    q, k, v = random_sequence(40, 40, heads=2, kv_heads=1)
    p = naive.probabilities(2 * q, k)
    report = kept_attention(p, v, seen_keys(parse("sliding_window(8, sinks=1)"), q, k))
    sums = {"random": 0.0, "random+": 0.0}
    for _ in range(400):
        for row in range(40):
            kept = min(row + 1, 8 + (row >= 8))
            drawn = torch.randperm(row + 1)[:kept]
            sums["random"] += float(p[:, row, drawn].sum(-1).mean())
            between = 1 + torch.randperm(max(row - 1, 0))[: max(kept - 2, 0)]
            drawn = torch.tensor(sorted({0, row} | set(between.tolist())))
            sums["random+"] += float(p[:, row, drawn].sum(-1).mean())
    for name, total in sums.items():
        assert report[name] == pytest.approx(total / 400 / 40, abs=0.02)
