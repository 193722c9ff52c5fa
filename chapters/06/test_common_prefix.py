"""Blocks that all requests share, when some of them wait."""

import torch

from pagedattn.prefix import BlockHasher


def manager_of(stage):
    spec = stage.FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = stage.KVCacheConfig(30, (), (stage.KVCacheGroupSpec(("layer",), spec),))
    return stage.KVCacheManager(config, stage.Limits(max_model_len=64))


def start(stage, manager, name, tokens, new, **options):
    """Slots for the hit and ``new`` tokens; returns the hit in tokens."""
    request = stage.Request(name, tokens, BlockHasher(4, "seed"))
    hits, num_hits = manager.get_computed_blocks(request)
    given = {"new_computed_blocks": hits, "num_new_computed_tokens": num_hits}
    assert manager.allocate_slots(request, new, **given, **options) is not None
    return num_hits


def test_who_waits_counts(stage):
    """a and c begin alike, and c waits for tokens from outside. b has nothing in common with them.
    Two requests run, and two tables name a's first blocks; they are not common all the same."""
    manager = manager_of(stage)
    start(stage, manager, "a", range(11), 11)
    start(stage, manager, "b", range(100, 111), 11)
    outside = {"num_external_computed_tokens": 8, "delay_cache_blocks": True}
    assert start(stage, manager, "c", range(17), 0, **outside) == 8
    assert [manager.get_num_common_prefix_blocks(name) for name in "abc"] == [[0], [0], [0]]
    manager.free(stage.Request("b", [0]))
    assert [manager.get_num_common_prefix_blocks(name) for name in "ac"] == [[2], [2]]


def test_who_was_only_looked_up_does_not_count(stage):
    """It has no blocks yet."""
    manager = manager_of(stage)
    start(stage, manager, "a", range(11), 11)
    start(stage, manager, "b", range(11), 3)
    manager.get_computed_blocks(stage.Request("c", range(100, 111), BlockHasher(4, "seed")))
    assert [manager.get_num_common_prefix_blocks(name) for name in "ab"] == [[2], [2]]
