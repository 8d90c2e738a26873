"""Looking inside: the attention probabilities of every layer and head for one text.

The model is run once with a recording attention body handed to it as `attend`; nothing in the engine is
patched, and the pages it writes to are its own. Used from lesson 00 on, explained in lesson 02.
"""

from __future__ import annotations

import torch

from minillm.attention import naive
from minillm.batch import Batch
from minillm.errors import PromptError
from minillm.kv_cache import KVCache, KVLayer

BLOCK_SIZE = 16
MAX_TOKENS = 256  # 30 layers x 9 heads of 256 x 256 probabilities are 71 MB


@torch.inference_mode()
def attention_maps(llm, text: str) -> tuple[list[str], torch.Tensor]:
    """(token strings, probabilities [L, H, n, n] float32 on the CPU) of `text` as it stands, without a chat template.

    Row i of a map is what token i takes from tokens 0 .. i. Raises PromptError for a text without tokens or
    with more than MAX_TOKENS.
    """
    model, tokenizer = llm.engine.model, llm.tokenizer
    ids = tokenizer.encode(text)
    n = len(ids)
    if not 0 < n <= MAX_TOKENS:
        raise PromptError(f"the text has {n} tokens; a picture needs 1 to {MAX_TOKENS}")
    num_blocks = -(-n // BLOCK_SIZE)
    pages = KVCache(model.config, num_blocks, BLOCK_SIZE, model.dtype, model.device)
    batch = Batch.build([ids], [n], [list(range(num_blocks))], BLOCK_SIZE, device=model.device)
    recorder = Recorder()
    model.forward(batch, pages, recorder)
    return [tokenizer.decode([i], skip_special_tokens=False) for i in ids], torch.stack(recorder.maps)


class Recorder:
    """An attention body for one fresh prompt: naive attention that keeps what it computes, one map per call."""

    def __init__(self):
        self.maps: list[torch.Tensor] = []  # of [H, n, n], in layer order

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layer: KVLayer, batch: Batch
    ) -> torch.Tensor:
        self.maps.append(naive.probabilities(q, k, kv_layer.window).float().cpu())
        return naive.attention(q, k, v, kv_layer.window)[0]
