"""Full attention: all blocks up to the first that is missing."""

import pytest
import torch

from pagedattn.cache import OutOfBlocks
from pagedattn.prefix import BlockHasher

KV = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}


def ids(blocks):
    return [block.block_id for block in blocks]


def register(pool, request, indices, group_id=0, block_size=4):
    """Blocks with the digests of the request's blocks at these indices, in a group."""
    blocks = [pool.null_block] * (max(indices, default=-1) + 1)
    for index in indices:
        (blocks[index],) = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, blocks, 0, len(blocks), block_size, group_id)
    return blocks


def find(stage, pool, request, max_length, spec=None, groups=(0,), eagle=False, align=4, cp=1):
    spec = spec or stage.FullAttentionSpec(**KV)
    hits = stage.get_manager_for_spec(spec).find_longest_cache_hit(
        request.block_hashes,
        max_length,
        groups,
        pool,
        spec,
        drop_eagle_block=eagle,
        alignment_tokens=align,
        context_parallel_size=cp,
    )
    return [ids(blocks) for blocks in hits]


def manager_of(stage, spec, pool, **limits):
    return stage.get_manager_for_spec(spec)(
        spec, pool, 0, limits=stage.Limits(max_model_len=64, **limits), enable_caching=True
    )


@pytest.fixture
def long(stage):
    """A request of 40 tokens: 10 blocks of 4."""
    return stage.Request("a", range(40), BlockHasher(4, "seed"))


@pytest.mark.parametrize(
    ("cached", "max_length", "hit"),
    [
        ([], 39, []),
        ([0, 1, 3], 39, [1, 2]),
        ([1, 2, 3], 39, []),
        ([0, 1, 2], 39, [1, 2, 3]),
        ([0, 1, 2], 12, [1, 2, 3]),
        ([0, 1, 2], 11, [1, 2]),
        ([0, 1, 2], 3, []),
        ([0, 1, 2], 0, []),
    ],
)
def test_up_to_the_first_gap(stage, long, cached, max_length, hit):
    pool = stage.BlockPool(20)
    register(pool, long, cached)
    before = [block.ref_cnt for block in pool.blocks]
    assert find(stage, pool, long, max_length) == [hit]
    assert [block.ref_cnt for block in pool.blocks] == before, "a lookup changes nothing"


def test_a_free_block_is_found(stage, long):
    pool = stage.BlockPool(20)
    pool.free_blocks(register(pool, long, [0, 1]))
    assert find(stage, pool, long, 39) == [[1, 2]]


def test_what_one_group_lacks_is_a_gap(stage, long):
    pool = stage.BlockPool(20)
    register(pool, long, [0, 1, 2], group_id=0)
    register(pool, long, [0, 1], group_id=3)
    assert find(stage, pool, long, 39, groups=(0, 3)) == [[1, 2], [4, 5]]
    assert find(stage, pool, long, 39, groups=(0,)) == [[1, 2, 3]]
    assert find(stage, pool, long, 39, groups=(1,)) == [[]]


@pytest.mark.parametrize(("num_tokens", "length"), [(12, 4), (13, 8), (16, 8), (17, 12)])
def test_eagle_leaves_the_last_block_out(stage, num_tokens, length):
    """Of what a prompt may find, all but its last token, one block less."""
    pool = stage.BlockPool(20)
    prompt = stage.Request("a", range(num_tokens), BlockHasher(4, "seed"))
    register(pool, prompt, range(num_tokens // 4))
    hits = find(stage, pool, prompt, num_tokens - 1, eagle=True)
    assert hits == [list(range(1, length // 4 + 1))]


def test_eagle_with_no_hit(stage, long):
    pool = stage.BlockPool(20)
    assert find(stage, pool, long, 39, eagle=True) == [[]]


@pytest.mark.parametrize(
    ("num_cached", "eagle", "length"),
    [(5, False, 4), (4, False, 4), (3, False, 2), (1, False, 0), (5, True, 4), (4, True, 2)],
)
def test_a_hit_ends_at_the_alignment(stage, long, num_cached, eagle, length):
    """Another group has blocks of 8 tokens; the EAGLE block goes before the cut."""
    pool = stage.BlockPool(20)
    register(pool, long, range(num_cached))
    hits = find(stage, pool, long, 39, eagle=eagle, align=8)
    assert hits == [list(range(1, length + 1))]


def test_a_request_without_digests_finds_nothing(stage, long):
    pool = stage.BlockPool(20)
    register(pool, long, [0, 1])
    assert find(stage, pool, stage.Request("b", range(40)), 39) == [[]]


def test_mla_is_full_attention(stage, long):
    spec = stage.MLAAttentionSpec(**KV)
    pool = stage.BlockPool(20)
    register(pool, long, [0, 1, 3])
    assert stage.get_manager_for_spec(spec) is stage.FullAttentionManager
    assert find(stage, pool, long, 39, spec=spec) == [[1, 2]]


def test_ranks_share_a_block(stage):
    """Two ranks, blocks of 2 tokens on each: 4 tokens a block, and a digest for each 4."""
    spec = stage.FullAttentionSpec(**{**KV, "block_size": 2})
    pool = stage.BlockPool(20)
    prompt = stage.Request("a", range(17), BlockHasher(4, "seed"))
    manager = manager_of(stage, spec, pool, decode_context_parallel_size=2)
    assert manager.block_size == 4
    assert manager.get_num_blocks_to_allocate("a", 17, (), 0, 17) == 5
    assert ids(manager.allocate_new_blocks("a", 17, 17)) == [1, 2, 3, 4, 5]
    manager.cache_blocks(prompt, 15)
    assert find(stage, pool, prompt, 16, spec=spec, cp=2) == [[1, 2, 3]]


# Nothing leaves before the end, and what all requests share.


def test_nothing_is_given_back_before_the_end(stage):
    pool = stage.BlockPool(20)
    manager = manager_of(stage, stage.FullAttentionSpec(**KV), pool)
    manager.allocate_new_blocks("a", 32, 32)
    manager.remove_skipped_blocks("a", 31)
    assert manager.get_num_skipped_tokens(31) == 0
    assert ids(manager.req_to_blocks["a"]) == list(range(1, 9))


def test_common_blocks_stand_in_every_table(stage, long):
    pool = stage.BlockPool(20)
    manager = manager_of(stage, stage.FullAttentionSpec(**KV), pool)
    blocks = manager.allocate_new_blocks("a", 16, 16)
    manager.cache_blocks(long, 16)
    assert manager.get_num_common_prefix_blocks("a") == 4, "alone, all are shared by all"
    manager.allocate_new_computed_blocks("b", blocks[:3], 12, 0)
    manager.allocate_new_blocks("b", 20, 20)
    assert [manager.get_num_common_prefix_blocks(name) for name in "ab"] == [3, 3]
    manager.allocate_new_computed_blocks("c", blocks[:1], 4, 0)
    assert [manager.get_num_common_prefix_blocks(name) for name in "abc"] == [1, 1, 1]
    manager.allocate_new_blocks("d", 4, 4)
    assert manager.get_num_common_prefix_blocks("a") == 0
    assert manager.get_num_common_prefix_blocks("nobody") == 0
    for name in "cd":
        manager.free(name)
    assert manager.get_num_common_prefix_blocks("b") == 3


# Sinks.


def test_a_sink_takes_its_blocks_at_the_start(stage):
    pool = stage.BlockPool(10)
    manager = manager_of(stage, stage.SinkFullAttentionSpec(sink_len=8, **KV), pool)
    assert type(manager) is stage.SinkFullAttentionManager
    assert (ids(manager.sink_blocks), pool.num_free_blocks) == ([1, 2], 7)
    assert ids(manager.allocate_new_blocks("a", 5, 5)) == [3, 4]
    manager.free("a")
    assert pool.num_free_blocks == 7, "no sequence owns them"
    with pytest.raises(ValueError):
        pool.reset_prefix_cache()


def test_a_sink_that_does_not_fit(stage):
    with pytest.raises(OutOfBlocks):
        spec = stage.SinkFullAttentionSpec(sink_len=40, **KV)
        manager_of(stage, spec, stage.BlockPool(10))
    pool = stage.BlockPool(10)
    with pytest.raises(ValueError, match="sink_len 12"):
        spec = stage.SinkFullAttentionSpec(sink_len=12, **KV)
        manager_of(stage, spec, pool, decode_context_parallel_size=2)
    assert pool.num_free_blocks == 9
