"""What a manager refuses before it changes anything, and needs that are easy to count wrong."""

import pytest
import torch

from pagedattn.prefix import BlockHasher

SIZES = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


def full(stage, block_size=4):
    return stage.FullAttentionSpec(block_size=block_size, **SIZES)


def sliding(stage, window, block_size=4):
    return stage.SlidingWindowSpec(block_size=block_size, sliding_window=window, **SIZES)


def states(stage, mode, num_speculative_blocks=0):
    return stage.MambaSpec(
        block_size=4,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
        num_speculative_blocks=num_speculative_blocks,
    )


def manager_of(stage, num_blocks, *specs, caching=True):
    groups = tuple(stage.KVCacheGroupSpec((f"{i}",), spec) for i, spec in enumerate(specs))
    return stage.KVCacheManager(
        stage.KVCacheConfig(num_blocks, (), groups),
        stage.Limits(max_model_len=64),
        enable_caching=caching,
    )


def state(manager):
    pool = manager.pool
    groups = manager.coordinator.single_type_managers
    return (
        [block.block_id for block in pool.free_queue],
        [(block.ref_cnt, block.block_hash) for block in pool.blocks],
        [{name: list(table) for name, table in group.req_to_blocks.items()} for group in groups],
        [dict(group.num_cached_blocks) for group in groups],
    )


def refused(manager, call, match):
    before = state(manager)
    with pytest.raises(ValueError, match=match):
        call()
    assert state(manager) == before
    manager.check_invariants()


def request(stage, name, tokens, block_size=4):
    return stage.Request(name, tokens, BlockHasher(block_size))


def warm(stage, num_blocks=30):
    """A manager that has 20 tokens in the cache, and a request that begins with them."""
    manager = manager_of(stage, num_blocks, full(stage), sliding(stage, 6))
    first = request(stage, "first", [7] * 20)
    manager.allocate_slots(first, 20)
    manager.free(first)
    return manager, request(stage, "next", [7] * 20)


@pytest.mark.parametrize("number", [1.5, "3", None, True, float("nan"), []])
def test_a_number_of_tokens_is_a_whole_number(stage, number):
    manager = manager_of(stage, 10, full(stage))
    r = request(stage, "r", [7] * 20)
    for name in (
        "num_new_computed_tokens",
        "num_external_computed_tokens",
        "num_lookahead_tokens",
        "num_encoder_tokens",
    ):
        refused(manager, lambda: manager.allocate_slots(r, 3, **{name: number}), "whole number")  # noqa: B023
    refused(manager, lambda: manager.allocate_slots(r, number), "whole number")
    refused(manager, lambda: manager.cache_blocks(r, number), "whole number")
    refused(manager, lambda: manager.remove_skipped_blocks("r", number), "whole number")
    refused(manager, lambda: manager.evict_blocks([1, number]), "whole number")
    r.num_computed_tokens = number
    refused(manager, lambda: manager.allocate_slots(r, 3), "whole number")


def test_hits_of_another_group(stage):
    manager, r = warm(stage)
    hits, num_hits = manager.get_computed_blocks(r)
    assert hits.get_block_ids() == ([1, 2, 3, 4], [0, 0, 8, 9])
    swapped = stage.KVCacheBlocks(hits.blocks[::-1])
    options = {"new_computed_blocks": swapped, "num_new_computed_tokens": num_hits}
    refused(manager, lambda: manager.allocate_slots(r, 4, **options), "block 0 does not hold these")


def test_hits_of_another_prompt(stage):
    manager, r = warm(stage)
    hits, num_hits = manager.get_computed_blocks(r)
    other = request(stage, "other", [8] * 20)
    options = {"new_computed_blocks": hits, "num_new_computed_tokens": num_hits}
    refused(manager, lambda: manager.allocate_slots(other, 4, **options), "block 1 does not hold")


def test_hits_of_another_manager(stage):
    (manager, _), (other, r) = warm(stage), warm(stage)
    hits, num_hits = other.get_computed_blocks(r)
    options = {"new_computed_blocks": hits, "num_new_computed_tokens": num_hits}
    refused(manager, lambda: manager.allocate_slots(r, 4, **options), "block 1 does not hold")


def test_hits_whose_blocks_hold_something_else_by_now(stage):
    manager, r = warm(stage, num_blocks=14)
    hits, num_hits = manager.get_computed_blocks(r)
    # 13 usable blocks, 12 of them for this one: it takes those of the hit, and registers them.
    assert manager.allocate_slots(request(stage, "greedy", [9] * 24), 24) is not None
    assert all(block.block_hash for block in hits.blocks[0])
    options = {"new_computed_blocks": hits, "num_new_computed_tokens": num_hits}
    refused(manager, lambda: manager.allocate_slots(r, 4, **options), "does not hold these tokens")


def test_a_later_twin_is_a_hit_as_well(stage):
    """Two blocks with the same tokens: whoever has found either may have it."""
    manager = manager_of(stage, 30, full(stage))
    first, second, third = (request(stage, name, [7] * 9) for name in "abc")
    manager.allocate_slots(first, 9)
    manager.allocate_slots(second, 9)  # without a look-up
    twins = stage.KVCacheBlocks((manager.get_blocks("b").blocks[0][:2],))
    manager.allocate_slots(third, 1, new_computed_blocks=twins, num_new_computed_tokens=8)
    assert manager.get_block_ids("c") == ([4, 5, 7],)


def test_digests_of_blocks_of_another_size(stage):
    """Of 4 or 5 tokens there is one digest, in blocks of 3 or of 4."""
    manager = manager_of(stage, 30, full(stage))
    for block_size, num_tokens in ((3, 4), (2, 16), (8, 16)):
        r = request(stage, "r", [7] * num_tokens, block_size)
        refused(manager, lambda: manager.allocate_slots(r, num_tokens), "lacks digests")  # noqa: B023
    # The digests are looked at as soon as the request begins, not when it fills a block.
    r = request(stage, "r", [7], 2)
    refused(manager, lambda: manager.allocate_slots(r, 1), "lacks digests of 4 tokens")


@pytest.mark.parametrize("num_computed", [-1, 5, 21, 64, 10**30])
def test_computed_tokens_must_have_slots(stage, num_computed):
    """A preempted request that still counts its tokens; or one with 4 slots."""
    manager = manager_of(stage, 30, full(stage), sliding(stage, 6))
    running, preempted = (request(stage, name, [7] * 20) for name in "rp")
    manager.allocate_slots(running, 3)
    for r in (running, preempted):
        r.num_computed_tokens = num_computed
        refused(manager, lambda: manager.allocate_slots(r, 3), f"so {num_computed} computed")  # noqa: B023


def test_a_model_without_tables_of_its_own_tokens(stage):
    """Cross-attention alone, or no layer at all: nothing says how many slots there are."""
    spec = stage.CrossAttentionSpec(block_size=4, **SIZES)
    for specs, need in (((spec,), 2), ((), 0)):
        manager = manager_of(stage, 10, *specs, caching=False)
        r = stage.Request("r", [7] * 20)
        assert manager.allocate_slots(r, 12, num_encoder_tokens=5) is not None
        r.num_computed_tokens = 12
        assert manager.allocate_slots(r, 8) is not None
        assert manager.pool.num_free_blocks == 9 - need


def test_external_tokens_behind_the_end(stage):
    manager = manager_of(stage, 30, full(stage), sliding(stage, 6))
    r = request(stage, "r", [7] * 64)
    options = {"num_external_computed_tokens": 65}
    refused(manager, lambda: manager.allocate_slots(r, 1, **options), "up to 65, max_model_len")
    assert manager.allocate_slots(r, 0, num_external_computed_tokens=64) is not None


def test_tokens_to_register_are_counted_in_all_groups(stage):
    """12 tokens are one full block of 8, which the first group has, and three of 4."""
    manager = manager_of(stage, 30, full(stage, 8), sliding(stage, 6))
    r = request(stage, "r", [7] * 12)
    manager.allocate_slots(r, 8, delay_cache_blocks=True)
    refused(manager, lambda: manager.cache_blocks(r, 12), "in group 1 it has 2 blocks")
    manager.cache_blocks(r, 8)
    assert manager.pool.num_cached_blocks == 3


def test_a_request_without_tokens_finds_nothing(stage):
    manager, _ = warm(stage)
    hits, num_hits = manager.get_computed_blocks(request(stage, "empty", []))
    assert (hits.get_block_ids(), num_hits) == (([], []), 0)


def test_an_id_is_a_string(stage):
    for name in (5, None, b"r", ["r"]):
        with pytest.raises(ValueError, match="request_id"):
            stage.Request(name, [7])


@pytest.mark.parametrize(("num_drafts", "external"), [(0, 8), (0, 12), (2, 12), (1, 6)])
def test_states_that_came_from_elsewhere_stay(stage, num_drafts, external):
    """In "align", tokens from elsewhere take one block, for their last state. Later steps find it
    in the table: they need the block of the running state, and at first those of the drafts."""
    manager = manager_of(stage, 30, states(stage, "align", num_drafts))
    r = request(stage, "r", [7] * 40)
    free = manager.pool.num_free_blocks
    assert manager.allocate_slots(r, 0, num_external_computed_tokens=external) is not None
    r.num_computed_tokens = external
    # The running state goes on in the same block; drafts have theirs behind it.
    assert free - manager.pool.num_free_blocks == 1 + num_drafts
    free = manager.pool.num_free_blocks
    assert manager.allocate_slots(r, 4) is not None
    (table,) = manager.get_block_ids("r")
    assert len(table) == -(-(external + 4) // 4) + num_drafts
    assert free - manager.pool.num_free_blocks == 1
    manager.check_invariants()
