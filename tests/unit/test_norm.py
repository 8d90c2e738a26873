"""RMSNorm against its formula in float64, on both sides of the switch between its two ways of computing."""

import pytest
import torch

from minillm.norm import FEW_ROWS, RMSNorm


def exact(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 6e-3), (torch.float16, 8e-4)])
@pytest.mark.parametrize("shape", [(1, 48), (3, 1), (FEW_ROWS, 48), (FEW_ROWS + 1, 48), (2, 5, 24), (200, 3, 24)])
@pytest.mark.parametrize("kind", ["normal", "shifted", "tiny", "zero", "outlier"])
def test_norm_equals_its_formula(dtype, tolerance, shape, kind):
    """Rows far from mean zero tell RMSNorm from LayerNorm; tiny ones feel eps; an outlier squared overflows fp16."""
    x = {
        "normal": torch.randn(shape),
        "shifted": torch.randn(shape) + 30,
        "tiny": torch.randn(shape) * 1e-3,
        "zero": torch.zeros(shape),
        "outlier": torch.randn(shape).index_fill(-1, torch.tensor([0]), 3000.0),
    }[kind].to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    found = RMSNorm(weight, 1e-5)(x)
    assert found.shape == x.shape and found.dtype == dtype
    expected = exact(x, weight, 1e-5)
    largest = exact(x, torch.ones(shape[-1]), 1e-5).abs().amax(-1, keepdim=True) * weight.abs().max()
    assert ((found.double() - expected).abs() <= tolerance * expected.abs() + 3e-7 * largest).all()


@pytest.mark.parametrize("rows", [1, 2, FEW_ROWS, FEW_ROWS + 1])
def test_a_row_is_normed_alike_in_any_company_and_from_an_interior_slice(rows):
    norm = RMSNorm(torch.randn(24), 1e-5)
    buffer = torch.full((rows, 3, 40), float("nan"))
    buffer[:, 1, 8:32] = x = torch.randn(rows, 24)
    together = norm(buffer[:, 1, 8:32])
    torch.testing.assert_close(together, torch.cat([norm(row[None]) for row in x]))
