"""Aborted before the model ran: what was registered in the step, and who hit it."""

import pytest
import torch

from pagedattn.prefix import BlockHasher


def manager_of(stage, num_blocks=30, window=None, **options):
    sizes = {"block_size": 4, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs = [stage.FullAttentionSpec(**sizes)]
    if window:
        specs.append(stage.SlidingWindowSpec(**sizes, sliding_window=window))
    groups = tuple(stage.KVCacheGroupSpec((f"layer {i}",), spec) for i, spec in enumerate(specs))
    config = stage.KVCacheConfig(num_blocks, (), groups)
    return stage.KVCacheManager(config, stage.Limits(max_model_len=64), **options)


def request(stage, name, tokens):
    return stage.Request(name, tokens, BlockHasher(4, "seed"))


def start(manager, request, new=None, **options):
    """Look up and allocate; returns the hit in tokens."""
    hits, num_hits = manager.get_computed_blocks(request)
    new = request.num_tokens - num_hits if new is None else new
    given = {"num_new_computed_tokens": num_hits, "new_computed_blocks": hits}
    assert manager.allocate_slots(request, new, **given, **options) is not None
    request.num_computed_tokens = num_hits + new
    return num_hits


def hit(manager, stage, tokens):
    return manager.get_computed_blocks(request(stage, "probe", tokens))[1]


@pytest.fixture(params=[None, 5])
def manager(stage, request):
    """One group, and two."""
    manager = manager_of(stage, window=request.param)
    manager.new_step_starts()
    return manager


def all_free(manager):
    manager.check_invariants()
    return manager.pool.num_free_blocks == 29


def test_what_was_registered_in_the_step_is_forgotten(stage, manager):
    a = request(stage, "a", range(13))
    start(manager, a)
    assert hit(manager, stage, range(13)) == 12
    assert manager.abort(a) == []
    assert hit(manager, stage, range(13)) == 0
    assert all_free(manager)
    assert not manager.pool.cached_blocks


def test_what_was_registered_before_stays(stage, manager):
    """8 tokens in the first step, 8 in the second, which is aborted."""
    a = request(stage, "a", range(17))
    start(manager, a, 8)
    manager.new_step_starts()
    assert manager.allocate_slots(a, 8) is not None
    assert hit(manager, stage, range(17)) == 16
    assert manager.abort(a) == []
    assert hit(manager, stage, range(17)) == 8
    assert all_free(manager)


def test_who_hit_it_must_start_anew(stage, manager):
    a, b = request(stage, "a", range(13)), request(stage, "b", [*range(12), 50, 51])
    c = request(stage, "c", range(100, 109))
    start(manager, a)
    assert start(manager, b) == 12
    start(manager, c)
    assert manager.abort(a) == ["b"]
    assert manager.get_block_ids("b")[0] == []
    assert len(manager.get_block_ids("c")[0]) == 3, "c has nothing to do with it"
    assert hit(manager, stage, range(13)) == 0
    assert hit(manager, stage, range(100, 109)) == 8
    manager.check_invariants()
    b.num_computed_tokens = 0
    assert start(manager, b) == 0, "now b computes it all, and the others can hit that"
    assert hit(manager, stage, range(13)) == 12


def test_and_who_hit_theirs(stage, manager):
    """b begins like a, and c like b: c has no block that b computes if a is in b's step, so the
    hole goes all the way."""
    a, b = request(stage, "a", range(9)), request(stage, "b", range(17))
    c, d = request(stage, "c", range(21)), request(stage, "d", range(7))
    assert [start(manager, r) for r in (a, b, c, d)] == [0, 8, 16, 4]
    assert sorted(manager.abort(a)) == ["b", "c", "d"]
    assert all_free(manager)
    assert not manager.pool.cached_blocks


def test_who_hit_others_may_go_alone(stage, manager):
    a, b = request(stage, "a", range(9)), request(stage, "b", range(17))
    start(manager, a)
    start(manager, b)
    assert manager.abort(b) == []
    assert hit(manager, stage, range(17)) == 8, "what a computes"
    manager.check_invariants()


def test_who_hit_what_was_computed_stays(stage, manager):
    """a's first 8 tokens are of the step before. b hits these alone."""
    a = request(stage, "a", range(17))
    start(manager, a, 8)
    manager.new_step_starts()
    assert manager.allocate_slots(a, 8) is not None
    b = request(stage, "b", range(9))
    assert start(manager, b) == 8
    assert manager.abort(a) == []
    assert len(manager.get_block_ids("b")[0]) == 3
    manager.check_invariants()


def test_a_twin_that_is_computed_takes_the_place(stage):
    """b registers the same tokens without a hit, so its blocks do not depend on a's."""
    manager = manager_of(stage)
    a, b = request(stage, "a", range(9)), request(stage, "b", range(9))
    b.skip_reading_prefix_cache = True
    start(manager, a)
    start(manager, b)
    assert manager.abort(a) == []
    (found,) = manager.get_computed_blocks(request(stage, "c", range(9)))[0].blocks
    assert [block.block_id for block in found] == [4, 5]
    manager.check_invariants()


def test_after_the_step_there_is_nothing_to_undo(stage, manager):
    a, b = request(stage, "a", range(13)), request(stage, "b", range(13))
    start(manager, a)
    start(manager, b)
    manager.new_step_starts()
    assert manager.abort(a) == []
    assert hit(manager, stage, range(13)) == 12
    manager.check_invariants()


def test_loaded_tokens_are_there(stage, manager):
    """They came from outside, and are registered when they have arrived, in this very step."""
    a = request(stage, "a", range(9))
    start(manager, a, 1, num_external_computed_tokens=8, delay_cache_blocks=True)
    manager.cache_blocks(a, 8)
    assert manager.abort(a) == []
    assert hit(manager, stage, range(9)) == 8
    assert all_free(manager)


def test_what_was_found_and_not_used_cannot_be_used(stage):
    manager = manager_of(stage)
    a, b = request(stage, "a", range(13)), request(stage, "b", range(13))
    start(manager, a)
    hits, num_hits = manager.get_computed_blocks(b)
    manager.abort(a)
    with pytest.raises(ValueError, match="evicted since it was found"):
        manager.allocate_slots(b, 1, num_new_computed_tokens=num_hits, new_computed_blocks=hits)


def test_listeners_hear_of_it(stage):
    manager = manager_of(stage, enable_events=True)
    a = request(stage, "a", range(9))
    start(manager, a)
    manager.take_events()
    manager.abort(a)
    assert manager.take_events() == [stage.BlockRemoved((digest,), 0) for digest in a.block_hashes]


def test_an_unknown_request(stage, manager):
    assert manager.abort(request(stage, "a", range(9))) == []
    assert all_free(manager)


def test_a_freed_request_leaves_nothing_behind(stage, manager):
    """Many short steps without ``new_step_starts``: what is noted for an abort goes with free."""
    for number in range(50):
        r = request(stage, f"r{number}", range(number, number + 9))
        start(manager, r)
        manager.free(r)
    assert not manager.pool.registered_in_step
