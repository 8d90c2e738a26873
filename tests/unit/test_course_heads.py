"""Habits of heads: maps that have one habit by construction score 1 for it, and the picker finds their head."""

import math
import random

import pytest
import torch

from minillm.course import heads

TOKENS = [" a", " b", " c", " a", " b", " d", " a", " e"]  # "a" at 0, 3, 6; "b" at 1, 4


def rows_that_look_at(places):
    """[8, 8]: row i gives all its attention to places[i]."""
    maps = torch.zeros(8, 8)
    maps[range(8), places] = 1
    return maps


HABITS = {
    "sink": rows_that_look_at([0] * 8),
    "previous token": rows_that_look_at([0, 0, 1, 2, 3, 4, 5, 6]),
    "induction": rows_that_look_at([0, 1, 2, 1, 2, 5, 4, 7]),  # behind the earlier a, b and a; elsewhere at itself
    "same word": rows_that_look_at([0, 1, 2, 0, 1, 5, 3, 7]),
    "diffuse": torch.ones(8, 8).tril() / torch.arange(1, 9)[:, None],
}


@pytest.mark.parametrize("habit", HABITS)
def test_a_head_with_one_habit_scores_one_and_is_picked(habit):
    layers, count = 3, 4
    noise = torch.rand(layers, count, 8, 8).tril() + 1e-3 * torch.ones(8, 8).tril()
    maps = noise / noise.sum(-1, keepdim=True)
    place = random.randrange(layers), random.randrange(count)
    maps[place] = HABITS[habit]
    scores = heads.habit_scores(TOKENS, maps)
    assert scores[habit].shape == (layers, count)
    assert float(scores[habit][place]) == pytest.approx(1)
    assert all(score.max() <= 1 + 1e-6 and score.min() >= 0 for score in scores.values())
    assert heads.pick_heads(TOKENS, maps)[habit] == place


def test_spread_is_measured_as_entropy():
    maps = HABITS["diffuse"].clone()
    maps[7] = torch.tensor([0.5, 0.5, 0, 0, 0, 0, 0, 0])
    expected = (6 + math.log(2) / math.log(8)) / 7
    assert float(heads.habit_scores(TOKENS, maps[None, None])["diffuse"]) == pytest.approx(expected, abs=1e-6)


def test_the_random_head_is_none_of_the_picked_and_repeatable():
    maps = torch.rand(2, 4, 8, 8).tril()
    for seed in range(20):
        picked = heads.pick_heads(TOKENS, maps, seed)
        lot = picked.pop("random")
        assert lot not in picked.values() and 0 <= lot[0] < 2 and 0 <= lot[1] < 4
        assert heads.pick_heads(TOKENS, maps, seed)["random"] == lot
    assert set(heads.HABITS) == {*picked, "random"}


@pytest.mark.parametrize("tokens", [["a", "b", "c"], [",", ",", ","], ["a", "a"]])
def test_a_text_in_which_habits_cannot_show_is_refused(tokens):
    n = len(tokens)
    with pytest.raises(ValueError, match="write a sentence that repeats a word"):
        heads.habit_scores(tokens, torch.ones(1, 1, n, n).tril())
