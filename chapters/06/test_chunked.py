"""Chunked local attention: only the chunk of the next token counts."""

import pytest
import torch

from pagedattn.prefix import BlockHasher

KV = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}


def ids(blocks):
    return [block.block_id for block in blocks]


def register(pool, request, indices, group_id=0):
    blocks = [pool.null_block] * (max(indices, default=-1) + 1)
    for index in indices:
        (blocks[index],) = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, blocks, 0, len(blocks), 4, group_id)


def find(stage, pool, request, max_length, chunk, groups=(0,), **kwargs):
    hits = stage.ChunkedLocalAttentionManager.find_longest_cache_hit(
        request.block_hashes,
        max_length,
        groups,
        pool,
        stage.ChunkedLocalAttentionSpec(attention_chunk_size=chunk, **KV),
        **{"drop_eagle_block": False, "alignment_tokens": 4, **kwargs},
    )
    return [ids(blocks) for blocks in hits]


def manager_of(stage, chunk, pool, **limits):
    spec = stage.ChunkedLocalAttentionSpec(attention_chunk_size=chunk, **KV)
    return stage.get_manager_for_spec(spec)(
        spec,
        pool,
        0,
        limits=stage.Limits(**{"max_model_len": 64, **limits}),
        enable_caching=True,
    )


@pytest.fixture
def long(stage):
    """A request of 40 tokens: 10 blocks of 4."""
    return stage.Request("a", range(40), BlockHasher(4, "seed"))


@pytest.mark.parametrize(
    ("computed", "skipped"), [(0, 0), (7, 0), (8, 8), (13, 8), (15, 8), (16, 16)]
)
def test_tokens_before_the_chunk_of_the_next(stage, computed, skipped):
    manager = manager_of(stage, 8, stage.BlockPool(9))
    assert manager.get_num_skipped_tokens(computed) == skipped


@pytest.mark.parametrize("chunk", [3, 4, 6, 8, 12])
def test_what_is_held_is_what_later_tokens_see(stage, chunk):
    """Token by token, all blocks and no other that hold a token of the next one's chunk."""
    manager = manager_of(stage, chunk, stage.BlockPool(30))
    for computed in range(40):
        manager.remove_skipped_blocks("a", computed)
        manager.allocate_new_blocks("a", computed + 1, computed + 1)
        seen = range(computed // chunk * chunk, computed + 1)
        held = [i for i, block in enumerate(manager.req_to_blocks["a"]) if not block.is_null]
        assert held == sorted({position // 4 for position in seen})


@pytest.mark.parametrize(
    ("chunk", "step", "max_len", "cap"),
    [(8, 16, 200, 6), (8, None, 200, 50), (8, 16, 20, 5), (6, 2, 64, 2)],
)
def test_the_cap(stage, chunk, step, max_len, cap):
    """ceil(min(chunk + step, max_model_len) / 4); the last is too small, and vLLM's."""
    manager = manager_of(
        stage, chunk, stage.BlockPool(9), max_model_len=max_len, max_num_batched_tokens=step
    )
    need = manager.get_num_blocks_to_allocate(
        "a", max_len, (), 0, max_len, apply_admission_cap=True
    )
    assert need == cap


def test_more_than_the_cap_where_blocks_do_not_divide_chunks(stage):
    """Behind 11 tokens the chunk is 6 to 11, and a step of 2 reaches 12: blocks 1, 2 and 3."""
    manager = manager_of(stage, 6, stage.BlockPool(9), max_num_batched_tokens=2)
    for computed in (1, 3, 5, 7, 9, 11):
        manager.remove_skipped_blocks("a", computed)
        manager.allocate_new_blocks("a", computed + 2, computed + 2)
    assert ids(manager.req_to_blocks["a"]) == [0, 2, 3, 4]


@pytest.mark.parametrize(
    ("cached", "max_length", "hit"),
    [
        ([], 14, [0, 0]),
        ([], 15, [0, 0]),
        ([2], 15, [0, 0, 1]),
        ([0, 1], 15, [0, 0]),
        ([3], 15, [0, 0]),
        ([], 16, [0, 0, 0, 0]),
        ([], 7, []),
        ([0], 7, [1]),
        ([0, 1], 8, [0, 0]),
        ([4, 5], 23, [0, 0, 0, 0, 1]),
        ([], 0, []),
    ],
)
def test_earlier_chunks_count_as_found(stage, long, cached, max_length, hit):
    """Chunks of 8. A prompt of 15 tokens hits 8 of an empty cache."""
    pool = stage.BlockPool(20)
    register(pool, long, cached)
    assert find(stage, pool, long, max_length, 8) == [hit]


@pytest.mark.parametrize(
    ("cached", "max_length", "hit"),
    [([1], 11, [0, 1]), ([], 11, [0]), ([1, 2], 12, [0, 0, 0]), ([0], 5, [1])],
)
def test_blocks_that_do_not_divide_chunks(stage, long, cached, max_length, hit):
    """Chunks of 6: that of token 11 begins at 6, so block 0 is out of reach and block 1 is not."""
    pool = stage.BlockPool(20)
    register(pool, long, cached)
    assert find(stage, pool, long, max_length, 6) == [hit]


def test_all_groups_must_have_a_block(stage, long):
    pool = stage.BlockPool(20)
    register(pool, long, [2, 3], group_id=0)
    register(pool, long, [2], group_id=1)
    assert find(stage, pool, long, 31, 16, groups=(0, 1)) == [[0] * 4, [0] * 4]
    assert find(stage, pool, long, 15, 8, groups=(0, 1)) == [[0, 0, 1], [0, 0, 3]]


@pytest.mark.parametrize(
    ("options", "match"),
    [({"drop_eagle_block": True}, "EAGLE"), ({"alignment_tokens": 8}, "blocks of one size")],
)
def test_what_it_cannot_do(stage, long, options, match):
    with pytest.raises(ValueError, match=match):
        find(stage, stage.BlockPool(9), long, 15, 8, **options)


def test_no_chunks_over_several_ranks(stage):
    with pytest.raises(ValueError, match="context-parallel"):
        manager_of(stage, 8, stage.BlockPool(9), prefill_context_parallel_size=2)


def test_no_blocks_are_common(stage):
    manager = manager_of(stage, 8, stage.BlockPool(9))
    manager.allocate_new_blocks("a", 8, 8)
    assert manager.get_num_common_prefix_blocks("a") == 0
