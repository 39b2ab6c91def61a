"""Blocks by chained hash: the pool of vLLM V1's prefix caching, and the hash-table pool."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impress.blockhash import chain, labels_of
from impress.errors import BadInput
from impress.lineage.blockpool import BlockPool, Granted
from impress.lineage.hashpool import HashPool

SIZE = 4
ROOT = bytes(32)


def run(*blocks: int, more: int = 0) -> list[int]:
    """Whole blocks that each repeat one number, then `more` other tokens."""
    return [number for number in blocks for _ in range(SIZE)] + [99] * more


def keys_of(tokens: list[int]) -> list[bytes]:
    return list(chain(ROOT, labels_of(np.array(tokens, dtype=np.int32), SIZE), SIZE))


# ---- the block pool ------------------------------------------------------------------------


def test_a_prompt_shares_whole_blocks_and_gets_a_tail_of_its_own() -> None:
    pool = BlockPool(10, SIZE, ROOT)
    assert pool.allocate("a", run(1, 2, 3, more=2)) == Granted([0, 1, 2, 3], 0)
    assert pool.allocate("b", run(1, 2, 4, more=2)) == Granted([0, 1, 4, 5], 8)
    assert pool.computed(run(1, 2, 3, more=2)) == [0, 1, 2]  # not the partial one
    assert pool.n_free == 4
    pool.free("a")
    assert pool.n_free == 6  # 0 and 1 are b's
    pool.free("b")
    pool.check()


def test_the_last_token_is_computed_though_all_is_there() -> None:
    pool = BlockPool(10, SIZE, ROOT)
    pool.allocate("a", run(1, 2))
    assert pool.computed(run(1, 2)) == [0]
    assert pool.allocate("b", run(1, 2)) == Granted([0, 2], 4)  # 2 holds what 1 does: a duplicate
    pool.free("a")
    assert pool.computed(run(1, 2, 3)) == [0, 1]  # the oldest that has the hash
    pool.check()


def test_a_lookup_touches_nothing() -> None:
    pool = BlockPool(4, SIZE, ROOT)
    for name, block in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
        pool.allocate(name, run(block))
    for name in "abcd":
        pool.free(name)
    assert pool.computed(run(1, more=1)) == [0]
    assert pool.allocate("e", run(5)) == Granted([0], 0)  # still the oldest
    assert pool.computed(run(1, more=1)) == []


def test_of_one_request_the_longest_prefix_goes_first() -> None:
    pool = BlockPool(6, SIZE, ROOT)
    pool.allocate("old", run(7))
    pool.allocate("a", run(1, 2, 3, more=1))
    pool.free("old")
    pool.free("a")
    taken = pool.allocate("b", run(11, 12, 13, 14))
    assert taken is not None
    assert taken.blocks == [5, 0, 4, 3]  # never used, then the older request's, then tail first
    assert pool.computed(run(1, 2, 3, more=1)) == [1, 2]
    pool.check()


def test_a_hit_among_the_free_blocks_is_no_room_for_the_rest() -> None:
    pool = BlockPool(4, SIZE, ROOT)
    pool.allocate("a", run(1, 2))
    pool.allocate("b", run(8))
    pool.free("a")
    assert pool.n_free == 3
    assert pool.allocate("c", run(1, 2, 3, 4)) is None  # two are its own hits: one is left
    assert (pool.n_free, pool.computed(run(1, 2, 9))) == (3, [0, 1])
    pool.check()
    assert pool.allocate("c", run(1, 2, 3)) == Granted([0, 1, 3], 8)
    assert pool.n_free == 0
    pool.check()


def test_a_block_is_no_hit_while_its_prefix_is_gone_and_stays_beside_its_duplicate() -> None:
    """The order of the free blocks never does this to a prefix. Whatever does, no lookup goes past
    the hole, and what is computed again becomes a second block of the same hash."""
    pool = BlockPool(5, SIZE, ROOT)
    pool.allocate("a", run(1, 2, more=1))
    pool.free("a")
    pool._free.put(np.array([0]), -1.0, np.array([0]))  # block 1 is the next to go
    assert pool.allocate("b", run(5)) == Granted([0], 0)
    assert pool.computed(run(1, 2, more=1)) == []
    assert pool.allocate("c", run(1, 2, more=1)) == Granted([3, 4, 2], 0)
    pool.check()
    assert pool.computed(run(1, 2, 9)) == [3, 1]
    pool.free("c")
    pool.free("b")
    assert pool.allocate("d", run(21, 22, 23)) == Granted([1, 2, 4], 0)  # 2, c's tail, c's 2
    assert pool.computed(run(1, 2, 9)) == [3]
    pool.check()


def test_a_block_given_to_another_is_not_found_under_its_old_hash() -> None:
    pool = BlockPool(2, SIZE, ROOT)
    pool.allocate("a", run(1, 2))
    pool.free("a")
    assert pool.allocate("b", run(1, 3, more=0)) == Granted([0, 1], 4)
    assert pool.computed(run(1, 2, 9)) == [0]
    assert pool.computed(run(1, 3, 9)) == [0, 1]
    pool.free("b")
    assert pool.allocate("c", run(7, 8)) == Granted([1, 0], 0)
    assert pool.computed(run(1, 3, 9)) == []


def test_decoding_fills_blocks_that_others_then_find() -> None:
    pool = BlockPool(5, SIZE, ROOT)
    pool.allocate("a", run(1, more=2))
    assert pool.append("a", [99, 99]) == []  # fills the partial block
    assert pool.append("a", [99]) == [2]
    assert pool.computed(run(1, 99, more=1)) == [0, 1]
    assert pool.append("a", [99] * 8) == [3, 4]
    assert pool.append("a", [99] * 8) is None
    pool.check()
    pool.free("a")
    assert pool.computed(run(1, 99, 99, 99, more=1)) == [0, 1, 2, 3]
    pool.check()


def test_extra_keys_tell_images_apart() -> None:
    pool = BlockPool(8, 16, ROOT)
    tokens = [5] * 40
    pool.allocate("a", tokens, {20: b"cat"})
    assert pool.computed(tokens, {20: b"cat"}) == [0, 1]
    assert pool.computed(tokens, {20: b"dog"}) == [0]
    assert pool.computed(tokens) == [0]
    with pytest.raises(BadInput, match="multiple of 16 tokens, got 4"):
        BlockPool(8, SIZE, ROOT).computed(tokens, {20: b"cat"})


def test_a_begun_block_that_is_filled_keeps_its_extra_keys() -> None:
    """A block filled by `append` was found by requests with the same tokens and another image."""
    pool = BlockPool(8, 16, ROOT)
    one, other = {20: b"cat", 3: b"cat"}, {20: b"dog", 3: b"cat"}
    pool.allocate("a", [1] * 22, one)
    for _ in range(2):
        pool.append("a", [1] * 5)
    assert pool.computed([1] * 33, one) == [0, 1]
    assert pool.computed([1] * 33, other) == [0]
    assert pool.computed([1] * 33, {3: b"cat"}) == [0]
    pool.append("a", [1] * 16)  # the extras belong to the block before
    assert pool.computed([1] * 49, one) == [0, 1, 2]
    pool.check()


def test_a_prompt_is_what_it_was_when_it_came() -> None:
    """`append` looked at the prompt's array again: if other tokens were in it by then, the block
    was found by requests for those, though it held none of them."""
    pool = BlockPool(4, SIZE, ROOT)
    prompt = np.array(run(1, more=2), dtype=np.int32)
    pool.allocate("a", prompt)
    prompt[:] = 7
    pool.append("a", [99, 99])
    assert pool.computed([*run(1), 7, 7, 99, 99, 5]) == [0]
    assert pool.computed(run(1, 99, more=1)) == [0, 1]


class Reference:
    """The same with lists: a queue whose front goes first, and the tokens of every prefix."""

    def __init__(self, n_blocks: int) -> None:
        self.queue = list(range(n_blocks))
        self.holds: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end, by age
        self.tables: dict[int, tuple[list[int], list[int]]] = {}

    def computed(self, tokens: list[int]) -> list[int]:
        hit: list[int] = []
        for end in range(SIZE, len(tokens), SIZE):
            same = [b for b, held in self.holds.items() if held == tuple(tokens[:end])]
            if not same:
                break
            hit.append(same[0])
        return hit

    def _take(self, tokens: list[int], blocks: list[int], n_new: int) -> list[int]:
        new, self.queue = self.queue[:n_new], self.queue[n_new:]
        for block in new:
            self.holds.pop(block, None)
        for i, block in enumerate(blocks + new):
            whole = tuple(tokens[: (i + 1) * SIZE])
            if len(whole) == (i + 1) * SIZE and block not in self.holds:
                self.holds[block] = whole
        return new

    def allocate(self, name: int, tokens: list[int]) -> tuple[list[int], int] | None:
        hit = self.computed(tokens)
        n_new = -(-len(tokens) // SIZE) - len(hit)
        queue = [b for b in self.queue if b not in hit]
        if n_new > len(queue):
            return None
        self.queue = queue
        blocks = hit + self._take(tokens, hit, n_new)
        self.tables[name] = (blocks, list(tokens))
        return blocks, len(hit) * SIZE

    def append(self, name: int, more: list[int]) -> list[int] | None:
        blocks, tokens = self.tables[name]
        n_new = -(-(len(tokens) + len(more)) // SIZE) - len(blocks)
        if n_new > len(self.queue):
            return None
        tokens += more
        new = self._take(tokens, blocks, n_new)
        blocks += new
        return new

    def free(self, name: int) -> None:
        blocks, _ = self.tables.pop(name)
        in_use = {b for others, _ in self.tables.values() for b in others}
        self.queue += [b for b in reversed(blocks) if b not in in_use]


numbers = st.lists(st.integers(0, 1), min_size=1, max_size=4 * SIZE)
deeds = st.one_of(
    st.tuples(st.just("allocate"), numbers),
    st.tuples(st.just("append"), numbers),
    st.tuples(st.just("free"), numbers),
)


@settings(max_examples=200)
@given(st.lists(deeds, max_size=40))
def test_the_pool_does_what_a_queue_and_a_list_of_prefixes_do(done: list) -> None:
    pool, model = BlockPool(9, SIZE, ROOT), Reference(9)
    for name, (deed, numbers) in enumerate(done):
        # Blocks of equal tokens, so that prefixes meet; some with a partial one.
        tokens = [n for n in numbers[:3] for _ in range(SIZE)] + [7] * (len(numbers) % SIZE)
        if deed == "allocate":
            assert pool.allocate(name, tokens) == model.allocate(name, tokens)
        elif model.tables:
            whom = sorted(model.tables)[sum(numbers) % len(model.tables)]
            if deed == "append":
                assert pool.append(whom, numbers) == model.append(whom, numbers)
            else:
                pool.free(whom)
                model.free(whom)
        pool.check()
        assert pool.computed(tokens) == model.computed(tokens)
        assert pool.n_free == len(model.queue)
        prefixes = set(model.holds.values())
        assert all(held[:-SIZE] in prefixes for held in prefixes if len(held) > SIZE)


# ---- the hash-table pool -------------------------------------------------------------------


def serve(pool: HashPool[int], tokens: list[int], name: int) -> int:
    """Run one whole request, whose new blocks hold `name`; how many blocks were there already."""
    keys = keys_of(tokens)
    got = pool.acquire(keys)
    pool.release(keys, got + [name] * (len(keys) - len(got)), len(got))
    pool.check()
    return len(got)


def test_the_pool_keeps_k_blocks_by_last_use_and_of_one_request_the_beginning() -> None:
    pool = HashPool[int](4)
    assert serve(pool, run(1, 2, 3), 1) == 0
    assert serve(pool, run(7, 8), 2) == 0
    assert pool.lookup(keys_of(run(1, 2, 3))) == 2
    assert serve(pool, run(1, 2, 3, 4, 5), 3) == 2
    assert pool.lookup(keys_of(run(1, 2, 3, 4, 5))) == 4
    assert pool.lookup(keys_of(run(7, 8))) == 0


def test_what_a_request_refers_to_takes_no_room_and_is_shared() -> None:
    pool = HashPool[int](2)
    serve(pool, run(1, 2), 1)
    keys = keys_of(run(1, 2))
    assert pool.acquire(keys) == [1, 1]
    assert len(pool) == 0
    serve(pool, run(5, 6), 2)
    assert pool.acquire(keys) == [1, 1]  # a second request, while the first runs
    pool.release(keys, [1, 1], 2)
    assert len(pool) == 2 and pool.lookup(keys) == 2
    pool.release(keys, [1, 1], 2)
    pool.check()
    assert pool.lookup(keys_of(run(5, 6))) == 0


def test_of_equal_blocks_the_first_to_come_is_kept() -> None:
    pool = HashPool[int](4)
    keys = keys_of(run(1, 2))
    assert pool.acquire(keys) == [] == pool.acquire(keys)
    pool.release(keys, [1, 1], 0)
    pool.release(keys, [2, 2], 0)
    pool.check()
    assert pool.acquire(keys) == [1, 1]


def test_a_block_whose_prefix_is_not_here_is_no_hit() -> None:
    pool = HashPool[int](4)
    keys = keys_of(run(1, 2))
    pool.release(keys[1:], [8], 0)
    assert pool.acquire(keys) == []
    pool.release(keys, [9, 9], 0)
    assert pool.acquire(keys) == [9, 8]


@settings(max_examples=150)
@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=5))),
)
def test_the_hash_pool_does_what_a_sorted_list_would(
    most: int, steps: list[tuple[bool, list[int]]]
) -> None:
    """Requests begin, and end in some order; the list holds (last use, -end, prefix)."""
    pool, idle, refs, running = HashPool[str](most), {}, {}, []
    tick = 0
    for begins, blocks in steps:
        if begins:
            keys, prefixes = (
                keys_of(run(*blocks)),
                [tuple(blocks[: i + 1]) for i in range(len(blocks))],
            )
            want = 0
            while want < len(prefixes) and (prefixes[want] in idle or refs.get(prefixes[want])):
                want += 1
            got = pool.acquire(keys)
            assert len(got) == want
            for prefix in prefixes[:want]:
                idle.pop(prefix, None)
                refs[prefix] = refs.get(prefix, 0) + 1
            running.append((keys, prefixes, got))
        elif running:
            keys, prefixes, got = running.pop(sum(blocks) % len(running))
            tick += 1
            pool.release(keys, got + [""] * (len(keys) - len(got)), len(got))
            for i, prefix in enumerate(prefixes):
                if i < len(got):
                    refs[prefix] -= 1
                if not refs.get(prefix):
                    idle[prefix] = (tick, -len(prefix))
            while len(idle) > most:
                del idle[min(idle, key=idle.__getitem__)]
        pool.check()
        assert len(pool) == len(idle)


def test_a_pool_of_blocks_says_what_it_was_asked_for_in_vain() -> None:
    """Freeing a request twice was a bare KeyError; allocating twice, an assertion."""
    pool = BlockPool(4, SIZE, ROOT)
    pool.allocate("a", run(1))
    with pytest.raises(BadInput, match="'a' has blocks already"):
        pool.allocate("a", run(2))
    pool.free("a")
    for wrong in (lambda: pool.free("a"), lambda: pool.append("a", run(2))):
        with pytest.raises(BadInput, match="'a' has no blocks here"):
            wrong()
    pool.check()
    assert pool.n_free == 4


def test_blocks_released_twice_are_refused_and_stay_as_they_were() -> None:
    """Blocks others still held counted as nobody's, or a count fell below 0 and it never went."""
    pool, keys = HashPool[int](4), keys_of(run(1, 2))
    pool.release(keys, [1, 2], 0)
    assert pool.acquire(keys) == [1, 2]
    pool.release(keys, [1, 2], 2)
    with pytest.raises(BadInput, match="is not acquired here: released twice"):
        pool.release(keys, [1, 2], 2)
    with pytest.raises(BadInput, match="2 keys, 1 blocks, 0 of them acquired"):
        pool.release(keys, [1], 0)
    with pytest.raises(BadInput, match="is not acquired here"):
        HashPool[int](4).release(keys, [1, 2], 1)
    pool.check()
    assert pool.acquire(keys) == [1, 2] and len(pool) == 0
