"""A learner's prefix table inside the engine's block pool: `plug.prefix_table(PrefixTable)` builds pools that use it.

The table only knows which block holds which beginning of a text. Free blocks, reference counts and the order in which
blocks are given away stay with the pool, which asks the table, tells it what has been computed, and what is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from minillm.block_pool import ROOT, BlockPool
from minillm.errors import GradeError

if TYPE_CHECKING:
    from minillm.request import Request


class PrefixPool(BlockPool):
    """The engine's pool, with `lookup` and `publish` answered by a learner's object.

    make_table  (block_size, hash_fn) -> the object: find(ids) -> blocks, add(ids, blocks), forget(block)
    count       called with the blocks of each answer of `find`
    """

    def __init__(
        self, make_table: Callable, num_blocks: int, block_size: int, hash_fn: Callable | None, count: Callable
    ):
        super().__init__(num_blocks, block_size, True, hash_fn)
        self._table = make_table(block_size, self._hash_block)
        self._count = count

    def lookup(self, token_ids: Sequence[int]) -> tuple[list[int], tuple[int, int]]:
        blocks, longest = self._table.find(list(token_ids)), (len(token_ids) - 1) // self.block_size
        if not isinstance(blocks, list) or not all(b in range(self.num_blocks) for b in blocks):
            raise GradeError(f"find returned {blocks!r}; the pool needs a list of blocks, 0 to {self.num_blocks - 1}")
        if len(blocks) > longest or len(set(blocks)) < len(blocks):
            raise GradeError(
                f"find returned blocks {blocks} for {len(token_ids)} tokens; at most {longest} different ones of "
                f"{self.block_size} tokens leave a token to compute"
            )
        self._count(blocks)
        return blocks, ROOT

    def publish(self, request: Request) -> None:
        full = request.num_computed_tokens // self.block_size
        self._table.add(request.token_ids[: full * self.block_size], request.block_table[:full])
        request.num_published_blocks = full

    def reset_prefix_cache(self) -> None:
        self.withdraw(range(self.num_blocks))

    def _unlist(self, block: int) -> None:
        self._table.forget(block)
