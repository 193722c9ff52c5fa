"""What all single-type managers do alike: need, take, register and give back, for one group."""

import pytest
import torch

from pagedattn.cache import OutOfBlocks
from pagedattn.prefix import BlockHasher

KV = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}


def ids(blocks):
    return [block.block_id for block in blocks]


def make(stage, spec, num_blocks, group_id=0, enable_caching=True, **limits):
    """A manager of one group, and its pool."""
    pool = stage.BlockPool(num_blocks, enable_caching=enable_caching)
    manager = stage.get_manager_for_spec(spec)(
        spec,
        pool,
        group_id,
        limits=stage.Limits(**{"max_model_len": 64, **limits}),
        enable_caching=enable_caching,
    )
    return manager, pool


def full(stage, num_blocks=11, **kwargs):
    return make(stage, stage.FullAttentionSpec(**KV), num_blocks, **kwargs)


def sliding(stage, window, num_blocks=11, **kwargs):
    return make(stage, stage.SlidingWindowSpec(sliding_window=window, **KV), num_blocks, **kwargs)


def request(stage, name, num_tokens, first=0):
    return stage.Request(name, range(first, first + num_tokens), BlockHasher(4, "seed"))


def table(manager, name):
    return ids(manager.req_to_blocks.get(name, []))


# What a request needs.


@pytest.mark.parametrize(("num_tokens", "need"), [(1, 1), (4, 1), (5, 2), (12, 3), (13, 4)])
def test_a_new_request_needs_blocks_for_all_its_tokens(stage, num_tokens, need):
    manager, pool = full(stage)
    assert manager.get_num_blocks_to_allocate("a", num_tokens, (), 0, num_tokens) == need
    assert (pool.num_free_blocks, table(manager, "a")) == (10, []), "the question changes nothing"
    assert len(manager.allocate_new_blocks("a", num_tokens, num_tokens)) == need


def test_a_running_request_needs_what_it_lacks(stage):
    manager, _ = full(stage)
    manager.allocate_new_blocks("a", 6, 6)
    assert manager.get_num_blocks_to_allocate("a", 8, (), 6, 8) == 0
    assert manager.get_num_blocks_to_allocate("a", 9, (), 8, 9) == 1
    assert manager.get_num_blocks_to_allocate("a", 3, (), 2, 3) == 0, "drafts were rejected"
    manager.cache_blocks(request(stage, "a", 6), 6)
    assert manager.get_num_blocks_to_allocate("a", 13, (), 6, 13) == 2
    assert manager.get_num_blocks_to_allocate("a", 3, (), 2, 3) == 0


def test_free_hits_are_counted_and_hits_in_use_are_not(stage):
    """Three hits, one of them in use: of 5 blocks 2 are new, and 2 leave the free queue."""
    manager, pool = full(stage)
    hits = manager.allocate_new_blocks("a", 12, 12)
    manager.cache_blocks(request(stage, "a", 12), 12)
    manager.free("a")
    pool.touch(hits[:1])
    need = manager.get_num_blocks_to_allocate("b", 20, hits, 12, 20)
    assert need == 2 + 2
    before = pool.num_free_blocks
    assert manager.allocate_new_computed_blocks("b", hits, 12, 0) == 0
    manager.allocate_new_blocks("b", 20, 20)
    assert before - pool.num_free_blocks == need, "what was predicted is what was taken"


def test_null_blocks_among_hits_cost_nothing(stage):
    """Window 6: behind 12 tokens the first 7 are out of reach, which is one block."""
    manager, pool = sliding(stage, 6)
    blocks = manager.allocate_new_blocks("a", 12, 12)
    manager.cache_blocks(request(stage, "a", 12), 12)
    manager.free("a")
    hits = [pool.null_block, *blocks[1:]]
    assert manager.get_num_blocks_to_allocate("b", 16, hits, 12, 16) == 1 + 2
    pool.touch(blocks)
    assert manager.get_num_blocks_to_allocate("b", 16, hits, 12, 16) == 1


def test_a_hit_out_of_reach_is_not_counted(stage):
    """Window 4, 8 hit tokens and 8 from outside: behind 16 tokens 13 are out of reach, three
    blocks, and both hits are among them. One block is needed for tokens from outside, one for new
    ones."""
    manager, _ = sliding(stage, 4)
    hits = manager.allocate_new_blocks("a", 8, 8)
    manager.cache_blocks(request(stage, "a", 8), 8)
    manager.free("a")
    assert manager.get_num_blocks_to_allocate("b", 20, hits, 16, 20) == 2
    assert manager.allocate_new_computed_blocks("b", hits, 8, 8) == 1
    assert [block.ref_cnt for block in hits] == [0, 0]
    assert table(manager, "b") == [0, 0, 0]


def test_hits_of_a_running_request_are_refused(stage):
    manager, pool = full(stage)
    hits = manager.allocate_new_blocks("a", 8, 8)
    manager.cache_blocks(request(stage, "a", 8), 8)
    manager.allocate_new_blocks("b", 2, 2)
    for name in ("a", "b"):
        with pytest.raises(ValueError, match="can only begin a table"):
            manager.get_num_blocks_to_allocate(name, 12, hits, 8, 12)
        with pytest.raises(ValueError, match="can only begin a table"):
            manager.allocate_new_computed_blocks(name, hits, 8, 0)
    assert [block.ref_cnt for block in pool.blocks[1:4]] == [1, 1, 1]
    assert (table(manager, "a"), table(manager, "b")) == ([1, 2], [3])


def test_the_cap_counts_only_when_it_is_asked_for(stage):
    """Window 6, at most 8 tokens a step: ceil((5 + 8) / 4) + 1 = 5 blocks, of 64 tokens' 16."""
    manager, _ = sliding(stage, 6, max_num_batched_tokens=8)
    need = manager.get_num_blocks_to_allocate
    assert need("a", 64, (), 0, 64) == 16
    assert need("a", 64, (), 0, 64, apply_admission_cap=True) == 5
    assert need("a", 12, (), 0, 12, apply_admission_cap=True) == 3, "it only lowers the need"
    manager, _ = sliding(stage, 6)
    assert manager.get_num_blocks_to_allocate("a", 64, (), 0, 64, apply_admission_cap=True) == 16
    manager, _ = full(stage, max_num_batched_tokens=8)
    assert manager.get_num_blocks_to_allocate("a", 64, (), 0, 64, apply_admission_cap=True) == 16


def test_the_cap_comes_before_what_is_there_is_subtracted(stage):
    """Window 6, at most 8 tokens a step, so 5 of 16 blocks. Behind a hit of 12 tokens three have
    their places, so 2 are new, and two free hits leave the queue. Behind a hit of 24 six have."""
    manager, pool = sliding(stage, 6, max_num_batched_tokens=8)
    blocks = manager.allocate_new_blocks("a", 24, 24)
    manager.cache_blocks(request(stage, "a", 24), 24)
    manager.free("a")
    for num_hits, need in ((3, 2 + 2), (6, 0 + 2)):
        hits = [pool.null_block] * (num_hits - 2) + blocks[num_hits - 2 : num_hits]
        for capped, expected in ((True, need), (False, 16 - num_hits + 2)):
            assert expected == manager.get_num_blocks_to_allocate(
                "b", 64, hits, 4 * num_hits, 64, apply_admission_cap=capped
            )


# Beginning a table.


def test_hits_begin_the_table_and_count_as_registered(stage):
    manager, pool = full(stage)
    hits = manager.allocate_new_blocks("a", 8, 8)
    manager.cache_blocks(request(stage, "a", 8), 8)
    manager.free("a")
    assert manager.allocate_new_computed_blocks("b", hits, 8, 0) == 0
    assert table(manager, "b") == [1, 2]
    assert manager.num_cached_blocks["b"] == 2
    assert [block.ref_cnt for block in hits] == [1, 1]
    manager.cache_blocks(request(stage, "b", 12), 8)
    assert pool.num_cached_blocks == 2, "they are not registered twice"


def test_tokens_from_outside_in_a_window(stage):
    """Window 4: behind 16 tokens 13 are out of reach, so one block for those from outside, and one
    for the 4 new ones."""
    manager, _ = sliding(stage, 4)
    assert manager.get_num_blocks_to_allocate("a", 20, (), 16, 20) == 2
    missing = manager.allocate_new_computed_blocks("a", (), 0, 16)
    manager.append_new_blocks("a", missing)
    assert manager.num_cached_blocks["a"] == 3, "null blocks count, the block to be filled does not"
    assert ids(manager.allocate_new_blocks("a", 20, 20)) == [2]
    assert table(manager, "a") == [0, 0, 0, 1, 2]


def test_tokens_from_outside_in_full_attention(stage):
    """8 found and 6 from outside: the hits, and two blocks, the second for tokens 12 and 13."""
    manager, _ = full(stage)
    hits = manager.allocate_new_blocks("a", 8, 8)
    manager.cache_blocks(request(stage, "a", 8), 8)
    manager.free("a")
    assert manager.get_num_blocks_to_allocate("b", 17, hits, 14, 17) == 2 + 3
    assert manager.allocate_new_computed_blocks("b", hits, 8, 6) == 2
    assert ids(manager.append_new_blocks("b", 2)) == [3, 4]
    assert ids(manager.allocate_new_blocks("b", 17, 17)) == [5]
    assert table(manager, "b") == [1, 2, 3, 4, 5]
    assert manager.num_cached_blocks["b"] == 2


def test_a_window_of_one_token_needs_nothing_from_outside(stage):
    """The next token sees only itself: of 6 tokens not even the block that is begun is taken."""
    manager, _ = sliding(stage, 1)
    assert manager.allocate_new_computed_blocks("a", (), 0, 8) == 0
    assert table(manager, "a") == [0, 0]
    assert ids(manager.allocate_new_blocks("a", 9, 9)) == [1]
    assert manager.allocate_new_computed_blocks("b", (), 0, 6) == 0
    assert table(manager, "b") == [0]


def test_tokens_from_outside_for_a_running_request(stage):
    """Window 4. It has 2 blocks and gets all that are missing up to token 39, in reach or not."""
    manager, pool = sliding(stage, 4)
    manager.allocate_new_blocks("a", 8, 8)
    manager.cache_blocks(request(stage, "a", 8), 8)
    assert manager.get_num_blocks_to_allocate("a", 40, (), 36, 40) == 8
    assert manager.allocate_new_computed_blocks("a", (), 8, 28) == 0
    assert len(manager.allocate_new_blocks("a", 40, 40)) == 8
    assert pool.num_free_blocks == 0


def test_no_hits_without_caching(stage):
    manager, pool = full(stage, enable_caching=False)
    blocks = pool.get_new_blocks(1)
    with pytest.raises(ValueError, match="caching is off"):
        manager.allocate_new_computed_blocks("a", blocks, 4, 0)
    assert (table(manager, "a"), blocks[0].ref_cnt) == ([], 1)


# Taking and registering.


def test_tables_grow_by_what_is_missing(stage):
    manager, pool = full(stage)
    assert ids(manager.allocate_new_blocks("a", 5, 5)) == [1, 2]
    assert manager.allocate_new_blocks("a", 8, 8) == []
    assert ids(manager.allocate_new_blocks("b", 1, 1)) == [3]
    new = manager.allocate_new_blocks("a", 13, 13)
    assert (ids(new), table(manager, "a")) == ([4, 5], [1, 2, 4, 5])
    new.clear()
    assert table(manager, "a") == [1, 2, 4, 5], "what was returned is not the table"
    assert pool.num_free_blocks == 5


def test_too_few_blocks_change_nothing(stage):
    manager, pool = full(stage, num_blocks=4)
    manager.allocate_new_blocks("a", 8, 8)
    with pytest.raises(OutOfBlocks):
        manager.allocate_new_blocks("a", 17, 17)
    with pytest.raises(OutOfBlocks):
        manager.allocate_new_blocks("b", 8, 8)
    assert (table(manager, "a"), table(manager, "b"), pool.num_free_blocks) == ([1, 2], [], 1)
    assert list(manager.req_to_blocks) == ["a"]


def test_full_blocks_are_registered_once(stage):
    manager, pool = full(stage, group_id=2)
    a = request(stage, "a", 15)
    manager.allocate_new_blocks("a", 15, 15)
    manager.cache_blocks(a, 3)
    assert (pool.num_cached_blocks, "a" in manager.num_cached_blocks) == (0, False)
    manager.cache_blocks(a, 11)
    assert (pool.num_cached_blocks, manager.num_cached_blocks["a"]) == (2, 2)
    manager.cache_blocks(a, 7)
    assert (pool.num_cached_blocks, manager.num_cached_blocks["a"]) == (2, 2)
    manager.cache_blocks(a, 15)
    assert ids(block for block in pool.blocks if block.block_hash) == [1, 2, 3]
    assert ids(pool.get_cached_block(a.block_hashes[2], [2])) == [3]
    assert pool.get_cached_block(a.block_hashes[2], [0]) is None, "keys are those of the group"


# Giving back.


def test_the_last_block_is_freed_first(stage):
    """Tables [1, 2, 3, 4] and [1, 2, 3, 5] of 10 blocks: the shared ones go with the second."""
    manager, pool = full(stage)
    hits = manager.allocate_new_blocks("a", 16, 16)[:3]
    manager.cache_blocks(request(stage, "a", 16), 12)
    manager.allocate_new_computed_blocks("b", hits, 12, 0)
    manager.allocate_new_blocks("b", 16, 16)
    assert (table(manager, "a"), table(manager, "b")) == ([1, 2, 3, 4], [1, 2, 3, 5])
    manager.free("a")
    manager.free("b")
    assert ids(pool.free_queue) == [6, 7, 8, 9, 10, 4, 5, 3, 2, 1]
    assert not manager.req_to_blocks and not manager.num_cached_blocks
    manager.free("b")
    manager.free("nobody")
    assert pool.num_free_blocks == 10


def test_what_left_the_window_is_freed_from_right_to_left(stage):
    """Window 4: behind 13 tokens, 10 are out of reach, two blocks; behind 14 tokens 11 are."""
    manager, pool = sliding(stage, 4)
    manager.allocate_new_blocks("a", 16, 16)
    manager.remove_skipped_blocks("a", 6)
    assert table(manager, "a") == [1, 2, 3, 4], "3 tokens are not a block"
    manager.remove_skipped_blocks("a", 13)
    assert table(manager, "a") == [0, 0, 3, 4]
    assert ids(pool.free_queue)[-2:] == [2, 1]
    manager.remove_skipped_blocks("a", 14)
    assert table(manager, "a") == [0, 0, 3, 4]
    manager.remove_skipped_blocks("a", 15)
    assert table(manager, "a") == [0, 0, 0, 4]
    assert ids(pool.free_queue)[-3:] == [2, 1, 3]
    manager.remove_skipped_blocks("a", 15)
    manager.remove_skipped_blocks("nobody", 15)
    assert pool.num_free_blocks == 9


def test_more_out_of_reach_than_the_table_has(stage):
    manager, pool = sliding(stage, 4)
    manager.allocate_new_blocks("a", 8, 8)
    manager.remove_skipped_blocks("a", 40)
    assert (table(manager, "a"), pool.num_free_blocks) == ([0, 0], 10)


def test_registered_blocks_stay_registered_when_they_leave(stage):
    manager, pool = sliding(stage, 4)
    a = request(stage, "a", 16)
    manager.allocate_new_blocks("a", 16, 16)
    manager.cache_blocks(a, 12)
    manager.remove_skipped_blocks("a", 12)
    assert (table(manager, "a"), manager.num_cached_blocks["a"]) == ([0, 0, 3, 4], 3)
    assert ids(pool.get_cached_block(a.block_hashes[0], [0])) == [1]
    manager.cache_blocks(a, 16)
    assert pool.num_cached_blocks == 4


def test_null_blocks_are_counted_and_not_registered(stage):
    """Nothing was registered until blocks 0 and 1 had left: two of four get a digest."""
    manager, pool = sliding(stage, 4)
    manager.allocate_new_blocks("a", 16, 16)
    manager.remove_skipped_blocks("a", 12)
    manager.cache_blocks(request(stage, "a", 16), 16)
    assert manager.num_cached_blocks["a"] == 4
    assert ids(block for block in pool.blocks if block.block_hash) == [3, 4]


# New ids.


def test_ids_are_collected_only_when_somebody_asked(stage):
    manager, _ = full(stage)
    manager.allocate_new_blocks("a", 8, 8)
    assert (manager.take_new_block_ids(), manager.new_block_ids) == ([], None)
    manager.new_block_ids = []
    manager.allocate_new_blocks("a", 16, 16)
    manager.append_new_blocks("b", manager.allocate_new_computed_blocks("b", (), 0, 5))
    assert manager.take_new_block_ids() == [3, 4, 5, 6]
    assert manager.take_new_block_ids() == []
