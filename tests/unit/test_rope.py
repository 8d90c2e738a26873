"""RoPE against complex numbers in float64 and against transformers' frequencies."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minillm.model_config import ModelConfig, RopeScaling
from minillm.rope import Rope, inverse_frequencies, rotate

LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def config(head_dim=64, **changes):
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1)
    return ModelConfig(vocab_size=8, num_key_value_heads=1, head_dim=head_dim, **sizes, **changes)


def turned(x, positions, theta):
    """The pair (d, d + D/2) as one complex number, multiplied by e^(i * position * theta^(-2d/D))."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
    result = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([result.real, result.imag], dim=-1)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 256])
def test_rotation_is_multiplication_by_a_complex_number(head_dim):
    x = torch.randn(7, 3, head_dim)
    positions = torch.randint(0, 2000, (7,))
    cos, sin = Rope(config(head_dim, rope_theta=5000.0)).at(positions)
    torch.testing.assert_close(
        rotate(x, cos, sin).double(), turned(x, positions, 5000.0), rtol=1e-4, atol=1e-3
    )  # an angle near 2,000 holds 7e-5 of float32 rounding


def test_position_zero_changes_nothing():
    x = torch.randn(1, 2, 64)
    assert torch.equal(rotate(x, *Rope(config()).at(torch.tensor([0]))), x)


def test_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 64)
    rope = Rope(config())

    def score(m, n):
        return (rotate(q, *rope.at(torch.tensor([m]))) * rotate(k, *rope.at(torch.tensor([n])))).sum().item()

    assert score(105, 100) == pytest.approx(score(5, 0), abs=1e-3)
    assert score(5, 0) != pytest.approx(score(0, 5), abs=1e-2)


def test_a_row_is_turned_by_its_own_position_wherever_it_stands():
    """Rows of many requests in any order; x an interior slice of a wider, poisoned buffer."""
    positions = torch.tensor([9, 0, 500, 9])
    buffer = torch.full((4, 9, 64), float("nan"))
    buffer[:, 2:5] = x = torch.randn(4, 3, 64)
    rope = Rope(config())
    together = rotate(buffer[:, 2:5], *rope.at(positions))
    for row, position in enumerate(positions):
        alone = rotate(x[row : row + 1], *rope.at(position[None]))
        torch.testing.assert_close(together[row : row + 1], alone)


def test_no_position_is_too_far():
    """There is no table, so neither the last position of the model nor one beyond can overrun it."""
    rope = Rope(config(max_position_embeddings=32, rope_theta=100.0))
    x = torch.randn(3, 1, 64)
    positions = torch.tensor([31, 32, 5000])
    torch.testing.assert_close(
        rotate(x, *rope.at(positions)).double(), turned(x, positions, 100.0), rtol=1e-3, atol=3e-3
    )


def test_half_precision_rounds_the_cosines_not_the_angles():
    positions = torch.tensor([8191])
    exact_cos, exact_sin = Rope(config()).at(positions)
    cos, sin = Rope(config(), dtype=torch.bfloat16).at(positions)
    assert cos.dtype == sin.dtype == torch.bfloat16
    assert torch.equal(cos, exact_cos.bfloat16()) and torch.equal(sin, exact_sin.bfloat16())


@pytest.mark.parametrize("scaling", [None, LLAMA3, RopeScaling(32.0, 1.0, 4.0, 1024), RopeScaling(2.0, 0.5, 16.0, 64)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_are_those_of_transformers(scaling, head_dim):
    parameters = {"rope_type": "default", "rope_theta": 500000.0}
    if scaling is not None:
        parameters |= vars(scaling) | {"rope_type": "llama3"}
    theirs = LlamaConfig(head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=131072)
    if scaling is None:
        expected = 500000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    else:
        expected, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    ours = inverse_frequencies(config(head_dim, rope_theta=500000.0, rope_scaling=scaling))
    torch.testing.assert_close(ours.double(), expected.double(), rtol=1e-5, atol=0)


def test_llama3_scaling_keeps_the_short_wavelengths_and_stretches_the_long_ones():
    plain = inverse_frequencies(config(128, rope_theta=500000.0))
    scaled = inverse_frequencies(config(128, rope_theta=500000.0, rope_scaling=LLAMA3))
    ratio = plain / scaled
    torch.testing.assert_close(ratio[0].item(), 1.0)
    torch.testing.assert_close(ratio[-1].item(), 8.0)
    assert (ratio.diff() >= -1e-4).all() and ((ratio > 1.1) & (ratio < 7.9)).any()
