"""K and V in eight bits for the tests: attention problems, how far a row may be off, and what a token has to follow.

Codes are turned back here in float64, by PyTorch's own conversion, and not as the library does it.
"""

import torch

from minillm.eight_bit import LARGEST
from minillm.kv_cache import KVLayer
from tests.tolerances import KV_TOKENS_BEHIND
from tests.unit.attention_cases import NAN, Ragged
from tests.unit.engines import whole

EIGHT_BIT = list(LARGEST)


def read_back(codes, scale):
    """codes [..., D] of either format and scale [...] as float64."""
    return codes.to(torch.float32).double() * scale.double()[..., None]


class EightBitRagged(Ragged):
    """A Ragged problem over 8-bit pages; what was read back is what it expects.

    The step's own k and v are NaN: a body has to read all rows from the pages.
    """

    def __init__(self, sequences, kv_dtype, window=None, block_size=16):
        super().__init__(sequences, window, block_size)
        exact = self.kv_layer
        codes = torch.zeros(2, *exact.k.shape, dtype=torch.int8).view(kv_dtype)
        scales = torch.full((2, *exact.k.shape[:3]), NAN)
        self.kv_layer = layer = KVLayer(*codes, window, *scales, exact.dtype)
        restored = []
        for (q, k, v), table in zip(self.sequences, self.tables, strict=True):
            position = torch.arange(len(k))
            slots = torch.tensor(table)[position // block_size] * block_size + position % block_size
            layer.write(k, v, slots)
            rows = [
                read_back(pages.view(torch.int8).flatten(0, 1)[slots].view(kv_dtype), scale.flatten(0, 1)[slots])
                for pages, scale in ((layer.k, layer.k_scale), (layer.v, layer.v_scale))
            ]
            restored.append((q, *rows))
        self.sequences = restored
        self.k, self.v = torch.full_like(self.k, NAN), torch.full_like(self.v, NAN)


def most_off(exact, kv_dtype):
    """How far each value of rows [..., D] may be from what is read back: half a step."""
    largest = exact.abs().amax(-1, keepdim=True)
    if kv_dtype == torch.int8:
        return (largest / 254).expand_as(exact)
    return torch.maximum(exact.abs() / 16, largest / 448 / 1024)


def assert_rows_close(rows, exact, kv_dtype, rounding=1e-6):
    """`rounding` of a row's largest value comes on top: the scale and the products are float32."""
    room = most_off(exact, kv_dtype) + rounding * exact.abs().amax(-1, keepdim=True)
    assert ((rows.double() - exact).abs() <= room).all()


def moved(found, expected, exact):
    """How far logits [n, V] are from the expected ones, relative to what eight bits change: [n]."""
    return (found - expected).abs().amax(-1) / (expected - exact).abs().amax(-1)


def assert_tokens_follow(parts, prompts, replies, kv_dtype):
    """Every token is, up to a tolerance, the likeliest one when its whole sequence is computed again in one go.

    Equal in exact arithmetic. But sums in another order may carry a value over the border between two codes.
    """
    behind = []
    for prompt, reply in zip(prompts, replies, strict=True):
        logits, exact = (whole(parts, prompt + reply[:-1], kv_dtype=x)[len(prompt) - 1 :] for x in (kv_dtype, None))
        chosen = logits.gather(1, torch.tensor(reply)[:, None])[:, 0]
        behind.append((logits.amax(-1) - chosen) / (logits - exact).abs().amax(-1))
    assert torch.cat(behind).mean() <= KV_TOKENS_BEHIND
