"""The eight stages of the engine, as data: what each adds to the one before it, and which lesson builds it."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.block_pool import BlockPool


@dataclass(frozen=True)
class Stage:
    """One state of the growing engine.

    parts         names of the learner's functions that enter here; later stages keep them
    kv            "none": every token is computed anew; "contiguous": the longest sequence is reserved; "paged"
    attention     "naive", "flash", "triton" (where there is a GPU, else flash) or "auto", the engine's own choice
    together      several requests in one forward pass
    budget        most tokens of one step; None: a prompt runs in one step
    """

    key: str
    title: str
    lesson: str
    parts: tuple[str, ...] = ()
    kv: str = "paged"
    prefix_caching: bool = True
    attention: str = "naive"
    together: bool = False
    budget: int | None = None

    def __str__(self) -> str:
        return f"{self.key} {self.title}"

    def pool(self, num_tokens: int, max_model_len: int, block_size: int = 16, hash_fn=None) -> BlockPool:
        """The block pool of a cache for `num_tokens` tokens, cut as this stage cuts it."""
        size = max_model_len if self.kv == "contiguous" else block_size
        return BlockPool(num_tokens // size, size, self.prefix_caching, hash_fn)


STAGES = (
    Stage(
        "v1",
        "no cache",
        "03",
        parts=("causal_mask", "grouped_attention", "rms_norm", "rotate", "block"),
        kv="none",
        prefix_caching=False,
    ),
    Stage("v2", "KV cache", "05", kv="contiguous", prefix_caching=False),
    Stage("v3", "pages", "06", parts=("slot_mapping",), prefix_caching=False),
    Stage("v4", "prefix cache", "07", parts=("hash_block", "prefix_table")),
    Stage("v5", "flash", "08", parts=("flash_attention",), attention="flash"),
    Stage("v6", "Triton", "10", attention="triton"),
    Stage("v7", "ragged batch", "11", parts=("merge",), attention="auto", together=True),
    Stage("v8", "scheduler", "12", parts=("schedule",), attention="auto", together=True, budget=64),
)


def stages_until(key: str) -> tuple[Stage, ...]:
    """v1 up to and with `key`. Raises ValueError for a stage that does not exist."""
    keys = [stage.key for stage in STAGES]
    if key not in keys:
        raise ValueError(f"no stage {key!r}; there are {', '.join(keys)}")
    return STAGES[: keys.index(key) + 1]
