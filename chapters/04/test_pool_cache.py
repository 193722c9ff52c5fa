"""The pool that remembers: free blocks keep their names until they are used again.

Where a name comes from is nothing to the pool, so here names are numbers.
"""

import tracemalloc

import pytest


def digest(number):
    return number.to_bytes(32, "big")


def ids(blocks):
    return [block.block_id for block in blocks]


def names(pool):
    """Block id -> number of its digest, of the blocks that carry one."""
    return {
        block.block_id: int.from_bytes(block.block_hash, "big")
        for block in pool.blocks
        if block.block_hash is not None
    }


def state(pool):
    return ids(pool.free_queue), [block.ref_cnt for block in pool.blocks], names(pool)


def shown(pool):
    """The pool in words, for messages."""
    queue, counts, digests = state(pool)
    return f"free queue {queue}, counts from block 0 on {counts}, digests by block {digests}"


def mark(pool, blocks, numbers):
    """Gives the blocks names by hand: only what the pool does with named blocks is tested."""
    for block, number in zip(blocks, numbers, strict=True):
        block.block_hash = digest(number)
        pool.cached_blocks[digest(number)] = block


# Touch, free, evict.


@pytest.mark.contract
def test_a_free_block_keeps_its_name(stage):
    pool = stage.BlockPool(5)
    a, b = pool.get_new_blocks(2)
    mark(pool, [a], [7])
    assert set(pool.free_blocks([a, b])) == {a, b}, "both are free now"
    assert names(pool) == {a.block_id: 7}, shown(pool)
    assert pool.num_free_blocks == 4, f"a block with a name is free like any other: {shown(pool)}"


@pytest.mark.contract
def test_a_hit_takes_a_free_block_out_of_the_queue(stage):
    pool = stage.BlockPool(5)
    blocks = pool.get_new_blocks(4)
    mark(pool, blocks, [1, 2, 3, 4])
    pool.free_blocks(blocks)
    pool.touch([blocks[1]])
    assert (blocks[1].ref_cnt, pool.num_free_blocks) == (1, 3), shown(pool)
    others = pool.get_new_blocks(3)
    assert blocks[1] not in others, f"somebody reads this block: {shown(pool)}"
    assert names(pool) == {blocks[1].block_id: 2}, f"it keeps its name: {shown(pool)}"


@pytest.mark.contract
def test_a_hit_on_a_block_in_use_counts(stage):
    pool = stage.BlockPool(5)
    (block,) = pool.get_new_blocks(1)
    mark(pool, [block], [7])
    pool.touch([block])
    assert (block.ref_cnt, pool.num_free_blocks) == (2, 3), shown(pool)
    pool.free_blocks([block])
    assert (block.ref_cnt, pool.num_free_blocks) == (1, 3), f"one reader is left: {shown(pool)}"


@pytest.mark.contract
def test_a_free_block_that_two_tables_share_at_once(stage):
    pool = stage.BlockPool(5)
    (block,) = pool.get_new_blocks(1)
    mark(pool, [block], [7])
    pool.free_blocks([block])
    pool.touch([block, block])
    assert (block.ref_cnt, pool.num_free_blocks) == (2, 3), shown(pool)


def test_a_block_without_a_name_is_dead_when_it_is_free(stage):
    pool = stage.BlockPool(5)
    a, b = pool.get_new_blocks(2)
    mark(pool, [a], [7])
    pool.free_blocks([a, b])
    before = state(pool)
    for wrong in (b, pool.null_block, stage.BlockPool(5).blocks[1], stage.BlockPool(9).blocks[8]):
        with pytest.raises(ValueError):
            pool.touch([a, wrong])
        assert state(pool) == before, f"refused, so nothing may have changed: {shown(pool)}"


@pytest.mark.contract
def test_a_block_that_is_used_again_is_forgotten(stage):
    """GeeeekExplorer/nano-vllm#163: two usable blocks, X has one, then Y needs both."""
    pool = stage.BlockPool(3)
    x = pool.get_new_blocks(1)
    mark(pool, x, [1])
    pool.free_blocks(x)
    y = pool.get_new_blocks(2)
    assert [block.block_hash for block in y] == [None, None], shown(pool)
    assert not pool.cached_blocks, f"block {x[0].block_id} holds other tokens now: {shown(pool)}"
    assert pool.num_evictions == 1
    pool.free_blocks(y)
    assert not pool.cached_blocks, f"Y has named nothing: {shown(pool)}"
    assert pool.num_evictions == 1


def test_freed_last_evicted_last(stage):
    pool = stage.BlockPool(5)
    blocks = pool.get_new_blocks(4)
    mark(pool, blocks, [1, 2, 3, 4])
    pool.free_blocks([blocks[2], blocks[0]])
    pool.free_blocks([blocks[3], blocks[1]])
    assert ids(pool.free_queue) == [3, 1, 4, 2], "in the order in which they were freed"
    assert ids(pool.get_new_blocks(1)) == [3]
    assert names(pool) == {1: 1, 2: 2, 4: 4}, f"only what was needed is forgotten: {shown(pool)}"
    assert ids(pool.get_new_blocks(2)) == [1, 4]
    assert (names(pool), pool.num_evictions) == ({2: 2}, 3), shown(pool)


def test_the_end_of_a_chain_is_evicted_first(stage):
    """llm-d/llm-d-inference-sim#704: who has three blocks gives them back last first."""
    pool = stage.BlockPool(4)
    chain = pool.get_new_blocks(3)
    mark(pool, chain, [1, 2, 3])
    pool.free_blocks(reversed(chain))
    unrelated = pool.get_new_blocks(1)
    assert unrelated == [chain[2]], f"without block {ids(chain)[0]} no other can be found"
    pool.free_blocks(unrelated)
    assert names(pool) == {1: 1, 2: 2}, shown(pool)


def test_a_hit_renews_what_it_found_and_nothing_else(stage):
    """sgl-project/mini-sglang#124: a chain of four, then D, then a hit on two of the four."""
    pool = stage.BlockPool(6)
    chain = pool.get_new_blocks(4)
    mark(pool, chain, [10, 11, 12, 13])
    pool.free_blocks(reversed(chain))
    d = pool.get_new_blocks(1)
    mark(pool, d, [20])
    pool.free_blocks(d)
    pool.touch(chain[:2])
    pool.free_blocks(reversed(chain[:2]))
    assert ids(pool.free_queue) == [4, 3, 5, 2, 1], f"c3, c2, D, c1, c0: {shown(pool)}"
    pool.get_new_blocks(2)
    assert names(pool) == {1: 10, 2: 11, 5: 20}, f"c3 and c2 are gone: {shown(pool)}"


@pytest.mark.parametrize("n", [-1, 4])
def test_a_refused_request_evicts_nothing(stage, n):
    pool = stage.BlockPool(5)
    blocks = pool.get_new_blocks(4)
    mark(pool, blocks[:3], [1, 2, 3])
    pool.free_blocks(blocks[:3])
    before = state(pool)
    with pytest.raises(ValueError):
        pool.get_new_blocks(n)
    assert state(pool) == before, f"refused, so nothing may have changed: {shown(pool)}"
    assert (len(pool.cached_blocks), pool.num_evictions) == (3, 0)


def test_more_releases_than_references_of_a_named_block(stage):
    pool = stage.BlockPool(5)
    a, b = pool.get_new_blocks(2)
    mark(pool, [a], [7])
    pool.touch([a])
    before = state(pool)
    for wrong in ([b, a, a, a], [a, pool.null_block], [b, b], [b, stage.BlockPool(5).blocks[3]]):
        with pytest.raises(ValueError):
            pool.free_blocks(wrong)
        assert state(pool) == before, f"refused, so nothing may have changed: {shown(pool)}"


def test_a_small_pool_stays_small(stage):
    """A queue that kept a place for each block that has left would have 100,000 of 8 bytes."""
    pool = stage.BlockPool(5)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(100_000):
            pool.free_blocks(pool.get_new_blocks(1))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 10_000, f"{after - before} bytes more than at the beginning"
    assert ids(pool.free_queue) == [1, 2, 3, 4], shown(pool)


# Usage and reset.


def test_named_blocks_that_are_free_are_not_in_use(stage):
    pool = stage.BlockPool(6)
    assert pool.usage == 0
    blocks = pool.get_new_blocks(4)
    assert pool.usage == pytest.approx(4 / 5), "of 5 usable blocks"
    mark(pool, blocks, [1, 2, 3, 4])
    pool.free_blocks(blocks[:3])
    assert pool.usage == pytest.approx(1 / 5), shown(pool)
    assert pool.num_cached_blocks == 4, shown(pool)


@pytest.mark.contract
def test_no_reset_while_a_block_is_in_use(stage):
    pool = stage.BlockPool(5)
    blocks = pool.get_new_blocks(3)
    mark(pool, blocks, [1, 2, 3])
    pool.free_blocks(blocks[:2])
    before = state(pool)
    with pytest.raises(ValueError, match="in use"):
        pool.reset_prefix_cache()
    assert state(pool) == before, f"refused, so nothing may have changed: {shown(pool)}"
    assert len(pool.cached_blocks) == 3


def test_a_reset_forgets_all_names_and_keeps_the_order(stage):
    pool = stage.BlockPool(6)
    blocks = pool.get_new_blocks(4)
    mark(pool, blocks[:3], [1, 2, 3])
    pool.free_blocks([blocks[2], blocks[0], blocks[3], blocks[1]])
    order = ids(pool.free_queue)
    assert set(pool.reset_prefix_cache()) == set(blocks[:3]), "whose contents are dead now"
    assert (names(pool), pool.cached_blocks, pool.num_cached_blocks) == ({}, {}, 0), shown(pool)
    assert ids(pool.free_queue) == order == [5, 3, 1, 4, 2]
    assert pool.reset_prefix_cache() == [], "there is nothing more to forget"
    pool.get_new_blocks(5)
    assert pool.num_evictions == 0, "what a reset forgets is not evicted"
