"""One pool for all groups: keys with the number of the group, null blocks in any list."""

import pytest

from pagedattn.cache import OutOfBlocks
from pagedattn.prefix import BlockHasher


def ids(blocks):
    return [block.block_id for block in blocks]


def request(stage, name, num_tokens, first=0, block_size=4):
    """A request whose tokens, and so its digests, depend on ``first``."""
    tokens = [first + i for i in range(num_tokens)]
    return stage.Request(name, tokens, BlockHasher(block_size, "seed"))


def state(pool):
    return (
        ids(pool.free_queue),
        [block.ref_cnt for block in pool.blocks],
        [block.block_hash for block in pool.blocks],
        dict(pool.cached_blocks),
    )


# Blocks.


def test_a_pool_of_the_null_block_alone(stage):
    pool = stage.BlockPool(1)
    assert (pool.num_free_blocks, pool.usage) == (0, 0.0)
    assert pool.reset_prefix_cache() == []
    assert pool.get_new_blocks(0) == []
    with pytest.raises(OutOfBlocks):
        pool.get_new_blocks(1)


@pytest.mark.parametrize("num_blocks", [0, -1, 2.0, True])
def test_a_pool_without_a_block_is_refused(stage, num_blocks):
    with pytest.raises(ValueError, match="num_blocks"):
        stage.BlockPool(num_blocks)


def test_null_blocks_are_passed_over(stage):
    pool = stage.BlockPool(6)
    a, b = pool.get_new_blocks(2)
    null = pool.null_block
    pool.touch([null, a, null])
    assert (null.ref_cnt, a.ref_cnt, b.ref_cnt) == (0, 2, 1)
    for _ in range(3):
        pool.free_blocks([null])
    pool.free_blocks([b, null, a, null])
    assert (null.ref_cnt, a.ref_cnt, b.ref_cnt) == (0, 1, 0)
    assert ids(pool.free_queue) == [3, 4, 5, 2]


def test_a_release_too_many_changes_nothing(stage):
    pool = stage.BlockPool(6)
    a, b = pool.get_new_blocks(2)
    before = state(pool)
    with pytest.raises(ValueError, match="block 1 is released 2 times; its ref_cnt is 1"):
        pool.free_blocks([b, pool.null_block, a, a])
    foreign = stage.BlockPool(6).get_new_blocks(1)
    with pytest.raises(ValueError, match="not a block of this pool"):
        pool.free_blocks([a, *foreign])
    with pytest.raises(ValueError, match="not a block of this pool"):
        pool.touch([a, *foreign])
    with pytest.raises(ValueError, match="nothing to share"):
        pool.touch([a, pool.blocks[3]])
    assert state(pool) == before


def test_usage_counts_blocks_in_use(stage):
    pool = stage.BlockPool(11)
    blocks = pool.get_new_blocks(4)
    assert pool.usage == pytest.approx(0.4)
    pool.cache_full_blocks(request(stage, "r", 16), blocks, 0, 4, 4, 0)
    pool.free_blocks(blocks)
    assert pool.usage == 0, "free with a digest is free"


# Digests.


def test_each_group_has_its_own_key(stage):
    pool = stage.BlockPool(8)
    first, second = pool.get_new_blocks(2)
    r = request(stage, "r", 5)
    pool.cache_full_blocks(r, [first], 0, 1, 4, 0)
    assert pool.get_cached_block(r.block_hashes[0], [0]) == [first]
    assert pool.get_cached_block(r.block_hashes[0], [1]) is None
    assert pool.get_cached_block(r.block_hashes[0], [0, 1]) is None, "one group misses"
    pool.cache_full_blocks(r, [second], 0, 1, 4, 1)
    assert pool.get_cached_block(r.block_hashes[0], [0, 1]) == [first, second]
    assert pool.get_cached_block(r.block_hashes[0], [1, 0]) == [second, first]
    assert second.block_hash == r.block_hashes[0] + bytes([0, 0, 0, 1])


def test_the_longest_hit_ends_where_one_group_misses(stage):
    pool = stage.BlockPool(12)
    r = request(stage, "r", 12)
    full, other = pool.get_new_blocks(3), pool.get_new_blocks(3)
    pool.cache_full_blocks(r, full, 0, 3, 4, 0)
    pool.cache_full_blocks(r, other, 0, 2, 4, 1)
    assert pool.find_longest_cache_hit(r.block_hashes, [0]) == (full,)
    assert pool.find_longest_cache_hit(r.block_hashes, [0, 1]) == (full[:2], other[:2])
    assert pool.find_longest_cache_hit(r.block_hashes[:1], [0]) == (full[:1],)
    assert pool.find_longest_cache_hit(r.block_hashes[1:], [2]) == ([],)


def test_a_larger_block_joins_digests(stage):
    """Blocks of 8 over digests of 4 tokens: 2 x 32 bytes and 4 for the group."""
    pool = stage.BlockPool(8)
    r = request(stage, "r", 21)
    large = pool.get_new_blocks(2)
    pool.cache_full_blocks(r, large, 0, 2, 8, 3)
    h = r.block_hashes
    assert [block.block_hash for block in large] == [
        h[0] + h[1] + bytes([0, 0, 0, 3]),
        h[2] + h[3] + bytes([0, 0, 0, 3]),
    ]
    assert [len(block.block_hash) for block in large] == [68, 68]
    assert list(stage.block_hashes_of(r, 8)) == [h[0] + h[1], h[2] + h[3]], "the fifth stands alone"
    assert stage.block_hashes_of(r, 8)[-1] == h[2] + h[3]
    with pytest.raises(ValueError, match="digests of 4 tokens cannot name blocks of 6"):
        stage.block_hashes_of(r, 6)


def test_null_blocks_get_no_digest(stage):
    pool = stage.BlockPool(8)
    r = request(stage, "r", 16)
    a, b = pool.get_new_blocks(2)
    null = pool.null_block
    pool.cache_full_blocks(r, [null, a, null, b], 0, 4, 4, 0)
    assert (null.block_hash, a.block_hash) == (None, r.block_hashes[1] + bytes(4))
    assert list(pool.cached_blocks) == [r.block_hashes[1] + bytes(4), r.block_hashes[3] + bytes(4)]


def test_registering_is_refused_as_a_whole(stage):
    pool = stage.BlockPool(8)
    r = request(stage, "r", 17)
    a, b, c, gone = pool.get_new_blocks(4)
    pool.cache_full_blocks(r, [a], 0, 1, 4, 0)
    pool.free_blocks([gone])
    foreign = stage.BlockPool(8).get_new_blocks(1)
    before = state(pool)
    for blocks, numbers, message in (
        ([b, a], (0, 2), "block 1 has a digest already"),
        ([b, b], (0, 2), "block 2 has a digest already"),
        ([b, gone], (0, 2), "block 4 is free"),
        ([b, *foreign], (0, 2), "not a block of this pool"),
        ([b, c], (0, 3), "has 2 blocks and 4 digests"),
        ([b] * 5, (0, 5), "has 5 blocks and 4 digests"),
        ([b, c], (-1, 2), "blocks -1 to 2"),
    ):
        with pytest.raises(ValueError, match=message):
            pool.cache_full_blocks(r, blocks, *numbers, 4, 0)
        assert state(pool) == before, message
    pool.cache_full_blocks(r, [a, b], 2, 2, 4, 0)
    pool.cache_full_blocks(r, [a, b], 2, 1, 4, 0)
    assert state(pool) == before, "there was nothing to register"


def test_a_twin_takes_the_place(stage):
    """Blocks 1 and 4 hold the same tokens. The first one is found, until it is evicted."""
    pool = stage.BlockPool(8)
    one, _, _, four = pool.get_new_blocks(4)
    r = request(stage, "r", 4)
    pool.cache_full_blocks(r, [one], 0, 1, 4, 0)
    pool.cache_full_blocks(request(stage, "s", 4), [four], 0, 1, 4, 0)
    assert len(pool.cached_blocks) == 1, "keys are counted, not blocks"
    assert pool.get_cached_block(r.block_hashes[0], [0]) == [one]
    pool.evict_blocks([1])
    assert pool.get_cached_block(r.block_hashes[0], [0]) == [four]
    pool.evict_blocks([4])
    assert pool.get_cached_block(r.block_hashes[0], [0]) is None
    assert pool.cached_blocks == {}


def test_evict_blocks_in_use(stage):
    pool = stage.BlockPool(8)
    blocks = pool.get_new_blocks(3)
    r = request(stage, "r", 12)
    pool.cache_full_blocks(r, blocks, 0, 3, 4, 0)
    queue = ids(pool.free_queue)
    pool.evict_blocks([2, 0, 2, 7])
    assert [block.block_hash is None for block in blocks] == [False, True, False]
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    assert ids(pool.free_queue) == queue
    before = state(pool)
    for block_id in (8, -1):
        with pytest.raises(ValueError, match=f"block {block_id}"):
            pool.evict_blocks([1, block_id])
    assert state(pool) == before


def test_a_free_block_is_hit_until_it_is_needed(stage):
    pool = stage.BlockPool(5)
    blocks = pool.get_new_blocks(3)
    r = request(stage, "r", 12)
    pool.cache_full_blocks(r, blocks, 0, 3, 4, 2)
    pool.free_blocks(reversed(blocks))
    assert ids(pool.free_queue) == [4, 3, 2, 1]
    assert ids(pool.get_new_blocks(2)) == [4, 3], "the end of the chain goes first"
    assert pool.find_longest_cache_hit(r.block_hashes, [2]) == (blocks[:2],)
    assert blocks[2].block_hash is None


def test_reset_keeps_the_order_of_the_queue(stage):
    pool = stage.BlockPool(5)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(request(stage, "r", 12), blocks, 0, 3, 4, 0)
    pool.free_blocks(blocks[:2])
    before = state(pool)
    with pytest.raises(ValueError, match="1 blocks are in use"):
        pool.reset_prefix_cache()
    assert state(pool) == before
    pool.free_blocks(blocks[2:])
    assert pool.reset_prefix_cache() == blocks
    assert ids(pool.free_queue) == [4, 1, 2, 3]
    assert pool.cached_blocks == {}
    assert not any(block.block_hash for block in pool.blocks)


# Samples of how long blocks stay.


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_stay_of_a_block(stage):
    """Born at 1, hit at 3, 4, 6, 10 and 11, evicted at 15: of the accesses the last four count."""
    clock = Clock()
    metrics = stage.BlockMetricsCollector(1.0, clock=clock)
    pool = stage.BlockPool(3, metrics=metrics)
    clock.now = 1.0
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks(request(stage, "r", 4), [block], 0, 1, 4, 0)
    for clock.now in (3.0, 4.0, 6.0, 10.0, 11.0):
        pool.touch([block])
    pool.free_blocks([block] * 5)
    pool.free_blocks([block])
    clock.now = 15.0
    pool.get_new_blocks(2)
    (stay,) = metrics.take_residencies()
    assert (stay.lifetime, stay.idle_time, stay.access_gaps) == (14.0, 4.0, (2.0, 4.0, 1.0))
    assert metrics.take_residencies() == []


def test_an_untouched_block_was_idle_all_its_life(stage):
    clock = Clock()
    metrics = stage.BlockMetricsCollector(1.0, clock=clock)
    pool = stage.BlockPool(2, metrics=metrics)
    pool.free_blocks(pool.get_new_blocks(1))
    clock.now = 2.5
    pool.evict_blocks([1])
    (stay,) = metrics.take_residencies()
    assert (stay.lifetime, stay.idle_time, stay.access_gaps) == (2.5, 2.5, ())


def test_only_a_sample_is_watched(stage):
    draws = iter([0.2, 0.7, 0.29, 0.3])
    metrics = stage.BlockMetricsCollector(0.3, draw=lambda: next(draws))
    pool = stage.BlockPool(5, metrics=metrics)
    pool.get_new_blocks(4)
    pool.evict_blocks([1, 2, 3, 4])
    assert len(metrics.take_residencies()) == 2
    pool.evict_blocks([1, 2, 3, 4])
    assert metrics.take_residencies() == [], "each stay ends once"


def test_reset_ends_no_stay(stage):
    metrics = stage.BlockMetricsCollector(1.0)
    pool = stage.BlockPool(5, metrics=metrics)
    pool.free_blocks(pool.get_new_blocks(4))
    pool.reset_prefix_cache()
    pool.evict_blocks([1, 2, 3, 4])
    assert metrics.take_residencies() == []


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.01, float("nan")])
def test_a_rate_that_is_none(stage, rate):
    with pytest.raises(ValueError, match="sample_rate"):
        stage.BlockMetricsCollector(rate)
