"""From logits to one token per request: greedy, or a draw from a shaped distribution.

The steps and their order are vLLM's: penalties and `min_tokens`, temperature, min-p, top-k, top-p, draw.
Randomness has no state: the number behind token t of a request is a hash of (its seed, t). So a seed
gives the same tokens alone, in a batch and after a preemption. When a request ends is decided elsewhere;
here, stop tokens are only kept out until `min_tokens`. Lesson 03 needs its first line, greedy. Top-p is the nucleus of
Holtzman et al. 2019 (arXiv 1904.09751), min-p Nguyen et al. 2024 (arXiv 2407.01082).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from minillm.errors import NumericsError
from minillm.request import Request
from minillm.sampling_params import SamplingParams

BLOCK = 256  # tokens per block of the two-level draw; near sqrt(V), so that both levels are short
TOP_P_WIDTH = 64  # how many of the likeliest tokens top-p sorts at first; a model's nucleus is mostly smaller
LARGEST = torch.finfo(torch.float32).max
SMALLEST = torch.finfo(torch.float32).tiny


@dataclass
class Logprob:
    """log_softmax of the model's own logits at one token, before any penalty or temperature.

    rank           1 + number of tokens that are likelier; equally likely tokens share a rank
    decoded_token  its text, filled in by whoever has the tokenizer
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class Sampler:
    """Chooses the next token of every row.

    eos_token_ids  the model's end tokens, which `min_tokens` keeps out together with `stop_token_ids`
    seed           the engine's seed: requests without one of their own draw from (seed, request_id, index)
    """

    def __init__(self, eos_token_ids: tuple[int, ...] = (), seed: int = 0):
        self.eos_token_ids = tuple(eos_token_ids)
        self.seed = seed

    def __call__(
        self, logits: torch.Tensor, requests: list[Request]
    ) -> tuple[list[int], list[dict[int, Logprob] | None]]:
        """logits [B', V] float32, left unchanged; row i belongs to requests[i].

        Returns B' token ids, and for each row None or its most likely tokens, likeliest first, followed by the
        chosen one if it is not among them. Raises NumericsError, naming the requests, when a row has no maximum.
        """
        tokens = _most_likely(logits, requests, "check the weights for NaN, and with dtype='float16' try 'float32'")
        if all(_is_plain(request) for request in requests):
            return tokens.tolist(), [None] * len(requests)

        adjusted = self._adjust(logits, requests)
        if adjusted is not logits:
            tokens = _most_likely(adjusted, requests, "min_tokens rules out every token that was left; lower it")
        rows = [i for i, request in enumerate(requests) if not request.params.greedy]
        if rows:
            drawn = [requests[i] for i in rows]
            weights = _weights(adjusted if len(rows) == len(requests) else adjusted[rows], [r.params for r in drawn])
            uniforms = [_uniform(self._stream(r), _num_output(r)) for r in drawn]
            tokens[rows] = _draw(weights, torch.tensor(uniforms, dtype=torch.float64, device=logits.device))
        return tokens.tolist(), _logprobs(logits, requests, tokens)

    def _adjust(self, logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
        """Logits after penalties and `min_tokens`: the same tensor, or a copy if a row has to change."""
        changed = [i for i, request in enumerate(requests) if _needs_adjusting(request)]
        if not changed:
            return logits
        logits = logits.clone()
        for i in changed:
            request = requests[i]
            _penalise(logits[i], request)
            if _num_output(request) < request.params.min_tokens:
                stop_ids = {*self.eos_token_ids, *request.params.stop_token_ids}
                logits[i, [t for t in stop_ids if t < logits.shape[1]]] = -math.inf
        return logits

    def _stream(self, request: Request) -> str:
        """What names the random stream of one completion."""
        if request.params.seed is not None:
            return str(request.params.seed + request.index)
        return f"{self.seed}/{request.request_id}/{request.index}"


def _num_output(request: Request) -> int:
    return request.num_tokens - request.num_prompt_tokens


def _needs_adjusting(request: Request) -> bool:
    params = request.params
    penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    return bool(penalised) or _num_output(request) < params.min_tokens


def _is_plain(request: Request) -> bool:
    """Whether the largest logit is all that this request needs."""
    return request.params.greedy and request.params.logprobs is None and not _needs_adjusting(request)


def _most_likely(logits: torch.Tensor, requests: list[Request], advice: str) -> torch.Tensor:
    """The best token of each row [B'], the lowest id among equals. NaN wins a maximum, so one pass checks it."""
    best, tokens = logits.max(dim=-1)  # on CPUs this is faster than argmax
    broken = [
        r.request_id
        for r, value in zip(requests, best.tolist(), strict=True)
        if math.isnan(value) or value == -math.inf
    ]
    if broken:
        raise NumericsError(f"no token can be chosen for {', '.join(broken)}: logits are NaN or all -inf; {advice}")
    return tokens


def _penalise(row: torch.Tensor, request: Request) -> None:
    """Lower (or raise) tokens that already occurred, in place: repetition in prompt + output, the others in output."""
    params, device = request.params, row.device
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(request.token_ids)), device=device)
        scores = row[seen].double()  # float64, so that no penalty is rounded to 0
        penalty = params.repetition_penalty
        row[seen] = torch.where(scores > 0, scores / penalty, scores * penalty).to(row.dtype)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(request.output_token_ids)
        seen = torch.tensor(list(counts), dtype=torch.int64, device=device)
        times = torch.tensor(list(counts.values()), dtype=row.dtype, device=device)
        row[seen] -= params.frequency_penalty * times + params.presence_penalty


def _uniform(stream: str, position: int) -> float:
    """A number in [0, 1) with 53 random bits: a hash used as a counter-based generator."""
    digest = hashlib.blake2b(f"{stream}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def _weights(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Probabilities [n, V] times a constant per row; 0 for the tokens that are filtered out.

    A filter is skipped when no row asks for it, and one that must sort touches only the rows that do.
    """
    vocab, device = logits.shape[1], logits.device
    best = logits.amax(dim=-1, keepdim=True)
    if best.isinf().any():  # +inf - inf would be NaN; as the largest number it takes all the probability
        logits, best = logits.clamp(max=LARGEST), best.clamp(max=LARGEST)
    temperature = torch.tensor([max(p.temperature, SMALLEST) for p in params], device=device)
    weights = (logits - best).div_(temperature[:, None]).exp_()  # the best token weighs 1

    if any(p.min_p for p in params):
        min_p = torch.tensor([p.min_p for p in params], device=device)
        weights *= _at_least(weights, min_p[:, None])
    rows = [i for i, p in enumerate(params) if 0 < p.top_k < vocab]
    if rows:
        top_k = torch.tensor([params[i].top_k for i in rows], device=device)
        _keep_top_k(weights, logits, torch.tensor(rows, device=device), top_k)
    rows = [i for i, p in enumerate(params) if p.top_p < 1]
    if rows:
        top_p = torch.tensor([params[i].top_p for i in rows], dtype=torch.float64, device=device)
        _keep_top_p(weights, torch.tensor(rows, device=device), top_p)
    return weights


def _keep_top_k(weights: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor, top_k: torch.Tensor) -> None:
    """Zero, in these rows, all but the top_k tokens. Compares logits: two of them may round to one weight."""
    part = logits.index_select(0, rows)  # [n, V]
    largest = part.topk(min(int(top_k.max()) + 1, part.shape[1])).values
    weights.index_copy_(0, rows, weights.index_select(0, rows) * _among_largest(part, largest, top_k))


def _keep_top_p(weights: torch.Tensor, rows: torch.Tensor, top_p: torch.Tensor) -> None:
    """Zero, in these rows, all but the smallest set of the likeliest tokens that holds the share top_p.

    Sorting a vocabulary costs more than all the rest of sampling, so only the largest `width` weights are
    sorted, and only rows whose set does not end within them are tried again with more.
    """
    vocab, width = weights.shape[1], min(TOP_P_WIDTH, weights.shape[1])
    while len(rows):
        part = weights.index_select(0, rows)  # [n, V]
        largest = part.topk(width).values  # [n, width], descending
        mass = largest.cumsum(dim=-1, dtype=torch.float64)
        count = 1 + (mass < (top_p * part.sum(dim=-1))[:, None]).sum(dim=-1)  # [n] size of the set
        done = (count <= width) | (width == vocab)
        found = part[done]
        found *= _among_largest(found, largest[done], count[done].clamp(max=width))
        weights.index_copy_(0, rows[done], found)
        rows, top_p, width = rows[~done], top_p[~done], min(8 * width, vocab)


def _at_least(values: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """1.0 where values >= floor, else 0.0. On CPUs, multiplying by floats is many times faster than masking."""
    return torch.ge(values, floor, out=torch.empty_like(values))


def _among_largest(values: torch.Tensor, largest: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """1.0 at the count [n] largest values of each row, else 0.0; among equals the lowest ids count.

    largest  the row's largest values in descending order, at least `count`; one more mostly saves a look at the row
    """
    floor = largest.gather(1, count[:, None] - 1)
    keep = _at_least(values, floor)
    following = largest.gather(1, count[:, None].clamp(max=largest.shape[1] - 1))
    for row in (following == floor)[:, 0].nonzero()[:, 0].tolist():  # the cut may go through equal values
        equals = (values[row] == floor[row]).nonzero()[:, 0]
        room = count[row] - (largest[row] > floor[row]).sum()
        keep[row, equals[room:]] = 0
    return keep


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One token per row [n] by inverse CDF, in two levels: first a block of tokens, then a token in it.

    Where a uniform number falls inside the chosen block is itself uniform, so one number serves both. One
    float64 cumulative sum over the vocabulary would do the same and take several times as long.
    """
    blocks = pad(weights, (0, -weights.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))  # [n, V / BLOCK, BLOCK]
    block, uniforms = _invert(blocks.sum(dim=-1), uniforms)
    token, _ = _invert(blocks[torch.arange(len(block), device=block.device), block], uniforms)
    return block * BLOCK + token


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index [n] at which the cumulative weight passes `uniforms` [n] of its total, and how far into it."""
    weights = weights.double()
    cdf = weights.cumsum(dim=-1)
    total = cdf[:, -1:]
    # Rounding must not reach the total itself: beyond it no index has any weight.
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf, target, right=True)  # right: an index of weight 0 is never the answer
    width = weights.gather(1, index)
    inside = (target - (cdf.gather(1, index) - width)) / width
    return index[:, 0], inside[:, 0].clamp(0, 1)


def _logprobs(logits: torch.Tensor, requests: list[Request], tokens: torch.Tensor) -> list[dict[int, Logprob] | None]:
    """For every row that asks for it: the most likely tokens of the raw distribution and the chosen one."""
    results: list[dict[int, Logprob] | None] = [None] * len(requests)
    rows = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
    if not rows:
        return results
    logprobs = logits[rows].clamp(max=LARGEST).log_softmax(dim=-1)  # [n, V]
    chosen = logprobs.gather(1, tokens[rows][:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    width = min(max(requests[i].params.logprobs for i in rows), logits.shape[1])
    values, ids = (t.tolist() for t in logprobs.topk(width))
    for n, i in enumerate(rows):
        top = list(zip(values[n], ids[n], strict=True))[: requests[i].params.logprobs]
        results[i] = {token: Logprob(value, values[n].index(value) + 1) for value, token in top}
        results[i].setdefault(int(tokens[i]), Logprob(float(chosen[n, 0]), int(ranks[n])))
    return results
