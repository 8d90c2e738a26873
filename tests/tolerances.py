"""Every numeric tolerance of the tests, by dtype: (rtol, atol) for torch.testing.assert_close.

float32 compares two summation orders of the same exact algorithm. The half types hold 11 and 8 bits of
mantissa, so one rounding of a value near 1 costs up to 2^-11 and 2^-9.
"""

import torch

ATTENTION = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-4, 2e-5),
    torch.float16: (1e-2, 4e-3),
    torch.bfloat16: (2e-2, 2e-2),
}
PREFILL_BF16 = {"by_library": 4e-3, "by_products": 1.5e-2}
"""|output - exact| / |exact| of a bfloat16 prefill on a CPU whose scores spread by 3, as SmolLM2's do: kept in float32,
or rounded to bfloat16. Measured on its own q, k and v: at most 1.9e-3 and 6.5e-3."""
LOGITS_FP32 = 1e-3
"""Largest logit difference, relative to the largest logit, between two fp32 forwards of one model."""
LOGITS_BF16_KL = 5e-3
"""Mean Kullback-Leibler divergence in nats per token of a bfloat16 forward from the fp32 one; measured: 1e-3."""
LOGITS_ROUNDED_KL = {"int8": 2e-2, "int4": 1e-2, "fp8": 0.1}
"""The same of the embedded model with rounded weights; measured: 8e-3, 3e-3 (its 4-bit codes are kept) and 0.036."""
KV_EIGHT_BIT = {torch.int8: 0.04, torch.float8_e4m3fn: 0.17}
"""Largest logit difference, relative to the largest logit, of a tiny random model (head size 16) in fp32 whose K and V
are kept in 8 bits; measured: up to 0.019 and 0.085."""
KV_CODES_AT_A_BORDER = 3e-3
"""The same between two ways of computing over such a cache: 1e-6, but for a value that sums in another order carry over
the border between two codes; measured: up to 6e-4."""
