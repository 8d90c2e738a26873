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
KV_EIGHT_BIT = {torch.int8: 0.03, torch.float8_e4m3fn: 0.13}
"""|logits - exact| / |exact| of a tiny random model (head size 16) in fp32 whose K and V are kept in 8 bits; measured
over 1,600 prompts of each format: at most 0.0145 and 0.063."""
KV_SAME_CODES = 0.2
"""The largest logit difference in a row between two ways of computing over such a cache, relative to what the 8 bits
themselves change there. 1e-4, but for a prompt where a value that sums in another order carries over the border between
two codes: up to 0.48, so it is the median of three prompts. Measured over 200 threes of prompts, each in three ways and
both formats: at most 0.028; at least 1 where a prompt, or only its first chunk, reads its own rows before they are
rounded."""
KV_TOKENS_BEHIND = 0.05
"""By how much the tokens chosen over such a cache may be behind the likeliest ones, in the same measure and on average.
Measured: 0 in 160 runs of six prompts; at least 0.17 in 200 where every chunk reads its own rows only."""
