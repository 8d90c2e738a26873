"""The sampler against a distribution worked out token by token in float64, and against its own promises.

Draws are cheap in a batch: one row of logits, repeated under many request ids, is a sample of its distribution.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import NumericsError
from minillm.request import Request
from minillm.sampler import BLOCK, TOP_P_WIDTH, Sampler, _draw
from minillm.sampling_params import SamplingParams

VOCAB = 24


def make_request(params, request_id="r", prompt=(1,), output=(), index=0):
    return Request(request_id, list(prompt), params, index=index, token_ids=[*prompt, *output])


def sample(logits, params, sampler=None, **kwargs):
    """The next token of one request that is alone."""
    tokens, _ = (sampler or Sampler())(logits[None], [make_request(params, **kwargs)])
    return tokens[0]


def draws(logits, params, num, sampler=None, **kwargs):
    """`num` independent draws from one row of logits: as many requests without a seed."""
    requests = [make_request(params, request_id=f"draw-{i}", **kwargs) for i in range(num)]
    return (sampler or Sampler(seed=7))(logits.expand(num, -1), requests)[0]


def oracle(logits, params, prompt=(1,), output=(), stop_ids=()):
    """Probabilities [V] in float64, one token at a time, as the documentation of the parameters says."""
    x = [float(value) for value in logits]
    for token in range(len(x)):
        if token in prompt or token in output:
            p = params.repetition_penalty
            x[token] = x[token] / p if x[token] > 0 else x[token] * p
        count = list(output).count(token)
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        if token in stop_ids and len(output) < params.min_tokens:
            x[token] = -math.inf
    by_rank = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.temperature == 0:
        return np.eye(len(x))[by_rank[0]]
    top = max(x)
    weights = [math.exp((value - top) / params.temperature) for value in x]
    kept = [token for token in by_rank if weights[token] >= params.min_p]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, nucleus, mass = sum(weights[token] for token in kept), [], 0.0
    for token in kept:
        if params.top_p < 1 and mass >= params.top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    probabilities = np.zeros(len(x))
    probabilities[nucleus] = [weights[token] / mass for token in nucleus]
    return probabilities


def assert_drawn_from(probabilities, tokens):
    """Pearson's chi-square; outcomes expected fewer than 5 times are pooled. Nothing impossible may appear."""
    observed = np.bincount(tokens, minlength=len(probabilities)).astype(float)
    assert observed[probabilities == 0].sum() == 0, "a token outside the distribution was drawn"
    expected = probabilities * len(tokens)
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 8, f"chi-square {statistic:.1f} of {freedom} degrees"


# ---- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_greedy_takes_the_largest_logit_and_the_lowest_id_among_equals(batch_size):
    logits = torch.randn(batch_size, 49_152)
    top = logits.max() + 1
    for row in range(batch_size):
        logits[row, [40_000 - row, 777 + row, 49_151]] = top
    greedy = SamplingParams(temperature=0)
    tokens, logprobs = Sampler()(logits, [make_request(greedy, str(i)) for i in range(batch_size)])
    assert tokens == [777 + row for row in range(batch_size)]
    assert logprobs == [None] * batch_size


def test_greedy_rows_stay_greedy_inside_a_sampled_batch():
    logits = torch.randn(40, VOCAB).to(torch.bfloat16).float()  # bfloat16 rounds many logits to equals
    logits[::2, [3, 9]] = 8.0
    mixed = [
        SamplingParams(temperature=0) if row % 2 == 0 else SamplingParams(temperature=5.0, top_p=0.9, logprobs=2)
        for row in range(40)
    ]
    tokens, _ = Sampler()(logits, [make_request(p, str(i)) for i, p in enumerate(mixed)])
    assert tokens[::2] == [3] * 20
    assert len(set(tokens[1::2])) > 5


def test_an_empty_batch_and_a_vocabulary_of_one_token_are_fine():
    assert Sampler()(torch.empty(0, VOCAB), []) == ([], [])
    for params in (SamplingParams(temperature=0), SamplingParams(top_p=0.5, top_k=3, logprobs=2)):
        assert sample(torch.tensor([-3.0]), params) == 0


# ---- the distribution -----------------------------------------------------------------------------

SHAPES = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "top_k then top_p": {"top_k": 8, "top_p": 0.7},
    "all filters": {"temperature": 1.7, "min_p": 0.01, "top_k": 12, "top_p": 0.93},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "encouraged": {"presence_penalty": -1.0, "frequency_penalty": -0.3, "repetition_penalty": 0.7},
    "penalties and filters": {
        "temperature": 1.3,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "top_k": 15,
        "top_p": 0.9,
        "min_p": 0.002,
    },
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (6, 2)},
}


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("vocab", [VOCAB, 3 * BLOCK + 5])
def test_draws_follow_the_distribution_worked_out_in_float64(options, vocab):
    logits = 2 * torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
    prompt, output = (0, 4, 7, 7), (5, 7, 5, 5, 9)
    params = SamplingParams(**options)
    expected = oracle(logits, params, prompt, output, stop_ids=(2, 3, 6))
    tokens = draws(logits, params, 3000, Sampler(eos_token_ids=(3,), seed=1), prompt=prompt, output=output)
    assert_drawn_from(expected, tokens)


def test_the_distribution_does_not_depend_on_the_neighbours():
    logits = 2 * torch.randn(VOCAB)
    kinds = [SamplingParams(**options) for options in SHAPES.values()]
    params = SamplingParams(temperature=0.9, top_p=0.85)
    requests = [make_request(params if i % 2 else kinds[i % len(kinds)], f"n-{i}") for i in range(8000)]
    tokens, _ = Sampler()(logits.expand(8000, -1), requests)
    assert_drawn_from(oracle(logits, params), tokens[1::2])


def test_an_almost_certain_token_and_an_almost_flat_row_at_the_ends_of_the_temperature_range():
    logits = torch.randn(VOCAB)
    best = int(logits.argmax())
    assert set(draws(logits, SamplingParams(temperature=1e-4), 500)) == {best}
    assert set(draws(1e4 * logits, SamplingParams(temperature=1e-4), 500)) == {best}
    assert set(draws(logits, SamplingParams(temperature=1e-300), 500)) == {best}
    hot = SamplingParams(temperature=100.0)
    assert_drawn_from(oracle(logits, hot), draws(logits, hot, 6000))


# ---- which tokens can appear ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": VOCAB - 1},
        {"top_k": VOCAB},
        {"top_k": VOCAB + 1000},
        {"top_k": -1},
        {"top_p": 1e-9},
        {"top_p": 0.31},
        {"top_p": 0.97},
        {"min_p": 0.985},
        {"min_p": 1.0},
        {"min_p": 0.99, "top_k": 9, "top_p": 0.5},
        {"top_k": 10, "top_p": 0.55},
    ],
)
def test_exactly_the_kept_tokens_appear(options):
    logits = torch.randn(VOCAB)
    params = SamplingParams(temperature=100.0, **options)  # nearly flat, so whatever is kept shows up
    kept = set(np.flatnonzero(oracle(logits, params)).tolist())
    assert set(draws(logits, params, 2500)) == kept


@pytest.mark.parametrize(
    "options, size", [({"top_k": 5}, 5), ({"top_p": 0.25}, 6), ({"top_k": 1}, 1), ({"top_p": 1e-9}, 1)]
)
def test_a_cut_through_equal_logits_keeps_the_lowest_ids(options, size):
    flat = torch.zeros(VOCAB)
    assert set(draws(flat, SamplingParams(**options), 1000)) == set(range(size))


def test_a_cut_through_equals_at_the_end_of_the_first_look_of_top_p():
    flat = torch.zeros(200)
    size = 64 / 200  # the nucleus ends with the last of the TOP_P_WIDTH weights that are sorted first
    assert TOP_P_WIDTH == 64
    assert set(draws(flat, SamplingParams(top_p=size), 1500)) == set(range(64))


def test_top_k_counts_exactly_when_bfloat16_made_logits_equal():
    logits = torch.randn(VOCAB).to(torch.bfloat16).float()
    logits[[20, 11, 5]] = logits.max() + 1
    for top_k in range(1, 8):
        by_rank = sorted(range(VOCAB), key=lambda token: (-logits[token], token))
        params = SamplingParams(temperature=50.0, top_k=top_k)
        assert set(draws(logits, params, 1500)) == set(by_rank[:top_k])


def test_top_k_of_one_is_greedy_even_where_temperature_rounds_logits_together():
    logits = torch.tensor([1.0, 10.0, 10.000001, 10.0])
    assert set(draws(logits, SamplingParams(temperature=100.0, top_k=1), 50)) == {2}


def test_top_p_finds_a_nucleus_wider_than_its_first_look():
    logits = 0.3 * torch.randn(1200)
    params = SamplingParams(top_p=0.7)
    probabilities = oracle(logits, params)
    kept = set(np.flatnonzero(probabilities).tolist())
    assert len(kept) > 600
    tokens = [token for part in range(9) for token in draws(logits, params, 2000, Sampler(seed=part))]
    assert_drawn_from(probabilities, tokens)
    assert set(tokens) == kept


def test_a_top_p_just_below_one_keeps_everything():
    logits = torch.randn(50, 600)
    tokens = []
    for top_p in (1.0, math.nextafter(1.0, 0.0)):  # the sum of all weights may round to a little more than they are
        requests = [make_request(SamplingParams(top_p=top_p, seed=i)) for i in range(50)]
        tokens.append(Sampler()(logits, requests)[0])
    assert tokens[0] == tokens[1]


def test_narrow_and_wide_nuclei_share_a_batch():
    wide, narrow = 0.3 * torch.randn(1200), 6 * torch.randn(1200)
    params = SamplingParams(top_p=0.6)
    logits = torch.stack([wide, narrow]).repeat(1500, 1)
    tokens, _ = Sampler()(logits, [make_request(params, str(i)) for i in range(3000)])
    assert_drawn_from(oracle(wide, params), tokens[0::2])
    assert_drawn_from(oracle(narrow, params), tokens[1::2])


# ---- randomness -----------------------------------------------------------------------------------


def decode(sampler, logits_at, requests, steps):
    """Let requests draw `steps` tokens together; logits depend on a request's own tokens only."""
    for _ in range(steps):
        logits = torch.stack([logits_at(request) for request in requests])
        for request, token in zip(requests, sampler(logits, requests)[0], strict=True):
            request.token_ids.append(token)
    return [request.output_token_ids for request in requests]


def logits_from_history(request):
    """A stand-in for a model: what comes next depends on all tokens so far."""
    seed = sum((i + 1) * token for i, token in enumerate(request.token_ids))
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_a_preemption():
    kinds = [
        SamplingParams(seed=5, top_k=9),
        SamplingParams(seed=5, top_p=0.8),
        SamplingParams(temperature=0),
        SamplingParams(seed=-3, repetition_penalty=1.4),
        SamplingParams(min_p=0.02),
    ]
    make = [lambda p=p, i=i: make_request(p, f"id-{i}", prompt=(i, 2)) for i, p in enumerate(kinds)]
    alone = [decode(Sampler(), logits_from_history, [one()], 20)[0] for one in make]
    assert decode(Sampler(), logits_from_history, [one() for one in make], 20) == alone
    assert decode(Sampler(), logits_from_history, [one() for one in reversed(make)], 20) == alone[::-1]

    for one, tokens in zip(make, alone, strict=True):
        resumed = one()  # nothing but the tokens survives a preemption
        resumed.token_ids += tokens[:13]
        assert decode(Sampler(), logits_from_history, [resumed], 7)[0] == tokens


def test_completion_i_of_a_seeded_request_draws_with_seed_plus_i():
    family = [make_request(SamplingParams(n=3, seed=11), index=i) for i in range(3)]
    cousins = [make_request(SamplingParams(seed=11 + i), "other") for i in range(3)]
    tokens = decode(Sampler(seed=1), logits_from_history, family, 15)
    assert tokens == decode(Sampler(seed=2), logits_from_history, cousins, 15)
    assert len({tuple(t) for t in tokens}) == 3


def test_without_a_seed_the_engine_seed_the_id_and_the_index_decide():
    def tokens(engine_seed, request_id, index=0):
        request = make_request(SamplingParams(), request_id, index=index)
        return tuple(decode(Sampler(seed=engine_seed), logits_from_history, [request], 15)[0])

    assert tokens(0, "a") == tokens(0, "a")
    assert len({tokens(0, "a"), tokens(1, "a"), tokens(0, "b"), tokens(0, "a", index=1)}) == 4


GOLDEN_SEED_0 = [833, 945, 809, 28, 560, 384]
GOLDEN_ENGINE_0 = [665, 303, 174, 802, 782, 806]


def test_a_seed_means_the_same_in_every_process_and_release():
    flat = torch.zeros(1000)
    assert [sample(flat, SamplingParams(seed=0), output=[3] * t) for t in range(6)] == GOLDEN_SEED_0
    assert [sample(flat, SamplingParams(), Sampler(seed=0), request_id=f"r{i}") for i in range(6)] == GOLDEN_ENGINE_0


@pytest.mark.parametrize("axis", ["positions of one request", "seeds", "request ids"])
def test_neighbouring_positions_seeds_and_ids_draw_independently(axis):
    num, cells = 16_000, 16
    params = SamplingParams()
    if axis == "seeds":
        requests = [make_request(SamplingParams(seed=i)) for i in range(num)]
    elif axis == "request ids":
        requests = [make_request(params, f"r-{i}") for i in range(num)]
    else:
        requests = [make_request(params, output=[0] * (i % 2000), request_id=f"{i // 2000}") for i in range(num)]
    tokens, _ = Sampler()(torch.zeros(num, cells), requests)
    assert_drawn_from(np.full(cells, 1 / cells), tokens)
    pairs = [a * cells + b for a, b in pairwise(tokens)]
    assert_drawn_from(np.full(cells**2, 1 / cells**2), pairs)


@settings(max_examples=200, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 3]),
    zeros=st.floats(0, 1),
    uniform=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1, exclude_max=True)),
    seed=st.integers(0, 10_000),
)
def test_the_draw_is_the_inverse_of_the_cumulative_sum_and_never_hits_a_zero(vocab, zeros, uniform, seed):
    random = np.random.default_rng(seed)
    weights = np.exp(10 * random.standard_normal((3, vocab))).astype(np.float32)
    weights[random.random((3, vocab)) < zeros] = 0
    weights[:, random.integers(vocab)] = 1
    tokens = _draw(torch.from_numpy(weights), torch.full((3,), uniform, dtype=torch.float64)).tolist()
    for row, token in zip(weights.astype(np.float64), tokens, strict=True):
        assert row[token] > 0
        low, high = row[:token].sum(), row[: token + 1].sum()
        slack = 1e-6 * row.sum()  # the weight of a block is summed in float32
        assert low - slack <= uniform * row.sum() <= high + slack


# ---- penalties and min_tokens ---------------------------------------------------------------------


def test_repetition_counts_the_prompt_and_the_other_penalties_do_not():
    logits = torch.tensor([3.0, 2.9, -1.0, 0.0])
    prompt, output = (0,), (1,)
    greedy = {"prompt": prompt, "output": output}
    assert sample(logits, SamplingParams(temperature=0), **greedy) == 0
    assert sample(logits, SamplingParams(temperature=0, presence_penalty=2.0), **greedy) == 0
    assert sample(logits, SamplingParams(temperature=0, frequency_penalty=2.0), **greedy) == 0
    assert sample(logits, SamplingParams(temperature=0, frequency_penalty=2.0), prompt=(3,), output=(0,)) == 1
    assert sample(logits, SamplingParams(temperature=0, repetition_penalty=1.5), prompt=(0,)) == 1
    assert sample(logits, SamplingParams(temperature=0, repetition_penalty=4.0), prompt=(3,), output=(0,)) == 1


@pytest.mark.parametrize("name, once, twice", [("presence_penalty", 1, 1), ("frequency_penalty", 1, 2)])
def test_frequency_grows_with_every_occurrence_and_presence_does_not(name, once, twice):
    for output, times in (((0,), once), ((0, 0), twice)):
        for distance, winner in ((0.5 * times + 0.01, 0), (0.5 * times - 0.01, 1)):
            logits = torch.tensor([distance, 0.0])
            params = SamplingParams(temperature=0, **{name: 0.5})
            assert sample(logits, params, prompt=(0,), output=output) == winner


def test_extreme_penalties_leave_a_valid_choice():
    logits = torch.tensor([0.0, -math.inf, 5.0, -2.0])
    for penalty in (1e-300, 100.0):
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
            assert sample(logits, params, prompt=(0, 1, 2, 3)) in (0, 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_cannot_appear_before_min_tokens(temperature):
    logits = torch.tensor([0.0, 0.1, 6.0, 6.0, 6.0])
    sampler = Sampler(eos_token_ids=(3, 99), seed=0)  # 99: an id beyond this vocabulary does no harm
    params = SamplingParams(temperature=temperature, min_tokens=2, stop_token_ids=(2, 4, 500), ignore_eos=True)
    for num_output in range(4):
        for penalty in (0.0, 1.0):  # with one, a row is adjusted anyway
            shaped = params.updated(presence_penalty=penalty)
            tokens = set(draws(logits, shaped, 400, sampler, output=[0] * num_output))
            assert tokens.isdisjoint({2, 3, 4}) == (num_output < 2)


def test_min_tokens_that_leaves_no_token_is_an_error_that_says_so():
    with pytest.raises(NumericsError, match="lonely.*min_tokens"):
        sample(torch.zeros(2), SamplingParams(min_tokens=1, stop_token_ids=(0, 1)), request_id="lonely")


def test_logits_are_left_unchanged():
    logits = torch.randn(len(SHAPES), VOCAB)
    before = logits.clone()
    requests = [
        make_request(SamplingParams(logprobs=3, **options), name, prompt=(1, 2), output=(3, 4))
        for name, options in SHAPES.items()
    ]
    Sampler(eos_token_ids=(0,))(logits, requests)
    assert torch.equal(logits, before)


# ---- broken and infinite logits -------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("broken", ["one NaN", "all NaN", "all -inf", "NaN beside +inf"])
def test_rows_without_a_maximum_are_named(temperature, broken):
    logits = torch.randn(4, VOCAB)
    if broken == "one NaN":
        logits[1, 17] = math.nan
    elif broken == "NaN beside +inf":
        logits[1, 3:5] = torch.tensor([math.inf, math.nan])
    else:
        logits[1] = math.nan if broken == "all NaN" else -math.inf
    logits[3] = logits[1]
    requests = [make_request(SamplingParams(temperature=temperature), f"req-{i}") for i in range(4)]
    with pytest.raises(NumericsError, match="req-1, req-3: .*weights"):
        Sampler()(logits, requests)


def test_infinite_logits_take_or_lose_all_the_probability():
    logits = torch.randn(VOCAB)
    logits[[2, 5]] = -math.inf
    assert set(draws(logits, SamplingParams(temperature=100.0), 2500)) == set(range(VOCAB)) - {2, 5}
    logits[[7, 13]] = math.inf
    for options in ({}, {"top_k": 5}, {"top_p": 0.99}, {"min_p": 0.1}, {"temperature": 100.0}):
        assert set(draws(logits, SamplingParams(**options), 100)) == {7, 13}
    assert sample(logits, SamplingParams(temperature=0)) == 7


# ---- logprobs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [0, 1, 5, VOCAB, VOCAB + 50])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 4.0, "top_p": 0.9, "presence_penalty": 1.0}])
def test_logprobs_are_those_of_the_raw_logits(num, options):
    logits = 3 * torch.randn(6, VOCAB)
    params = SamplingParams(logprobs=num, **options)
    tokens, logprobs = Sampler()(logits, [make_request(params, str(i), output=(4, 4)) for i in range(6)])
    exact = torch.log_softmax(logits.double(), dim=-1)
    for row, token, entries in zip(exact, tokens, logprobs, strict=True):
        order = row.argsort(descending=True).tolist()
        assert list(entries) == order[:num] + ([token] if token not in order[:num] else [])
        for other, entry in entries.items():
            assert entry.logprob == pytest.approx(row[other].item(), abs=1e-5)
            assert entry.rank == order.index(other) + 1
            assert entry.decoded_token is None


def test_only_rows_that_ask_get_logprobs_each_as_many_as_it_asked_for():
    logits = torch.randn(4, VOCAB)
    wishes = [None, 2, None, 7]
    requests = [make_request(SamplingParams(temperature=0, logprobs=n), str(i)) for i, n in enumerate(wishes)]
    _, logprobs = Sampler()(logits, requests)
    assert [entries and len(entries) for entries in logprobs] == wishes


def test_equally_likely_tokens_share_a_rank():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    _, logprobs = Sampler()(logits, [make_request(SamplingParams(temperature=0, logprobs=4))])
    assert {token: entry.rank for token, entry in logprobs[0].items()} == {1: 1, 2: 1, 3: 3, 0: 4}


def test_logprobs_of_infinite_logits_are_numbers():
    logits = torch.tensor([[0.0, math.inf, -math.inf]])
    _, logprobs = Sampler()(logits, [make_request(SamplingParams(logprobs=3))])
    assert logprobs[0][1].logprob == 0.0
    assert not any(math.isnan(entry.logprob) for entry in logprobs[0].values())
