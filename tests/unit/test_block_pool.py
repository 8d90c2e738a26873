"""The block pool by itself: ownership, eviction order, exact prefix hits, copy-on-write, and its own audit."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minillm import block_pool
from minillm.block_pool import ROOT, BlockPool, hash_block
from minillm.errors import BlockPoolError, ConfigError
from minillm.request import Request
from minillm.sampling_params import SamplingParams

B = 4


def sequence(pool, tokens, computed=None):
    """A request with blocks of its own for all its tokens, `computed` of them (default: all) in the cache."""
    request = Request("r", list(tokens), SamplingParams())
    request.block_table = pool.allocate(pool.blocks_for(len(tokens)))
    request.num_computed_tokens = len(tokens) if computed is None else computed
    return request


def published(pool, tokens):
    request = sequence(pool, tokens)
    pool.publish(request)
    return request


def used_blocks(pool):
    return [block for block in range(pool.num_blocks) if pool.ref_count(block)]


# ---- ownership -----------------------------------------------------------------------------------


def test_a_new_pool_is_free_and_allocation_hands_out_every_block_once():
    pool = BlockPool(5, B)
    assert (pool.num_free, pool.usage) == (5, 0)
    blocks = pool.allocate(2) + pool.allocate(3)
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.usage) == (0, 1)
    pool.check([blocks])


def test_allocating_more_than_is_free_names_the_numbers_and_takes_nothing():
    pool = BlockPool(5, B)
    pool.allocate(3)
    with pytest.raises(BlockPoolError, match="3 blocks.*2 of 5"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (-1, 4), (4, 0)])
def test_a_pool_without_blocks_or_rows_is_refused(num_blocks, block_size):
    with pytest.raises(ConfigError, match=f"{num_blocks}.*{block_size}"):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize("table", [[0], [2, 0], [1, 1]])
def test_a_double_free_is_a_typed_error_and_frees_nothing(table):
    pool = BlockPool(3, B)
    pool.free([pool.allocate(3)[0]])  # block 0 is free, 1 and 2 are used
    with pytest.raises(BlockPoolError, match=f"block {min(table)} "):
        pool.free(table)
    assert used_blocks(pool) == [1, 2]
    pool.check()


def test_a_shared_block_is_free_only_after_its_last_user_gave_it_up():
    pool = BlockPool(2, B)
    table = pool.allocate(2)
    pool.take(table[:1])
    pool.free(table)
    assert pool.ref_count(table[0]) == 1 and pool.num_free == 1
    pool.check([table[:1]])
    pool.free(table[:1])
    assert pool.num_free == 2


def test_the_least_recently_freed_block_is_allocated_first():
    pool = BlockPool(4, B)
    a, b, c, d = pool.allocate(4)
    for block in (c, a, d, b):
        pool.free([block])
    assert pool.allocate(4) == [c, a, d, b]


def test_the_tail_of_a_table_is_reused_before_its_head():
    pool = BlockPool(4, B)
    table = pool.allocate(4)
    pool.free(table)
    assert pool.allocate(4) == table[::-1]


def test_the_head_of_a_prompt_stays_findable_longest():
    pool = BlockPool(3, B)
    request = published(pool, range(3 * B))
    pool.free(request.block_table)
    for left in (2, 1, 0):
        pool.allocate(1)
        assert pool.lookup(range(4 * B))[0] == request.block_table[:left]


# ---- prefix cache --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 65 * B, 65 * B + 1])
def test_a_repeated_prompt_hits_all_full_blocks_but_always_computes_a_token(length):
    pool = BlockPool(70, B)
    request = published(pool, range(length))
    blocks, _ = pool.lookup(range(length))
    assert blocks == request.block_table[: (length - 1) // B]
    assert len(blocks) * B < length


def test_a_partly_filled_block_is_never_found():
    pool = BlockPool(4, B)
    published(pool, range(2 * B - 1))
    blocks, _ = pool.lookup(range(4 * B))
    assert len(blocks) == 1


@pytest.mark.parametrize("computed", [0, 1, B - 1, B, 2 * B - 1, 2 * B])
def test_only_computed_blocks_are_findable(computed):
    pool = BlockPool(4, B)
    request = sequence(pool, range(3 * B), computed)
    pool.publish(request)
    assert pool.lookup(range(3 * B))[0] == request.block_table[: computed // B]


def test_a_lookup_takes_nothing():
    pool = BlockPool(4, B)
    request = published(pool, range(2 * B))
    pool.lookup(range(3 * B))
    pool.check([request.block_table])


def test_a_different_first_token_hides_every_later_block():
    pool = BlockPool(4, B)
    published(pool, range(3 * B))
    assert pool.lookup([99, *range(1, 4 * B)])[0] == []


def test_a_freed_block_is_still_found_and_can_be_taken_from_the_middle_of_the_free_list():
    pool = BlockPool(5, B)
    first, second = published(pool, range(B)), published(pool, range(50, 50 + B))
    pool.free(first.block_table)
    pool.free(second.block_table)
    blocks, _ = pool.lookup(range(B + 1))
    pool.take(blocks)
    pool.check([blocks])
    assert blocks == first.block_table and pool.num_free == 4
    assert set(pool.allocate(4)).isdisjoint(blocks)


def test_a_block_taken_from_the_free_list_is_no_longer_found():
    pool = BlockPool(2, B)
    request = published(pool, range(2 * B))
    pool.free(request.block_table)
    pool.allocate(2)
    assert pool.lookup(range(3 * B)) == ([], ROOT)
    pool.check()


def test_identical_prompts_in_one_step_the_first_publication_wins_and_the_second_chain_continues_it():
    pool = BlockPool(8, B)
    winner, loser = sequence(pool, range(3 * B), B), sequence(pool, range(3 * B), B)
    pool.publish(winner)
    pool.publish(loser)
    assert pool.lookup(range(4 * B))[0] == winner.block_table[:1]
    loser.num_computed_tokens = 2 * B  # now the loser is the first to have the second block
    pool.publish(loser)
    winner.num_computed_tokens = 3 * B
    pool.publish(winner)
    assert pool.lookup(range(4 * B))[0] == [winner.block_table[0], loser.block_table[1], winner.block_table[2]]
    pool.check([winner.block_table, loser.block_table])


@pytest.fixture
def colliding(monkeypatch):
    monkeypatch.setattr(block_pool, "hash_block", lambda parent_hash, tokens: 7)


def test_colliding_hashes_never_give_foreign_tokens(colliding):
    pool = BlockPool(8, B)
    request = published(pool, range(2 * B))
    assert pool.lookup(range(100, 100 + 3 * B))[0] == []
    other = published(pool, range(100, 100 + 2 * B))
    assert pool.lookup(range(3 * B))[0] == request.block_table
    assert pool.lookup(range(100, 100 + 3 * B))[0] == other.block_table


def test_colliding_hashes_never_give_the_same_tokens_behind_another_prefix(colliding):
    pool = BlockPool(8, B)
    same = list(range(50, 50 + B))
    one, two = published(pool, [1] * B + same), published(pool, [2] * B + same)
    assert pool.lookup([1] * B + same + [0])[0] == one.block_table
    assert pool.lookup([2] * B + same + [0])[0] == two.block_table
    assert pool.lookup(same + [0])[0] == []
    assert pool.lookup([3] * B + same + [0])[0] == []


def test_a_reused_block_number_does_not_adopt_the_continuations_of_its_former_content(colliding):
    pool = BlockPool(4, B)
    old, tail = list(range(B)), list(range(50, 50 + B))
    winner = published(pool, old)
    loser = published(pool, old + tail)  # its second block continues the winner's only block
    pool.free(winner.block_table)
    pool.allocate(1)  # the fresh block
    request = published(pool, range(200, 200 + B))
    assert request.block_table == winner.block_table, "the number was meant to be reused"
    assert pool.lookup([*range(200, 200 + B), *tail, 0])[0] == request.block_table
    assert pool.lookup([*old, *tail, 0])[0] == []
    pool.check()
    assert loser.num_published_blocks == 2


def test_the_hash_depends_on_the_block_and_on_all_before_it():
    first, second = tuple(range(B)), tuple(range(B, 2 * B))
    assert hash_block(0, first) == hash_block(0, tuple(range(B)))
    hashes = {hash_block(0, first), hash_block(0, second), hash_block(hash_block(0, first), second)}
    assert len(hashes) == 3


def test_without_prefix_caching_nothing_is_ever_found():
    pool = BlockPool(4, B, enable_prefix_caching=False)
    published(pool, range(2 * B))
    assert pool.lookup(range(3 * B)) == ([], ROOT)
    pool.check()


def test_a_withdrawn_block_is_not_found_and_neither_is_what_continues_it():
    pool = BlockPool(8, B)
    request = published(pool, range(3 * B))
    pool.withdraw(request.block_table[1:2])
    assert pool.lookup(range(4 * B))[0] == request.block_table[:1]
    pool.check([request.block_table])
    again = published(pool, range(3 * B))
    assert pool.lookup(range(4 * B))[0] == request.block_table[:1] + again.block_table[1:]


def test_resetting_the_prefix_cache_forgets_everything_and_frees_nothing():
    pool = BlockPool(4, B)
    request = published(pool, range(2 * B))
    pool.reset_prefix_cache()
    assert pool.lookup(range(3 * B))[0] == []
    pool.check([request.block_table])
    pool.free(request.block_table)
    again = published(pool, range(2 * B))
    assert pool.lookup(range(3 * B))[0] == again.block_table


# ---- copy-on-write -------------------------------------------------------------------------------


def test_writing_into_a_shared_block_gets_a_new_one_and_a_copy():
    pool = BlockPool(3, B)
    table = pool.allocate(2)
    pool.take(table)
    child = list(table)
    assert pool.copy_on_write(child, 1) == (table[1], child[1])
    assert child[0] == table[0] and child[1] != table[1]
    pool.check([table, child])
    assert pool.copy_on_write(table, 1) is None, "the other user is now alone and writes in place"


def test_copy_on_write_without_a_free_block_raises_and_changes_nothing():
    pool = BlockPool(2, B)
    table = pool.allocate(2)
    pool.take(table)
    child = list(table)
    with pytest.raises(BlockPoolError):
        pool.copy_on_write(child, 1)
    assert child == table
    pool.check([table, child])


# ---- the audit can fail --------------------------------------------------------------------------


def lost_block(pool):
    pool._free.popitem()


def used_and_free(pool):
    pool._free[0] = None


def wrong_count(pool):
    pool._ref_counts[0] += 1


def negative_count(pool):
    pool._ref_counts[0] = -1


def foreign_block(pool):
    pool._free[17] = None


def forgotten_listing(pool):
    pool._by_hash.clear()


def listed_twice(pool):
    pool._by_hash[hash_block(0, (0, 1, 2, 3))].append(0)


def listed_under_a_wrong_hash(pool):
    pool._by_hash[1] = pool._by_hash.pop(hash_block(0, (0, 1, 2, 3)))


def listed_but_not_published(pool):
    del pool._published[0]


def empty_bucket(pool):
    pool._by_hash[1] = []


def same_content_twice(pool):
    pool._list(2, *pool._published[0][1:])


@pytest.mark.parametrize(
    "damage",
    [
        lost_block,
        used_and_free,
        wrong_count,
        negative_count,
        foreign_block,
        forgotten_listing,
        listed_twice,
        listed_under_a_wrong_hash,
        listed_but_not_published,
        empty_bucket,
        same_content_twice,
    ],
    ids=lambda f: f.__name__,
)
def test_the_audit_finds(damage):
    pool = BlockPool(4, B)
    request = published(pool, range(2 * B))
    pool.check([request.block_table])
    damage(pool)
    with pytest.raises(BlockPoolError):
        pool.check([request.block_table])


@pytest.mark.parametrize("tables", [[], [[0]], [[0, 1, 2]], [[0, 1], [1]]])
def test_the_audit_compares_reference_counts_with_the_tables(tables):
    pool = BlockPool(4, B)
    pool.allocate(2)
    with pytest.raises(BlockPoolError, match="references"):
        pool.check(tables)


def test_the_pool_works_where_torch_cannot_be_imported():
    code = "import sys; sys.modules['torch'] = None; from minillm.block_pool import BlockPool; BlockPool(1, 1).check()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(block_pool.__file__).parents[1])


# ---- random histories against a naive model ------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Sequences that share prefixes live, grow, fork and die in any order.

    The model: a plain list as free queue, and for each physical row the prefix that was computed into it.
    """

    @initialize(num_blocks=st.integers(1, 12), size=st.integers(1, 3), collide=st.booleans())
    def start(self, num_blocks, size, collide):
        self.patch = pytest.MonkeyPatch()
        if collide:
            self.patch.setattr(block_pool, "hash_block", lambda parent_hash, tokens: 7)
        self.pool, self.size = BlockPool(num_blocks, size), size
        self.queue = list(range(num_blocks))
        self.rows = {}
        self.live = []

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()

    def allocate(self, n):
        expected, self.queue = self.queue[:n], self.queue[n:]
        assert self.pool.allocate(n) == expected
        return expected

    def release(self, blocks):
        for block in reversed(blocks):
            if not any(block in request.block_table for request in self.live):
                self.queue.append(block)

    @rule(head=st.integers(0, 1), length=st.integers(1, 9), tail=st.lists(st.integers(0, 1), max_size=2))
    def begin(self, head, length, tail):
        tokens = [head, *([0, 1, 1, 0, 0, 1, 0, 1][: length - 1]), *tail]
        hits, key = self.pool.lookup(tokens)
        assert len(hits) * self.size < len(tokens)
        for position in range(len(hits) * self.size):
            row = hits[position // self.size] * self.size + position % self.size
            assert self.rows[row] == tokens[: position + 1]
        revived = [block for block in hits if block in self.queue]
        missing = self.pool.blocks_for(len(tokens)) - len(hits)
        if missing > len(self.queue) - len(revived):
            return
        self.pool.take(hits)
        self.queue = [block for block in self.queue if block not in revived]
        request = Request("r", tokens, SamplingParams())
        request.block_table = hits + self.allocate(missing)
        request.num_computed_tokens = len(hits) * self.size
        request.num_published_blocks, request.prefix_key = len(hits), key
        self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=st.integers(1, 4), publish=st.booleans())
    def compute(self, data, n, publish):
        request = data.draw(st.sampled_from(self.live))
        start = request.num_computed_tokens
        for position in range(start, min(start + n, request.num_tokens)):
            index = position // self.size
            if self.pool.ref_count(request.block_table[index]) > 1:
                if not self.queue:
                    return
                src, dst = self.pool.copy_on_write(request.block_table, index)
                assert dst == request.block_table[index] == self.queue.pop(0)
                for i in range(self.size):
                    self.rows[dst * self.size + i] = self.rows.get(src * self.size + i)
            row = request.block_table[index] * self.size + position % self.size
            self.rows[row] = request.token_ids[: position + 1]
            request.num_computed_tokens = position + 1
        if publish:
            self.pool.publish(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def fork(self, data, token):
        parent = data.draw(st.sampled_from(self.live))
        cut = parent.num_computed_tokens
        child = Request("c", [*parent.token_ids[:cut], *([token] * (parent.num_tokens - cut))], SamplingParams())
        child.block_table = list(parent.block_table)
        child.num_computed_tokens = cut
        child.num_published_blocks, child.prefix_key = parent.num_published_blocks, parent.prefix_key
        self.pool.take(child.block_table)
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        self.pool.free(request.block_table)
        self.release(request.block_table)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fail(self, data):
        request = data.draw(st.sampled_from(self.live))
        self.pool.withdraw(request.block_table)

    @rule()
    def reset(self):
        self.pool.reset_prefix_cache()

    @invariant()
    def books_are_true(self):
        if hasattr(self, "pool"):
            self.pool.check([request.block_table for request in self.live])
            assert self.pool.num_free == len(self.queue)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
