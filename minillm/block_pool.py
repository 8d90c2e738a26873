"""Which block of the KV cache belongs to whom: a free list, reference counts and the prefix cache.

A block is `block_size` rows of K and V in every layer; here it is only its number, so this file knows
neither tensors nor clocks. It answers three questions: which blocks are free (least recently freed
first), who else uses this block (so it must be copied before it is written), and which blocks already
hold the K and V of this prompt's beginning. Built in lessons 06 and 07, after PagedAttention (Kwon et
al. 2023, arXiv 2309.06180) and vLLM's automatic prefix caching.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from minillm.errors import BlockPoolError, ConfigError

if TYPE_CHECKING:
    from minillm.request import Request

ROOT = (0, 0)
"""Prefix key (serial, hash) of the empty prefix: what a prompt's first block continues."""


def hash_block(parent_hash: int, tokens: tuple[int, ...]) -> int:
    """Hash of a full block and of everything before it, through the hash of the block that it continues.

    It only narrows the search: a hit is believed after comparing tokens and parent, so colliding hashes
    cost time and never a wrong answer.
    """
    return hash((parent_hash, tokens))


class Publication(NamedTuple):
    """What a findable block holds. Block numbers are reused; a serial never is."""

    serial: int
    parent: int  # serial of the publication that this one continues, 0 for a prompt's first block
    tokens: tuple[int, ...]
    hash: int


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, each free or referenced by one or more block tables.

    A published block stays findable after it was freed, until it is allocated again. Hits are exact: a
    block is reused only for the same tokens behind the same prefix.

    hash_fn  (parent's hash, tokens of one block) -> hash; None: `hash_block`
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        hash_fn: Callable[[int, tuple[int, ...]], int] | None = None,
    ):
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(f"num_kv_blocks={num_blocks} and block_size={block_size} must both be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._hash_block = hash_fn or hash_block
        self._ref_counts = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(num_blocks))  # an ordered set: next to be allocated first
        self._published: dict[int, Publication] = {}  # by block
        self._by_hash: dict[int, list[int]] = {}  # hash -> the published blocks that have it
        self._last_serial = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that are referenced, 0 to 1."""
        return 1 - len(self._free) / self.num_blocks

    def ref_count(self, block: int) -> int:
        """How many block tables hold this block; 0: it is free."""
        return self._ref_counts[block]

    def serial(self, block: int) -> int | None:
        """Number of the publication that this block holds, None: it is not findable. A number is never reused."""
        published = self._published.get(block)
        return None if published is None else published.serial

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this length needs."""
        return -(-num_tokens // self.block_size)

    # ---- ownership ---------------------------------------------------------------------------

    def allocate(self, n: int) -> list[int]:
        """Take n blocks, least recently freed first; what they held is no longer findable.

        Raises BlockPoolError, and takes nothing, when fewer are free.
        """
        if n > len(self._free):
            raise BlockPoolError(f"{n} blocks were asked for and {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(n)]
        for block in blocks:
            self._ref_counts[block] = 1
            self._unlist(block)
        return blocks

    def take(self, blocks: list[int]) -> None:
        """Become one more user of blocks that another sequence holds, or that `lookup` has found just now."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def free(self, table: list[int]) -> None:
        """Give up one reference to each block of a table.

        The tail is freed first and so allocated first: the head of a prompt, which others may share, stays
        findable longest. Raises BlockPoolError, and frees nothing, if a block of the table is free already.
        """
        for block, uses in Counter(table).items():
            if self._ref_counts[block] < uses:
                raise BlockPoolError(
                    f"block {block} is freed {uses} times but has {self._ref_counts[block]} references"
                )
        for block in reversed(table):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None

    def copy_on_write(self, table: list[int], index: int) -> tuple[int, int] | None:
        """Make `table[index]` safe to write. A shared block is exchanged for a new one.

        Returns the copy (src, dst) that is due before the write, or None if the block was not shared.
        Raises BlockPoolError when a block is needed and none is free.
        """
        shared = table[index]
        if self._ref_counts[shared] == 1:
            return None
        (own,) = self.allocate(1)
        self.free([shared])
        table[index] = own
        return shared, own

    # ---- prefix cache ------------------------------------------------------------------------

    def lookup(self, token_ids: Sequence[int]) -> tuple[list[int], tuple[int, int]]:
        """The longest cached prefix of a sequence, in whole blocks, without taking them.

        Returns (blocks, prefix key of the last one). The last token is left out of the search, because at
        least one must be computed: a forward pass without a query has no next token.
        """
        blocks: list[int] = []
        key = ROOT
        if self.enable_prefix_caching:
            searchable = (len(token_ids) - 1) // self.block_size * self.block_size
            for start in range(0, searchable, self.block_size):
                tokens = tuple(token_ids[start : start + self.block_size])
                block = self._find(key[0], tokens, self._hash_block(key[1], tokens))
                if block is None:
                    break
                blocks.append(block)
                key = (self._published[block].serial, self._published[block].hash)
        return blocks, key

    def publish(self, request: Request) -> None:
        """Make the request's full blocks findable. Call it only when their K and V have been computed.

        Where two requests computed the same block (identical prompts in one step both compute), the first
        publication wins: the second request keeps its own block, which stays unlisted, and its next blocks
        continue the winner's publication.
        """
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        for index in range(request.num_published_blocks, request.num_computed_tokens // size):
            serial, parent_hash = request.prefix_key
            tokens = tuple(request.token_ids[index * size : (index + 1) * size])
            key = self._hash_block(parent_hash, tokens)
            block = self._find(serial, tokens, key)
            if block is None:
                block = request.block_table[index]
                self._list(block, serial, tokens, key)
            request.prefix_key = (self._published[block].serial, key)
            request.num_published_blocks = index + 1

    def withdraw(self, table: list[int]) -> None:
        """Make these blocks unfindable, whoever uses them: what they hold is not to be trusted."""
        for block in table:
            self._unlist(block)

    def reset_prefix_cache(self) -> None:
        """Make every block unfindable. Blocks in use stay in use."""
        self._published.clear()
        self._by_hash.clear()

    def _find(self, parent: int, tokens: tuple[int, ...], key: int) -> int | None:
        for block in self._by_hash.get(key, ()):
            published = self._published[block]
            if published.parent == parent and published.tokens == tokens:
                return block
        return None

    def _list(self, block: int, parent: int, tokens: tuple[int, ...], key: int) -> None:
        self._last_serial += 1
        self._published[block] = Publication(self._last_serial, parent, tokens, key)
        self._by_hash.setdefault(key, []).append(block)

    def _unlist(self, block: int) -> None:
        published = self._published.pop(block, None)
        if published is not None:
            bucket = self._by_hash[published.hash]
            bucket.remove(block)
            if not bucket:
                del self._by_hash[published.hash]

    # ---- proof -------------------------------------------------------------------------------

    def check(self, tables: list[list[int]] | None = None) -> None:
        """Prove the books: every block is free or referenced, and the hash map lists what was published.

        tables  all block tables in use; with them, every reference count must equal its uses.
        Raises BlockPoolError naming the block that is wrong.
        """
        for block, count in enumerate(self._ref_counts):
            if count < 0 or (count == 0) != (block in self._free):
                raise BlockPoolError(f"block {block} has {count} references and is free: {block in self._free}")
        if len(self._ref_counts) != self.num_blocks or not self._free.keys() <= set(range(self.num_blocks)):
            raise BlockPoolError(f"free and referenced blocks are not the {self.num_blocks} blocks of the pool")

        listed = [(key, block) for key, bucket in self._by_hash.items() for block in bucket]
        if sorted(listed) != sorted((p.hash, block) for block, p in self._published.items()):
            raise BlockPoolError(f"the hash map lists {listed}, but published are {self._published}")
        if not all(self._by_hash.values()):
            raise BlockPoolError("the hash map holds an empty bucket")
        contents = Counter((p.parent, p.tokens) for p in self._published.values())
        if len({p.serial for p in self._published.values()}) < len(self._published) or len(contents) < len(listed):
            raise BlockPoolError(f"two published blocks hold the same: {self._published}")

        if tables is not None:
            uses = Counter(block for table in tables for block in table)
            for block, count in enumerate(self._ref_counts):
                if count != uses[block]:
                    raise BlockPoolError(f"block {block} has {count} references and stands in {uses[block]} tables")
