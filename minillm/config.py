"""The options of one engine, validated when they are set.

A frozen dataclass, so that a wrong value is refused by name before anything is allocated. Names are vLLM's where vLLM
has one. No option is accepted without an effect. How one request is sampled stands in `sampling_params.py`, the
model's shape in `model_config.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from minillm.errors import ConfigError
from minillm.option_checks import between, choice, known, option, positive, truth
from minillm.option_words import ATTENTION_BODIES, CHOICES, POLICIES_WITH
from minillm.sparse_options import is_sparse, parse


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine. `None` and "auto" mean "choose for me"; `minillm doctor` prints what was chosen and why.

    Each field says what it is for, in which unit; the command line shows the same words.

    Raises ConfigError naming the option, the value and the limit.
    """

    model: str = option(
        "smollm2-135m-instruct", "name, folder, .gguf file or hub id of a model, or random:tiny and the like"
    )
    dtype: str = option(
        "auto", "what is computed in; auto: bfloat16 where it is multiplied natively, else float32 (float16 on a T4)"
    )
    device: str = option("auto", "cpu, cuda, or one GPU as cuda:0; auto: a GPU where PyTorch sees one")
    quantization: str = option(
        "auto", "what weights are held in; auto: not rounded, but a 4-bit file's codes are used for few rows"
    )
    attention: str = option(
        "auto",
        "what computes attention; a sparse method leaves keys out, so that answers change",
    )
    embedding_device: str = option(
        "auto",
        "cpu: keep the embedding table out of the GPU's memory, for a model that hardly fits; auto: do not",
    )
    enforce_eager: bool = option(False, "GPU: record no CUDA graphs; slower steps, but the first ones come sooner")
    tensor_parallel_size: int = option(
        1, "processes, each with a part of every layer, for a model that one GPU cannot hold; heads must divide by it"
    )
    pipeline_parallel_size: int = option(
        1, "processes, each with some of the layers, through which a step flows in chunks"
    )
    pipeline_chunk_size: int | None = option(
        None, "most tokens of such a chunk: small ones keep every stage busy, large ones multiply faster; default 128"
    )
    overlap_copies: bool = option(False, "GPU: copy a step's numbers while the step before is computed")
    early_exit_layer: int | None = option(
        None, "layers that prompt tokens but the last go through: a faster and another model; default: all of them"
    )
    max_num_batched_tokens: int = option(
        2048, "most tokens of one step: more compute prompts faster, fewer let answers wait less between their tokens"
    )
    max_num_seqs: int = option(64, "most sequences that run at once; the others wait")
    max_model_len: int | None = option(
        None, "most tokens of a sequence, prompt and answer together; default: what the model was trained for"
    )
    block_size: int = option(
        16, "tokens per KV block: smaller ones waste less memory and share more, larger ones are fewer to look up"
    )
    num_kv_blocks: int | None = option(
        None, "KV blocks to hold, whatever the memory options say; default: as many as those allow"
    )
    kv_cache_dtype: str = option(
        "auto", "what K and V are kept in; auto: that of the model; eight bits and scales hold nearly twice the tokens"
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "bytes for K and V; default: 25% of a CPU's free memory, at most 1 GiB, or what a GPU's share leaves",
    )
    gpu_memory_utilization: float = option(
        0.9, "share of a GPU's memory, more than 0 and up to 1, for weights, activations and KV cache together"
    )
    enable_prefix_caching: bool = option(True, "find K and V of beginnings that were computed before")
    enable_chunked_prefill: bool = option(
        True, "cut prompts that do not fit into a step; if not, a prompt is computed in one step or not yet"
    )
    long_prefill_token_threshold: int | None = option(
        None,
        "most tokens of one prompt per step, so that others find room; default: a whole step, a quarter if interleaved",
    )
    prefill_chunk_size: int | None = option(None, "another name for long_prefill_token_threshold")
    align_prefill_tokens: int | None = option(
        None,
        "shorten chunks until a step's tokens are a multiple of so many: 128 for Tensor Cores; default: no",
    )
    scheduling_policy: str = option("chunked", "who computes how many tokens in the next step")
    pad_batches: bool = option(
        False, "fill every prompt of a step up to the longest, as an engine of rectangles would: to see what it costs"
    )
    max_group_wait_steps: int | None = option(
        None, "steps in which a prompt may be passed over, then it goes next; default 16"
    )
    max_long_partial_prefills: int | None = option(None, "long prompts in progress at once; default 1")
    max_overtaken_steps: int | None = option(
        None, "steps in which short prompts may overtake a long one, then it goes on alone; default 64"
    )
    speculative_predictor: str | None = option(
        None, "guess frequent beginnings of prompts, or the next turn of a conversation; default frequent"
    )
    speculative_chunk_size: int | None = option(
        None,
        "most tokens of a guess per idle step: a request that comes then waits for so many; default 64, or a block",
    )
    speculative_memory_share: float | None = option(
        None, "share of the KV cache, more than 0 and up to 1, for guesses not yet used; default 0.25"
    )
    max_queued_requests: int | None = option(
        None, "most requests that wait; one more is refused (QueueFullError, over HTTP status 429); default: no limit"
    )
    seed: int = option(0, "seed of random weights, and of all requests that bring none")

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
    def num_seats(self) -> int:
        """Sequences that may run at once: each gets a token in every step, so there are never more than the budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def chunk_limit(self) -> int | None:
        """Most tokens of one prompt per step, whichever of its two names was used; None: the whole budget."""
        return self.long_prefill_token_threshold or self.prefill_chunk_size

    @classmethod
    def from_options(cls, **options) -> EngineConfig:
        """An EngineConfig from keyword options; an unknown one is refused with the nearest known name."""
        return cls(**known(cls, options))
