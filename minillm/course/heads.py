"""What a head looks for, as a number: five habits, each scored for every head, and the head with the highest score.

A score is a mean share of attention, between 0 and 1, over the tokens where the habit can show. Names follow Olsson
et al. 2022 (induction heads, arXiv 2209.11895) and Xiao et al. 2023 (attention sinks, arXiv 2309.17453). Used in
lesson 02.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

HABITS = {  # what a score is a mean of
    "sink": "goes to the first token",
    "previous token": "goes one token back",
    "induction": "goes behind the same word",
    "same word": "goes to the same word",
    "diffuse": "of the spread that is possible",
    "random": "drawn by lot",
}


def habit_scores(tokens: Sequence[str], maps: torch.Tensor) -> dict[str, torch.Tensor]:
    """Habit -> scores [L, H] of `maps` [L, H, n, n] (see probe.attention_maps) for one text.

    Raises ValueError for a text in which no word comes twice, or shorter than three tokens: some habits could not show.
    """
    words = [token.strip().lower() for token in tokens]
    n = len(words)
    earlier = {i: [j for j in range(i) if words[j] == words[i] and words[i].isalpha()] for i in range(n)}
    again = [i for i, found in earlier.items() if found]
    if n < 3 or not again:
        raise ValueError(f"{n} tokens in which no word comes twice: write a sentence that repeats a word")
    rows = torch.arange(1, n)
    surprise = -torch.special.xlogy(maps, maps).sum(-1)[..., 1:]  # entropy; log(1 + i) is the most that row i can have
    return {
        "sink": maps[..., 1:, 0].mean(-1),
        "previous token": maps[..., rows, rows - 1].mean(-1),
        "induction": _share(maps, {i: [j + 1 for j in earlier[i] if j + 1 < i] for i in again}),
        "same word": _share(maps, {i: earlier[i] for i in again}),
        "diffuse": (surprise / torch.log(rows + 1.0)).mean(-1),
    }


def _share(maps: torch.Tensor, looked_at: dict[int, list[int]]) -> torch.Tensor:
    """Mean over rows of what they take from the tokens listed for them: [L, H]."""
    return torch.stack([maps[..., row, columns].sum(-1) for row, columns in looked_at.items()]).mean(0)


def pick_heads(tokens: Sequence[str], maps: torch.Tensor, seed: int = 0) -> dict[str, tuple[int, int]]:
    """Habit -> (layer, head) with the highest score, and "random": one of the others, drawn with `seed`."""
    scores = habit_scores(tokens, maps)
    heads = maps.shape[1]
    picked = {habit: divmod(int(score.argmax()), heads) for habit, score in scores.items()}
    others = [divmod(i, heads) for i in range(maps.shape[0] * heads) if divmod(i, heads) not in picked.values()]
    return {**picked, "random": random.Random(seed).choice(others)}
