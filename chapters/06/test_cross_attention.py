"""Cross-attention: blocks for the tokens of an encoder, once."""

import pytest
import torch

from pagedattn.prefix import BlockHasher

KV = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}


def ids(blocks):
    return [block.block_id for block in blocks]


@pytest.fixture
def manager(stage):
    spec = stage.CrossAttentionSpec(**KV)
    return stage.get_manager_for_spec(spec)(
        spec,
        stage.BlockPool(12),
        0,
        limits=stage.Limits(max_model_len=64, max_encoder_len=40),
        enable_caching=False,
    )


def test_blocks_for_the_encoder_once(stage, manager):
    assert manager.get_num_blocks_to_allocate("a", 10, (), 0, 10) == 3
    assert ids(manager.allocate_new_blocks("a", 10, 10)) == [1, 2, 3]
    for _ in range(3):
        assert manager.get_num_blocks_to_allocate("a", 0, (), 0, 0) == 0
        assert manager.allocate_new_blocks("a", 0, 0) == []
        manager.remove_skipped_blocks("a", 40)
    assert ids(manager.req_to_blocks["a"]) == [1, 2, 3]
    manager.free("a")
    assert ids(manager.pool.free_queue)[-3:] == [3, 2, 1]


def test_computed_tokens_of_the_decoder_need_nothing(stage, manager):
    assert manager.allocate_new_computed_blocks("a", (), 8, 8) == 0
    assert ids(manager.allocate_new_blocks("a", 5, 5)) == [1, 2]


def test_nothing_is_found_or_registered(stage, manager):
    request = stage.Request("a", range(12), BlockHasher(4, "seed"))
    blocks = manager.allocate_new_blocks("a", 12, 12)
    with pytest.raises(stage.NoPrefixCaching):
        manager.cache_blocks(request, 12)
    with pytest.raises(stage.NoPrefixCaching):
        manager.allocate_new_computed_blocks("b", blocks, 12, 0)
    with pytest.raises(stage.NoPrefixCaching):
        manager.find_longest_cache_hit(
            request.block_hashes,
            11,
            (0,),
            manager.pool,
            manager.spec,
            drop_eagle_block=False,
            alignment_tokens=4,
        )
    assert issubclass(stage.NoPrefixCaching, ValueError)
    assert manager.get_num_common_prefix_blocks("a") == 0
