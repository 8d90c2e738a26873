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
LOGITS_FP32 = 1e-3
"""Largest logit difference, relative to the largest logit, between two fp32 forwards of one model."""
LOGITS_BF16_KL = 5e-3
"""Mean Kullback-Leibler divergence in nats per token of a bfloat16 forward from the fp32 one; measured: 1e-3."""
