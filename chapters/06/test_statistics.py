"""How much of the prompts was found."""

import torch

from pagedattn.prefix import BlockHasher


def manager_of(stage, **options):
    spec = stage.FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = stage.KVCacheConfig(20, (), (stage.KVCacheGroupSpec(("layer",), spec),))
    return stage.KVCacheManager(config, stage.Limits(max_model_len=64), **options)


def request(stage, name, num_tokens, **options):
    return stage.Request(name, range(num_tokens), BlockHasher(4, "seed"), **options)


def test_look_ups_are_counted(stage):
    manager = manager_of(stage)
    a = request(stage, "a", 13)
    manager.get_computed_blocks(a)
    manager.allocate_slots(a, 13)
    manager.get_computed_blocks(request(stage, "b", 10))
    manager.get_computed_blocks(request(stage, "b", 10))
    assert manager.make_prefix_cache_stats() == stage.PrefixCacheStats(
        requests=3, queries=33, hits=16
    )
    assert manager.make_prefix_cache_stats() == stage.PrefixCacheStats(), "they begin anew"


def test_who_was_preempted_counts_apart(stage):
    manager = manager_of(stage)
    a = request(stage, "a", 13)
    manager.allocate_slots(a, 13)
    manager.get_computed_blocks(request(stage, "a", 14, num_preemptions=2))
    manager.get_computed_blocks(request(stage, "b", 5))
    assert manager.make_prefix_cache_stats() == stage.PrefixCacheStats(
        requests=1,
        queries=5,
        hits=4,
        preempted_requests=1,
        preempted_queries=14,
        preempted_hits=12,
    )


def test_no_look_up_no_count(stage):
    manager = manager_of(stage)
    manager.get_computed_blocks(request(stage, "a", 13, skip_reading_prefix_cache=True))
    assert manager.make_prefix_cache_stats() == stage.PrefixCacheStats()
    manager = manager_of(stage, enable_caching=False)
    manager.get_computed_blocks(stage.Request("a", range(13)))
    assert manager.make_prefix_cache_stats() == stage.PrefixCacheStats()


def test_a_reset_is_noted(stage):
    manager = manager_of(stage)
    manager.reset_prefix_cache()
    assert manager.make_prefix_cache_stats().reset is True
    assert manager.make_prefix_cache_stats().reset is False


def test_statistics_can_be_off(stage):
    manager = manager_of(stage, log_stats=False)
    a = request(stage, "a", 13)
    manager.allocate_slots(a, 13)
    assert manager.get_computed_blocks(request(stage, "b", 10))[1] == 8
    manager.free(a)
    manager.reset_prefix_cache()
    assert manager.make_prefix_cache_stats() is None
