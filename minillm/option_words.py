"""The words that some options of `EngineConfig` take, and which options belong to which scheduling policies.

What the words mean is said where they act: `resources.py`, `linear/choose.py`, `attention/choose.py`, `scheduler/`.
"""

from __future__ import annotations

import torch

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
KV_CACHE_DTYPES = {
    "auto": None,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
ATTENTION_BODIES = ("auto", "naive", "flash", "sdpa", "cpu", "triton")
SCHEDULING_POLICIES = (
    "static",
    "iteration",
    "prefill_first",
    "chunked",
    "similar_length",
    "interleaved",
    "speculative_prefill",
)
CHUNKING = ("prefill_first", "chunked", "interleaved", "speculative_prefill")
POLICIES_WITH = {
    "long_prefill_token_threshold": CHUNKING,
    "prefill_chunk_size": CHUNKING,
    "align_prefill_tokens": CHUNKING,
    "pad_batches": ("static", "iteration", "similar_length"),
    "max_group_wait_steps": ("similar_length",),
    "max_long_partial_prefills": ("interleaved",),
    "max_overtaken_steps": ("interleaved",),
    "speculative_predictor": ("speculative_prefill",),
    "speculative_chunk_size": ("speculative_prefill",),
    "speculative_memory_share": ("speculative_prefill",),
}
"""Options that have a meaning under some scheduling policies only, and those policies."""
SPECULATIVE_PREDICTORS = ("frequent", "conversation")
EMBEDDING_DEVICES = ("auto", "cpu")
QUANTIZATIONS = ("auto", "none", "int8", "int4", "fp8")
CHOICES = {
    "dtype": ("auto", *DTYPES),
    "quantization": QUANTIZATIONS,
    "kv_cache_dtype": tuple(KV_CACHE_DTYPES),
    "embedding_device": EMBEDDING_DEVICES,
    "scheduling_policy": SCHEDULING_POLICIES,
    "speculative_predictor": (None, *SPECULATIVE_PREDICTORS),
}
"""Options that are one of a few words, and those words."""
