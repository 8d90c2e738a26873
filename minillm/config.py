"""The options of one engine, validated when they are set.

A frozen dataclass, so that a wrong value is refused by name before anything is allocated. Names are vLLM's where vLLM
has one. No option is accepted without an effect. How one request is sampled stands in `sampling_params.py`, the
model's shape in `model_config.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from minillm.errors import ConfigError
from minillm.option_checks import between, choice, known, positive, truth
from minillm.sparse_options import is_sparse, parse

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


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine. `None` means "choose for me"; `minillm doctor` prints what was chosen and why.

    Raises ConfigError naming the option, the value and the limit.
    """

    model: str = "smollm2-135m-instruct"
    dtype: str = "auto"  # auto: bfloat16 where the processor multiplies it natively, else float32 (float16 on a T4)
    device: str = "auto"
    quantization: str = "auto"  # of weights: none, int8, int4, fp8; auto: none, but a 4-bit file's codes for few rows
    attention: str = "auto"  # a body, or a sparse method like sliding_window(1024, sinks=4), see sparse_options.py
    embedding_device: str = "auto"  # cpu: keep the embedding table off the GPU; auto: beside the layers
    enforce_eager: bool = False  # True: no CUDA graphs for decode steps
    tensor_parallel_size: int = 1  # processes, each with a part of every layer; heads must divide by it
    pipeline_parallel_size: int = 1  # processes, each with some of the layers; chunks of a step flow through them
    pipeline_chunk_size: int | None = None  # most rows of such a chunk (128)
    overlap_copies: bool = False  # GPU: a step's numbers are copied while the step before is computed
    early_exit_layer: int | None = None  # prompt tokens but the last leave after so many layers; inexact
    max_num_batched_tokens: int = 2048  # token budget of one step
    max_num_seqs: int = 64  # sequences that may run at once
    max_model_len: int | None = None  # prompt + generated; default: what the model was trained for
    block_size: int = 16  # tokens per KV block
    num_kv_blocks: int | None = None  # overrides the two memory options below
    kv_cache_dtype: str = "auto"  # auto: the model's; int8 or fp8: eight bits and a scale per row, for more tokens
    kv_cache_memory_bytes: int | None = None  # default on a CPU: 25% of free memory, at most 1 GiB
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory for weights, activations and KV cache together
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True  # False: a prompt is computed in one step or not yet
    long_prefill_token_threshold: int | None = None  # most tokens of one prompt per step
    prefill_chunk_size: int | None = None  # the same option under the article's name
    align_prefill_tokens: int | None = None  # shorten chunks until a step's tokens are a multiple: 128 for Tensor Cores
    scheduling_policy: str = "chunked"
    pad_batches: bool = False  # static, iteration, similar_length: fill every prompt of a step up to the longest
    max_group_wait_steps: int | None = None  # similar_length: a prompt passed over this often goes next (16)
    max_long_partial_prefills: int | None = None  # interleaved: long prompts in progress at once (1)
    max_overtaken_steps: int | None = None  # interleaved: steps in which short prompts may overtake a long one (64)
    speculative_predictor: str | None = None  # speculative_prefill: frequent (default) or conversation
    speculative_chunk_size: int | None = None  # speculative_prefill: most tokens of one idle step (64)
    speculative_memory_share: float | None = None  # speculative_prefill: share of the cache for unused guesses (0.25)
    max_queued_requests: int | None = None  # more waiting requests are refused with QueueFullError
    seed: int = 0

    def __post_init__(self):
        for name, words in CHOICES.items():
            choice(name, getattr(self, name), words)
        if is_sparse(self.attention):
            parse(self.attention)
        else:
            choice("attention", self.attention, ATTENTION_BODIES)
        for name in ("max_num_batched_tokens", "max_num_seqs", "block_size"):
            positive(name, getattr(self, name))
        for name in (
            "pipeline_chunk_size",
            "early_exit_layer",
            "max_model_len",
            "num_kv_blocks",
            "kv_cache_memory_bytes",
            "long_prefill_token_threshold",
            "prefill_chunk_size",
            "align_prefill_tokens",
            "max_queued_requests",
            "max_group_wait_steps",
            "max_long_partial_prefills",
            "max_overtaken_steps",
            "speculative_chunk_size",
        ):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        for field in fields(self):
            if isinstance(field.default, bool):
                truth(field.name, getattr(self, field.name))
        between("gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0, open_low=True)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed={self.seed!r} is not an integer")
        a, b = self.long_prefill_token_threshold, self.prefill_chunk_size
        if a is not None and b is not None and a != b:
            raise ConfigError(
                f"long_prefill_token_threshold={a} and prefill_chunk_size={b} are two names of one option; give one"
            )
        if not self.enable_chunked_prefill and self.chunk_limit is not None:
            given = f"prefill_chunk_size={b}" if a is None else f"long_prefill_token_threshold={a}"
            raise ConfigError(f"{given} has no meaning with enable_chunked_prefill=False; drop one of them")
        self._check_ranks()
        self._check_alignment()
        self._check_policy_options()

    def _check_ranks(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            positive(name, getattr(self, name))
        tensor, pipeline = self.tensor_parallel_size, self.pipeline_parallel_size
        if tensor > 1 and pipeline > 1:
            raise ConfigError(
                f"tensor_parallel_size={tensor} and pipeline_parallel_size={pipeline} cut the same model in two ways; "
                f"leave one of them at 1"
            )
        if self.early_exit_layer is not None and self.num_ranks > 1:
            raise ConfigError(
                f"early_exit_layer={self.early_exit_layer} needs the whole model in one process, and {self.num_ranks} "
                f"share it; drop it, or leave tensor_parallel_size and pipeline_parallel_size at 1"
            )
        if self.overlap_copies and self.num_ranks > 1:
            raise ConfigError(
                f"overlap_copies has no meaning for {self.num_ranks} ranks, to which each step is announced first; "
                f"drop it, or leave tensor_parallel_size and pipeline_parallel_size at 1"
            )
        if self.pipeline_chunk_size is not None and pipeline == 1:
            raise ConfigError(
                f"pipeline_chunk_size={self.pipeline_chunk_size} has no meaning without stages; drop it or raise "
                f"pipeline_parallel_size"
            )

    def _check_alignment(self) -> None:
        multiple, budget = self.align_prefill_tokens, self.max_num_batched_tokens
        if multiple is None:
            return
        if not self.enable_chunked_prefill:
            raise ConfigError(
                f"align_prefill_tokens={multiple} has no meaning with enable_chunked_prefill=False; drop one of them"
            )
        if multiple > budget:
            raise ConfigError(
                f"align_prefill_tokens={multiple} is more than max_num_batched_tokens={budget}, so no step could ever "
                f"fill one tile; lower the first or raise the second"
            )

    def _check_policy_options(self) -> None:
        policy = self.scheduling_policy
        for name, policies in POLICIES_WITH.items():
            value = getattr(self, name)
            if value not in (None, False) and policy not in policies:
                raise ConfigError(
                    f"{name}={value!r} belongs to scheduling_policy {' or '.join(policies)} and has no effect under "
                    f"{policy!r}; drop it or change the policy"
                )
        if policy == "interleaved" and not self.enable_chunked_prefill:
            raise ConfigError("scheduling_policy='interleaved' cuts prompts; it needs enable_chunked_prefill=True")
        if policy == "speculative_prefill" and not self.enable_prefix_caching:
            raise ConfigError("scheduling_policy='speculative_prefill' warms the prefix cache; switch that on")
        if policy == "speculative_prefill" and self.max_num_batched_tokens < self.block_size:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than one block of {self.block_size} "
                f"tokens, and speculative_prefill warms whole blocks; raise it to block_size or more"
            )
        if self.speculative_memory_share is not None:
            between("speculative_memory_share", self.speculative_memory_share, 0.0, 1.0, open_low=True)
        if (self.speculative_chunk_size or self.block_size) < self.block_size:
            raise ConfigError(
                f"speculative_chunk_size={self.speculative_chunk_size} is less than one block of {self.block_size} "
                f"tokens, and only whole blocks can be found again; raise it to block_size or more"
            )

    @property
    def num_ranks(self) -> int:
        """Processes that compute every step together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def chunk_limit(self) -> int | None:
        """Most tokens of one prompt per step, whichever of its two names was used; None: the whole budget."""
        return self.long_prefill_token_threshold or self.prefill_chunk_size

    @classmethod
    def from_options(cls, **options) -> EngineConfig:
        """An EngineConfig from keyword options; an unknown one is refused with the nearest known name."""
        return cls(**known(cls, options))
