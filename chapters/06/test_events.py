"""What the pool tells about its digests."""

import pytest
import torch

from pagedattn.prefix import BlockHasher, ExtraKeys, Image


def request(stage, num_tokens, block_size=4, **options):
    return stage.Request("r", range(num_tokens), BlockHasher(block_size, "seed"), **options)


def pool_of(stage, num_blocks=10):
    return stage.BlockPool(num_blocks, enable_events=True)


def test_stored_then_removed_then_cleared(stage):
    pool = pool_of(stage, 4)
    r = request(stage, 9)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(r, blocks, 0, 1, 4, 5)
    pool.cache_full_blocks(r, blocks, 1, 2, 4, 5)
    pool.free_blocks(reversed(blocks))
    pool.get_new_blocks(2)
    first, second = r.block_hashes
    assert pool.take_events() == [
        stage.BlockStored((first,), None, (0, 1, 2, 3), 4, None, (None,), 5, "GPU"),
        stage.BlockStored((second,), first, (4, 5, 6, 7), 4, None, (None,), 5, "GPU"),
        stage.BlockRemoved((second,), 5, "GPU"),
    ]
    assert pool.take_events() == [], "what was taken is gone"
    pool.free_blocks(list(pool.blocks[2:]))
    pool.reset_prefix_cache()
    assert pool.take_events() == [stage.AllBlocksCleared()]


def test_several_blocks_are_one_event(stage):
    pool = pool_of(stage)
    r = request(stage, 13)
    pool.cache_full_blocks(r, pool.get_new_blocks(3), 0, 3, 4, 0)
    (event,) = pool.take_events()
    assert event.block_hashes == tuple(r.block_hashes)
    assert event.token_ids == tuple(range(12))
    assert event.extra_keys == (None, None, None)


def test_null_blocks_have_tokens_and_no_digest(stage):
    pool = pool_of(stage)
    r = request(stage, 16, extra_keys=ExtraKeys("L"))
    (block,) = pool.get_new_blocks(1)
    null = pool.null_block
    pool.cache_full_blocks(r, [null, null, block], 1, 3, 4, 0)
    (event,) = pool.take_events()
    assert event.block_hashes == (r.block_hashes[2],)
    assert event.parent_block_hash == r.block_hashes[0], "of the tokens before, null or not"
    assert event.token_ids == tuple(range(4, 12))
    assert event.extra_keys == (("L",),)


def test_an_event_without_a_digest(stage):
    """Every block was null: there is an event all the same."""
    pool = pool_of(stage)
    r = request(stage, 8)
    pool.cache_full_blocks(r, [pool.null_block] * 2, 1, 2, 4, 1)
    (event,) = pool.take_events()
    assert (event.block_hashes, event.extra_keys) == ((), None)
    assert (event.parent_block_hash, event.token_ids) == (r.block_hashes[0], (4, 5, 6, 7))


def test_extra_keys_in_their_order(stage):
    """The adapter, the images, the salt; blocks of 4 tokens."""
    keys = ExtraKeys("L", (Image("img", 2, 7), Image("im2", 10, 2)))
    pool = pool_of(stage)
    r = request(stage, 16, extra_keys=keys, salt="s")
    pool.cache_full_blocks(r, pool.get_new_blocks(4), 0, 4, 4, 0)
    (event,) = pool.take_events()
    assert event.adapter == "L"
    assert event.extra_keys == (
        ("L", ("img", 2), "s"),
        ("L", ("img", -2)),
        ("L", ("img", -6), ("im2", 2)),
        ("L",),
    )


def test_embeddings_enter_as_a_digest(stage):
    embeds = torch.randn(8, 3)
    pool = pool_of(stage)
    r = request(stage, 8, extra_keys=ExtraKeys(prompt_embeds=embeds))
    pool.cache_full_blocks(r, pool.get_new_blocks(2), 0, 2, 4, 0)
    other = request(stage, 8, extra_keys=ExtraKeys(prompt_embeds=embeds.flip(0)))
    pool.cache_full_blocks(other, pool.get_new_blocks(1), 0, 1, 4, 0)
    event, flipped = pool.take_events()
    (first,), (second,) = event.extra_keys
    assert isinstance(first, bytes) and len({first, second, *flipped.extra_keys[0]}) == 3


def test_blocks_of_two_digests(stage):
    pool = pool_of(stage)
    r = request(stage, 16)
    pool.cache_full_blocks(r, pool.get_new_blocks(2), 1, 2, 8, 0)
    (event,) = pool.take_events()
    h = r.block_hashes
    assert event.block_hashes == (h[2] + h[3],)
    assert event.parent_block_hash == h[0] + h[1]
    assert (event.block_size, event.token_ids) == (8, tuple(range(8, 16)))


def test_evicted_on_request(stage):
    pool = pool_of(stage)
    r = request(stage, 8)
    pool.cache_full_blocks(r, pool.get_new_blocks(2), 0, 2, 4, 3)
    pool.take_events()
    pool.evict_blocks([2, 9, 1])
    assert pool.take_events() == [
        stage.BlockRemoved((r.block_hashes[1],), 3),
        stage.BlockRemoved((r.block_hashes[0],), 3),
    ]


def test_off_means_none(stage):
    pool = stage.BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request(stage, 8), blocks, 0, 2, 4, 0)
    pool.evict_blocks([1])
    pool.free_blocks(blocks)
    pool.reset_prefix_cache()
    assert pool.take_events() == []


def test_a_short_hash(stage):
    """The last 8 of the bytes: 1 * 256 + 2."""
    assert stage.short_hash(bytes([9] * 24 + [0] * 6 + [1, 2])) == 258


def test_an_event_is_a_value(stage):
    with pytest.raises(AttributeError):
        stage.BlockRemoved((b"x",), 0).group_idx = 1
