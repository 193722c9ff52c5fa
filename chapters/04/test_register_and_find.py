"""Full blocks are registered under their names, and found by them.

Where a name comes from is nothing to the pool, so here names are numbers.
"""

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


def register(pool, blocks, numbers):
    pool.cache_full_blocks(blocks, [digest(number) for number in numbers], 0, len(blocks))


def lookup(pool, numbers):
    return ids(pool.find_longest_cache_hit([digest(number) for number in numbers]))


# Register and find.


@pytest.mark.contract
def test_what_is_registered_is_found(stage):
    pool = stage.BlockPool(6)
    blocks = pool.get_new_blocks(3)
    register(pool, blocks, [1, 2, 3])
    assert [pool.get_cached_block(digest(number)) for number in (1, 2, 3)] == blocks, shown(pool)
    assert [block.block_hash for block in blocks] == [digest(1), digest(2), digest(3)]
    assert pool.get_cached_block(digest(4)) is None
    assert pool.num_cached_blocks == 3
    assert (pool.num_free_blocks, [block.ref_cnt for block in blocks]) == (2, [1, 1, 1]), shown(
        pool
    )


@pytest.mark.contract
def test_what_is_free_is_found(stage):
    pool = stage.BlockPool(6)
    blocks = pool.get_new_blocks(3)
    register(pool, blocks, [1, 2, 3])
    pool.free_blocks(reversed(blocks))
    assert pool.find_longest_cache_hit([digest(1), digest(2), digest(3)]) == blocks, shown(pool)


@pytest.mark.contract
def test_the_longest_hit_ends_at_the_first_miss(stage):
    pool = stage.BlockPool(6)
    blocks = pool.get_new_blocks(4)
    register(pool, blocks, [1, 2, 3, 4])
    pool.free_blocks(blocks)
    before = state(pool)
    found = {
        (1, 2, 3, 4): blocks,
        (1, 2): blocks[:2],
        (1, 2, 9, 4): blocks[:2],
        (9, 1, 2): [],
        (1, 9): blocks[:1],
        (): [],
    }
    for numbers, expected in found.items():
        assert lookup(pool, numbers) == ids(expected), f"of {numbers}: {shown(pool)}"
    assert state(pool) == before, f"a lookup changes nothing: {shown(pool)}"


@pytest.mark.contract
def test_a_name_after_another(stage):
    """Two steps of one sequence: the second call names what the first did not."""
    pool = stage.BlockPool(6)
    blocks = pool.get_new_blocks(4)
    digests = [digest(number) for number in (1, 2, 3, 4)]
    pool.cache_full_blocks(blocks[:2], digests[:2], 0, 1)
    assert names(pool) == {blocks[0].block_id: 1}, shown(pool)
    pool.cache_full_blocks(blocks, digests, 1, 3)
    assert list(names(pool).values()) == [1, 2, 3], f"the fourth is not full yet: {shown(pool)}"
    for num_cached, num_full in ((3, 3), (0, 0), (3, 2)):
        pool.cache_full_blocks(blocks, digests, num_cached, num_full)
        assert pool.num_cached_blocks == 3, f"there was nothing to name: {shown(pool)}"


@pytest.mark.contract
def test_the_null_block_gets_no_name(stage):
    pool = stage.BlockPool(6)
    a, b = pool.get_new_blocks(2)
    register(pool, [pool.null_block, a, pool.null_block, b], [1, 2, 3, 4])
    assert names(pool) == {a.block_id: 2, b.block_id: 4}, shown(pool)
    assert pool.get_cached_block(digest(1)) is None
    assert pool.num_cached_blocks == 2


def test_registering_is_refused(stage):
    pool = stage.BlockPool(7)
    a, b, c, gone = pool.get_new_blocks(4)
    register(pool, [c], [30])
    pool.free_blocks([gone])
    foreign = stage.BlockPool(7).get_new_blocks(2)[1]
    one, two = digest(1), digest(2)
    refusals = {
        "fewer digests than blocks": ([a, b], [one], 0, 2),
        "fewer blocks than digests": ([a], [one, two], 0, 2),
        "a digest of 31 bytes": ([a, b], [one, two[1:]], 0, 2),
        "a digest of 33 bytes": ([a, b], [one, two + b"2"], 0, 2),
        "a digest that is a str": ([a, b], [one, "2" * 32], 0, 2),
        "a digest that is a number": ([a, b], [one, 2], 0, 2),
        "no digest": ([a, b], [one, None], 0, 2),
        "one block twice": ([a, b, a], [one, two, digest(3)], 0, 3),
        "a block that has a name": ([a, c], [one, two], 0, 2),
        "a block that has this very name": ([a, c], [one, digest(30)], 0, 2),
        "a free block": ([a, gone], [one, two], 0, 2),
        "a block that was never used": ([a, pool.blocks[6]], [one, two], 0, 2),
        "a block of another pool": ([a, foreign], [one, two], 0, 2),
        "a negative number of full blocks": ([a, b], [one, two], 0, -1),
        "a negative number of cached blocks": ([a, b], [one, two], -1, 2),
    }
    before = state(pool)
    for why, arguments in refusals.items():
        with pytest.raises(ValueError):
            pool.cache_full_blocks(*arguments)
        assert state(pool) == before, f"{why}: refused, so nothing may have changed: {shown(pool)}"
        assert list(pool.cached_blocks) == [digest(30)], f"{why}: {shown(pool)}"
        assert pool.num_cached_blocks == 1, f"{why}: {shown(pool)}"
    register(pool, [a, b], [1, 2])
    assert pool.num_cached_blocks == 3, "what was refused can be done rightly afterwards"


@pytest.mark.parametrize("wrong", [b"", bytes(31), bytes(33), "1" * 32, 1, None, bytearray(32)])
def test_what_is_no_digest_is_not_looked_up(stage, wrong):
    pool = stage.BlockPool(6)
    register(pool, pool.get_new_blocks(1), [1])
    before = state(pool)
    for lookup_of in (pool.get_cached_block, lambda w: pool.find_longest_cache_hit([digest(1), w])):
        with pytest.raises(ValueError, match=r"digest.*32 bytes"):
            lookup_of(wrong)
    assert state(pool) == before, shown(pool)


# Several blocks of one name.


@pytest.mark.contract
def test_of_several_blocks_the_first_registered_is_found(stage):
    pool = stage.BlockPool(6)
    a, b, c = pool.get_new_blocks(3)
    register(pool, [b], [1])
    register(pool, [a, c], [1, 1])
    assert pool.get_cached_block(digest(1)) is b, shown(pool)
    assert (len(pool.cached_blocks), pool.num_cached_blocks) == (1, 3), "one name, three blocks"


def test_the_next_takes_the_place_of_the_first(stage):
    pool = stage.BlockPool(4)
    a, b, c = pool.get_new_blocks(3)
    register(pool, [b, c, a], [1, 1, 1])
    for block, left in ((b, c), (c, a), (a, None)):
        pool.free_blocks([block])
        assert pool.get_new_blocks(1) == [block], "it is used again and forgotten"
        assert pool.get_cached_block(digest(1)) is left, shown(pool)
    assert (pool.num_cached_blocks, pool.num_evictions) == (0, 3)
    assert not pool.cached_blocks


def test_a_later_one_is_evicted(stage):
    pool = stage.BlockPool(4)
    a, b, c = pool.get_new_blocks(3)
    register(pool, [a, b, c], [1, 1, 1])
    pool.free_blocks([b])
    pool.get_new_blocks(1)
    assert pool.get_cached_block(digest(1)) is a, f"the first is where it was: {shown(pool)}"
    assert names(pool) == {a.block_id: 1, c.block_id: 1}, shown(pool)
    pool.free_blocks([a])
    pool.get_new_blocks(1)
    assert pool.get_cached_block(digest(1)) is c, f"b has long been another: {shown(pool)}"


def test_all_of_one_name_are_evicted_at_once(stage):
    pool = stage.BlockPool(4)
    blocks = pool.get_new_blocks(3)
    register(pool, blocks, [1, 1, 1])
    pool.free_blocks(reversed(blocks))
    pool.get_new_blocks(3)
    assert (names(pool), pool.num_cached_blocks, pool.num_evictions) == ({}, 0, 3), shown(pool)
    assert pool.get_cached_block(digest(1)) is None


def test_a_reset_forgets_all_of_one_name(stage):
    pool = stage.BlockPool(4)
    blocks = pool.get_new_blocks(3)
    register(pool, blocks, [1, 1, 2])
    pool.free_blocks(blocks)
    assert set(pool.reset_prefix_cache()) == set(blocks)
    assert (pool.get_cached_block(digest(1)), pool.num_cached_blocks) == (None, 0)
    again = pool.get_new_blocks(3)
    register(pool, again, [1, 1, 2])
    assert lookup(pool, [1, 2]) == ids([again[0], again[2]]), shown(pool)


# Many prompts.


@pytest.mark.contract
@pytest.mark.parametrize("num_names", [2000, 3, 1])
def test_the_map_never_outgrows_the_pool(stage, num_names):
    """a710128/nanovllm-voxcpm#62: a pool of 8, and 2000 prompts of one block each."""
    pool = stage.BlockPool(8)
    for prompt in range(2000):
        block = pool.get_new_blocks(1)
        register(pool, block, [prompt % num_names])
        pool.free_blocks(block)
        assert len(pool.cached_blocks) <= min(num_names, 7), f"after {prompt + 1} prompts"
        assert pool.num_cached_blocks == min(prompt + 1, 7), f"after {prompt + 1} prompts"
    assert pool.num_evictions == 2000 - 7


@pytest.mark.contract
def test_twins_leave_nothing_behind(stage):
    """2000 pairs of equal prompts: of a digest that no block carries the pool keeps nothing."""
    pool = stage.BlockPool(8)
    for prompt in range(2000):
        twins = pool.get_new_blocks(2)
        for block in twins:
            register(pool, [block], [prompt])
        pool.free_blocks(twins)
        assert len(pool.duplicates) <= 4, f"after {prompt + 1} pairs in 7 blocks: {shown(pool)}"
    assert pool.num_cached_blocks == 7, shown(pool)


@pytest.mark.contract
def test_x_is_not_found_in_blocks_of_y(stage):
    """GeeeekExplorer/nano-vllm#163: two usable blocks, X has one, then Y needs both."""
    pool = stage.BlockPool(3)
    x = pool.get_new_blocks(1)
    register(pool, x, [1])
    pool.free_blocks(x)
    y = pool.get_new_blocks(2)
    assert lookup(pool, [1]) == [], f"while Y runs: {shown(pool)}"
    register(pool, y, [2, 3])
    pool.free_blocks(reversed(y))
    assert lookup(pool, [1]) == [], f"after Y: {shown(pool)}"
    assert lookup(pool, [2, 3]) == ids(y), shown(pool)
