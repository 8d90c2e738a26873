"""Checks log-probabilities of tokens, found over tiles of the vocabulary without ever holding all logits.

Hidden rows that are unit vectors make a logit what the embedding says, so each item plants logits that show one slip:
equal ones show a tile that is lost, rising ones a sum that is not scaled down, high and deep ones a maximum that is
missing. Where it is not asked for, the largest logit comes first, so that nothing has to be scaled. The oracle is
float64 over all logits at once. Task 1 of exercise 08.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch

from minillm.course.grader.task import Case, Record, Verdicts, diagnose
from minillm.course.tensor_sizes import TensorSizes

LOGPROB_ITEMS = (
    "by hand",
    "a target in each tile",
    "ragged last tile",
    "rising logits",
    "falling logits",
    "high logits",
    "deep logits",
    "rows far apart",
    "half precision",
    "small tensors",
)
STEEP = 200.0  # e^200 is infinite in float32, e^-200 is 0
OVERFLOW = {
    "falling logits": "e to a large number is infinite: no maximum ever falls, a tile's own one counts if it is higher",
    "high logits": "e to a large logit is infinite: subtract a maximum first",
    "deep logits": "e to a deep logit is 0: the maximum has to start at -inf, not at 0, and to be subtracted",
    "rows far apart": "one maximum was taken for all rows, and those far below it become 0: each row has its own",
}
LEVELS = {"high logits": 300.0, "deep logits": -300.0}


def logprob_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    tile, tiles = (int(torch.randint(3, 6, (1,), generator=g)) for _ in range(2))
    vocabulary, part = tile * tiles, torch.arange(tiles).repeat_interleave(tile)  # which tile a token is in

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    def largest_first(logits: torch.Tensor) -> torch.Tensor:
        return logits.sort(dim=-1, descending=True).values

    def case(item: str, logits: torch.Tensor, targets: torch.Tensor, tile: int = tile, **given) -> Case:
        """Logits [n, V] as rows of unit vectors times a table [V, n]."""
        tensors = {"hidden": torch.eye(len(logits)), "embedding": logits.T.contiguous(), **given}
        return {"items": [item], **tensors, "targets": targets, "tile": tile}

    def row(item: str, logits: torch.Tensor, target: int) -> Case:
        return case(item, logits[None], torch.tensor([target]))

    def equal(item: str, size: int, n: int, tile: int, **given) -> Case:
        """Hidden rows of zeros: all logits are 0, and the targets lie in the first tile."""
        targets = torch.randint(tile, (n,), generator=g)
        tensors = {"hidden": torch.zeros(n, 2), "embedding": noise(size, 2)}
        return case(item, torch.zeros(n, size), targets, tile, **(tensors | given))

    shares = torch.tensor([5.0, 2.0, 1.0]).log()
    apart = torch.tensor([[0.0], [STEEP]])
    half = {"hidden": torch.zeros(1, 2, dtype=torch.bfloat16), "embedding": noise(300, 2).bfloat16()}
    return [
        *(case("by hand", shares[None], torch.tensor([target]), tile=2) for target in (0, 2)),
        case("a target in each tile", largest_first(noise(tiles, vocabulary)), tile * torch.arange(tiles) + tile - 1),
        equal("ragged last tile", vocabulary + 1, 1, tile),
        equal("ragged last tile", vocabulary - 1, 1, tile),
        row("rising logits", 3.0 * part + torch.rand(vocabulary, generator=g), vocabulary - 1),
        row("falling logits", -STEEP * part + noise(vocabulary), 0),
        *(row(item, level + largest_first(noise(vocabulary)), 1) for item, level in LEVELS.items()),
        case("rows far apart", largest_first(noise(2, vocabulary)) - apart, torch.tensor([0, 1])),
        equal("half precision", 300, 1, 1, **half),
        equal("small tensors", 16 * tile, 32, tile),
    ]


def logprob_drive(token_logprobs, case: Case) -> Record:
    tensors = [case[name].clone() for name in ("hidden", "embedding", "targets")]
    counting = case["items"] == ["small tensors"]  # it slows everything down
    with TensorSizes() if counting else nullcontext() as sizes:
        out = token_logprobs(*tensors, case["tile"])
    return {"logprobs": out, "largest": sizes.largest if counting else 0}


def logprob_judge(case: Case, record: Record) -> Verdicts:
    (item,), largest = case["items"], record.get("largest")
    logits = case["hidden"].double() @ case["embedding"].double().T
    wanted = logits.log_softmax(-1).gather(1, case["targets"][:, None])[:, 0]
    wrong = diagnose(record.get("logprobs"), wanted, _slips(case, logits, wanted), "the log-probability")
    if wrong.endswith("NaN or infinity"):
        wrong = OVERFLOW.get(item, wrong)
    if not wrong and item == "small tensors":
        n, size = logits.shape
        limit = max(case["embedding"].numel(), n * case["tile"])
        if not (isinstance(largest, int) and largest <= limit):
            wrong = (
                f"a tensor of {largest} numbers was made: all logits are {n} x {size} = {n * size}, and a tile of them "
                f"is {n} x {case['tile']} = {n * case['tile']}; hold one tile at a time"
            )
    return {item: wrong}


def _slips(case: Case, logits: torch.Tensor, wanted: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sentence -> the finite numbers that this slip gives."""
    (item,), tile, rows = case["items"], case["tile"], torch.arange(len(logits))
    chosen = logits[rows, case["targets"]]
    size = logits.shape[1]
    best = logits.amax(-1)
    unscaled, grown, highest = torch.zeros_like(best), torch.zeros_like(best), torch.full_like(best, -math.inf)
    for start in range(0, size, tile):
        part = logits[:, start : start + tile]
        higher = torch.maximum(highest, part.amax(-1))
        added = (part - higher[:, None]).exp().sum(-1)
        unscaled, grown = unscaled + added, (grown * (higher - highest).exp()).nan_to_num(0) + added
        highest = higher
    slips = {
        "this is the probability; wanted is its natural logarithm": wanted.exp(),
        "this is the logarithm to the base 2; wanted is the natural one": wanted / math.log(2),
        "the logarithm has the wrong sign: it is at most 0": -wanted,
        "the sum of the tiles before was not scaled down when the maximum rose: it is relative to an older one": (
            chosen - highest - unscaled.log()
        ),
        "the sum of the tiles before grows when the maximum rises: let it shrink, by e to the old minus the new one": (
            chosen - highest - grown.log()
        ),
        "only the last tile counts: the sum of the tiles before was thrown away": (
            chosen - logits[:, (size - 1) // tile * tile :].logsumexp(-1)
        ),
        "the target's logit is that of its place inside the tile, taken from the first one: add where a tile begins": (
            logits[rows, case["targets"] % tile] - logits.logsumexp(-1)
        ),
        "the maximum is missing in the result: the logarithm of the sum is relative to it": wanted + best,
    }
    if size % tile:
        lost = "the last tile, which is not full, was left out: the sum has to go over all of the vocabulary"
        padded = "the last tile was filled up with logits of 0, which take a share: cut it off where the table ends"
        slips[lost] = chosen - logits[:, : size // tile * tile].logsumexp(-1)
        slips[padded] = chosen - (logits.exp().sum(-1) + -size % tile).log()
    if item == "half precision":
        low = torch.tensor(0.0, dtype=torch.bfloat16)
        for _ in range(0, size, tile):
            low = low + tile
        sentence = "the sum stands still in bfloat16, where 256 + 1 is 256: keep it in float32 for inputs of half size"
        slips[sentence] = -low.double().log().expand_as(best)
        slips["the result was rounded to bfloat16: give it in float32"] = wanted.bfloat16().double()
    return slips
