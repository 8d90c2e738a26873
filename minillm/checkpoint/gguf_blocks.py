"""The bytes of one GGUF tensor, as numbers.

A quantised row is a chain of blocks, each 32 weights with one fp16 scale (and, in Q4_1, one fp16 minimum):

    Q4_0   scale | 16 bytes            w = (code - 8) * scale
    Q4_1   scale | minimum | 16 bytes  w = code * scale + minimum
    Q8_0   scale | 32 signed bytes     w = code * scale

In the 4-bit kinds byte j holds weight j in its low half and weight j + 16 in its high half. Everything here
works on whole tensors with NumPy, which is steadier than PyTorch's thread pool for many short passes.
"""

from __future__ import annotations

import numpy as np
import torch

from minillm.quantize import GroupQuantized
from minillm.weights import Shape, Weight

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCKS = {
    "Q4_0": np.dtype([("scale", "<f2"), ("codes", "u1", 16)]),
    "Q4_1": np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("codes", "u1", 16)]),
    "Q8_0": np.dtype([("scale", "<f2"), ("codes", "i1", 32)]),
}
SUPPORTED = (*PLAIN, *BLOCKS)


def decode(rows: np.ndarray, kind: str, shape: Shape) -> Weight:
    """Plain kinds keep their dtype, Q8_0 becomes float32, 4-bit matrices keep their codes.

    rows    [N, bytes per row] uint8
    shape   of the weight, the last axis is the one the blocks run along
    """
    if kind in PLAIN:
        return torch.from_numpy(rows.copy()).flatten().view(PLAIN[kind]).view(shape)
    blocks = np.ascontiguousarray(rows).reshape(-1).view(BLOCKS[kind])  # [N * K / 32]
    scale = blocks["scale"].astype(np.float32)
    if kind == "Q8_0":
        numbers = blocks["codes"].astype(np.float32)  # [N * K / 32, 32]
        numbers *= scale[:, None]
        return torch.from_numpy(numbers).view(shape)
    minimum = blocks["minimum"].astype(np.float32) if kind == "Q4_1" else -8 * scale
    packed = np.ascontiguousarray(blocks["codes"])
    codes = np.concatenate((packed & 15, packed >> 4), axis=1)  # [N * K / 32, 32]
    n = len(rows)
    weight = GroupQuantized(*(torch.from_numpy(part.reshape(n, -1)) for part in (codes, scale, minimum)))
    return weight if len(shape) == 2 else weight.dequantize().view(shape)


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Q or K rows from GGUF's order to Hugging Face's, whatever the bytes in a row mean.

    RoPE turns pairs of rows of one head. Llama files in GGUF keep a pair side by side (0 1 | 2 3 | ...), our
    model as Hugging Face's has its halves half a head apart (0 and D/2, 1 and D/2 + 1, ...).
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])  # [H, D/2, 2, bytes]
    return pairs.swapaxes(1, 2).reshape(rows.shape)
