"""What can be chosen: the model's shape, the engine's options, and how one request is sampled.

Three frozen dataclasses, validated when they are made, so that a wrong value is refused by name before
anything is allocated. Names are vLLM's where vLLM has one. No option is accepted without an effect.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace

import torch

from minillm.errors import ConfigError
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
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
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
class RopeScaling:
    """Llama-3 style frequency scaling (`rope_type: llama3`): long wavelengths are stretched by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-family decoder, under Hugging Face's field names.

    Raises ConfigError when the sizes cannot belong together.
    """

    vocab_size: int  # V
    hidden_size: int  # E
    intermediate_size: int  # F
    num_hidden_layers: int  # L
    num_attention_heads: int  # H
    num_key_value_heads: int  # Hkv
    head_dim: int  # D
    architecture: str = "llama"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False  # qwen2
    qk_norm: bool = False  # qwen3: RMSNorm over each head of q and k, before RoPE
    sliding_window: int | None = None  # visible keys per query, its own included
    sliding_layers: tuple[int, ...] | None = None  # layers that use the window; None means all

    def __post_init__(self):
        _choice("architecture", self.architecture, ARCHITECTURES)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            _positive(name, getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}; every K/V head must serve the same number of queries"
            )
        if self.head_dim % 8 or self.head_dim > 256:
            raise ConfigError(f"head_dim={self.head_dim} is not supported; use a multiple of 8 up to 256")
        if self.sliding_window is not None:
            _positive("sliding_window", self.sliding_window)

    def layer_window(self, layer: int) -> int | None:
        """Visible keys per query in this layer, or None for all of them."""
        if self.sliding_layers is not None and layer not in self.sliding_layers:
            return None
        return self.sliding_window

    @property
    def num_parameters(self) -> int:
        """All weights, embeddings included, a tied head counted once."""
        e, d = self.hidden_size, self.head_dim
        q, kv = self.num_attention_heads * d, self.num_key_value_heads * d
        attention = e * (q + 2 * kv) + q * e + (q + 2 * kv if self.qkv_bias else 0) + (2 * d if self.qk_norm else 0)
        layer = attention + 3 * e * self.intermediate_size + 2 * e
        embeddings = self.vocab_size * e * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + embeddings + e


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
            _choice(name, getattr(self, name), words)
        if is_sparse(self.attention):
            parse(self.attention)
        else:
            _choice("attention", self.attention, ATTENTION_BODIES)
        for name in ("max_num_batched_tokens", "max_num_seqs", "block_size"):
            _positive(name, getattr(self, name))
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
                _positive(name, getattr(self, name))
        for field in fields(self):
            if isinstance(field.default, bool):
                _truth(field.name, getattr(self, field.name))
        _between("gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0, open_low=True)
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
            _positive(name, getattr(self, name))
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
            _between("speculative_memory_share", self.speculative_memory_share, 0.0, 1.0, open_low=True)
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
        return cls(**_known(cls, options))


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens and when it ends. Field names and meanings are vLLM's.

    temperature 0 is greedy. Raises ConfigError naming the field and its range.
    """

    n: int = 1  # completions of this prompt
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    seed: int | None = None  # same seed, same prompt: same tokens, whatever else runs in the batch
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int = 128
    min_tokens: int = 0
    logprobs: int | None = None  # also return the log-probabilities of this many most likely tokens
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0  # smaller is served first; equal ones in order of arrival

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, _several(name, getattr(self, name)))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _truth(name, getattr(self, name))
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ConfigError(f"stop={self.stop!r} must hold non-empty strings")
        if any(not isinstance(t, int) or t < 0 for t in self.stop_token_ids):
            raise ConfigError(f"stop_token_ids={self.stop_token_ids!r} must hold token ids")
        _positive("n", self.n)
        _positive("max_tokens", self.max_tokens)
        _between("temperature", self.temperature, 0.0, 100.0)
        _between("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _integer("top_k", self.top_k, -1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63))
        _integer("priority", self.priority, -(2**31))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @classmethod
    def from_options(cls, **options) -> SamplingParams:
        """SamplingParams from keyword options; an unknown one is refused with the nearest known name."""
        return cls(**_known(cls, options))

    def updated(self, **options) -> SamplingParams:
        """A copy with some fields changed; unknown names are refused."""
        return replace(self, **_known(type(self), options))


def _known(cls, options: dict) -> dict:
    names = [f.name for f in fields(cls)]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}"
            raise ConfigError(f"unknown {cls.__name__} option {name!r}{hint}")
    return options


def _choice(name: str, value, allowed: tuple) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(str, allowed))}")


def _truth(name: str, value) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be True or False")


def _several(name: str, value) -> tuple:
    if value is not None and not isinstance(value, (list, tuple, set, frozenset)):
        raise ConfigError(f"{name}={value!r} must be a list")
    return tuple(value or ())


def _integer(name: str, value, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}={value!r} must be an integer of at least {low}")


def _positive(name: str, value) -> None:
    _integer(name, value, 1)


def _between(name: str, value, low: float, high: float, open_low: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not ok or not (low < value if open_low else low <= value) or not value <= high:
        raise ConfigError(f"{name}={value!r} is not in {'(' if open_low else '['}{low:g}, {high:g}]")
