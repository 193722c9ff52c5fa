"""The manager besides ``allocate_slots``: look-ups, freeing, what can be asked, its invariants."""

import pytest
import torch

from pagedattn.cache import InvariantError
from pagedattn.prefix import BlockHasher


def full(stage, kind="FullAttentionSpec"):
    return getattr(stage, kind)(block_size=4, num_kv_heads=1, head_size=1, dtype=torch.float32)


def sliding(stage, window):
    return stage.SlidingWindowSpec(
        block_size=4, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=window
    )


def mamba(stage):
    return stage.MambaSpec(
        block_size=4, shapes=((2,),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )


def manager_of(stage, num_blocks, *specs, max_model_len=64, **options):
    specs = specs or (full(stage),)
    groups = tuple(stage.KVCacheGroupSpec((f"layer {i}",), spec) for i, spec in enumerate(specs))
    config = stage.KVCacheConfig(num_blocks, (), groups)
    return stage.KVCacheManager(config, stage.Limits(max_model_len=max_model_len), **options)


def request(stage, name, num_tokens, **options):
    return stage.Request(name, range(num_tokens), BlockHasher(4, "seed"), **options)


def run(manager, request, new=None):
    hits, num_hits = manager.get_computed_blocks(request)
    if request.num_computed_tokens:
        hits, num_hits = None, 0
    new = request.num_tokens - num_hits if new is None else new
    blocks = manager.allocate_slots(
        request, new, num_new_computed_tokens=num_hits, new_computed_blocks=hits
    )
    assert blocks is not None
    request.num_computed_tokens += num_hits + new
    return blocks


def queue(manager):
    return [block.block_id for block in manager.pool.free_queue]


# Look-ups.


@pytest.mark.parametrize(("num_tokens", "hit"), [(13, 12), (12, 8), (9, 8), (8, 4), (4, 0), (1, 0)])
def test_at_least_one_token_is_computed(stage, num_tokens, hit):
    """16 tokens are cached. A prompt of exactly 3 of their blocks hits 2."""
    manager = manager_of(stage, 20)
    run(manager, request(stage, "a", 16))
    before = queue(manager), [block.ref_cnt for block in manager.pool.blocks]
    blocks, num_hits = manager.get_computed_blocks(request(stage, "b", num_tokens))
    assert (num_hits, blocks.get_block_ids()) == (hit, (list(range(1, hit // 4 + 1)),))
    assert (queue(manager), [block.ref_cnt for block in manager.pool.blocks]) == before


def test_who_does_not_read_writes_all_the_same(stage):
    manager = manager_of(stage, 20)
    run(manager, request(stage, "a", 9))
    b = request(stage, "b", 13, skip_reading_prefix_cache=True)
    assert manager.get_computed_blocks(b)[1] == 0
    assert run(manager, b).get_block_ids() == ([4, 5, 6, 7],)
    assert manager.get_computed_blocks(request(stage, "c", 13))[1] == 12
    assert manager.make_prefix_cache_stats().requests == 2, "a and c; b was not looked up"


@pytest.mark.parametrize(("num_tokens", "hit"), [(12, 4), (13, 8), (16, 8), (17, 12)])
def test_eagle_leaves_out_a_block(stage, num_tokens, hit):
    manager = manager_of(stage, 20, use_eagle=True)
    run(manager, request(stage, "a", 20))
    assert manager.get_computed_blocks(request(stage, "b", num_tokens))[1] == hit


# Giving back.


def test_the_end_of_the_chain_goes_first(stage):
    """Tables [1, 2, 3, 4] and [1, 2, 3, 5] of 10 usable blocks."""
    manager = manager_of(stage, 11)
    a = request(stage, "a", 16)
    b = stage.Request("b", [*range(12), 50, 51, 52, 53], BlockHasher(4, "seed"))
    run(manager, a)
    run(manager, b)
    assert manager.get_block_ids("b") == ([1, 2, 3, 5],)
    manager.free(a)
    manager.free(b)
    assert queue(manager) == [6, 7, 8, 9, 10, 4, 5, 3, 2, 1]
    manager.check_invariants()


def test_an_unknown_request_has_nothing_to_free(stage):
    manager = manager_of(stage, 11, full(stage), sliding(stage, 5))
    manager.free(request(stage, "a", 16))
    assert manager.get_block_ids("a") == ([], [])
    assert len(queue(manager)) == 10


def test_blocks_out_of_reach(stage):
    """A window of 5, and 13 tokens: whole blocks before token 9 go, the right one first."""
    manager = manager_of(stage, 11, sliding(stage, 5))
    r = request(stage, "r", 20)
    run(manager, r)
    manager.remove_skipped_blocks("r", 13)
    assert manager.get_block_ids("r") == ([0, 0, 3, 4, 5],)
    assert queue(manager) == [6, 7, 8, 9, 10, 2, 1]
    manager.remove_skipped_blocks("r", 17)
    manager.remove_skipped_blocks("r", 9)
    assert manager.get_block_ids("r") == ([0, 0, 0, 4, 5],)
    assert queue(manager)[-1] == 3
    manager.remove_skipped_blocks("nobody", 17)
    manager.check_invariants()


# Digests.


def test_reset_while_a_block_is_in_use(stage):
    manager = manager_of(stage, 11)
    a = request(stage, "a", 9)
    run(manager, a)
    with pytest.raises(ValueError, match="3 blocks are in use"):
        manager.reset_prefix_cache()
    assert manager.make_prefix_cache_stats().reset is False
    assert manager.get_computed_blocks(request(stage, "b", 9))[1] == 8
    manager.free(a)
    manager.reset_prefix_cache()
    assert manager.make_prefix_cache_stats().reset is True
    assert manager.get_computed_blocks(request(stage, "b", 9))[1] == 0
    assert queue(manager) == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]


def test_an_evicted_block_stays_in_its_table(stage):
    manager = manager_of(stage, 11)
    run(manager, request(stage, "a", 12))
    manager.evict_blocks([2])
    assert manager.get_block_ids("a") == ([1, 2, 3],)
    assert manager.get_computed_blocks(request(stage, "b", 13))[1] == 4
    manager.check_invariants()


# What can be asked.


def test_common_prefix(stage):
    """Of three requests two share 8 tokens, and the third none."""
    manager = manager_of(stage, 30, full(stage), sliding(stage, 50))
    for name in ("a", "b"):
        run(manager, request(stage, name, 11))
    assert manager.get_num_common_prefix_blocks("a") == [2, 0]
    assert manager.get_num_common_prefix_blocks("nobody") == [0, 0]
    c = stage.Request("c", range(100, 111), BlockHasher(4, "seed"))
    run(manager, c)
    assert manager.get_num_common_prefix_blocks("a") == [0, 0], "not with c"
    manager.free(c)
    assert manager.get_num_common_prefix_blocks("b") == [2, 0]


def test_common_prefix_with_caching_off(stage):
    manager = manager_of(stage, 30, enable_caching=False)
    manager.allocate_slots(stage.Request("a", range(11)), 11)
    assert manager.get_num_common_prefix_blocks("a") == [0]


def test_new_block_ids_of_full_attention(stage):
    """Those of external tokens are among them, those of other kinds are not."""
    manager = manager_of(stage, 30, full(stage), sliding(stage, 5), collect_new_block_ids=True)
    r = request(stage, "r", 20)
    manager.allocate_slots(r, 4, num_external_computed_tokens=8)
    r.num_computed_tokens = 12
    (full_ids, window_ids) = manager.get_block_ids("r")
    assert manager.take_new_block_ids() == full_ids
    assert not {*full_ids} & {*window_ids}
    assert manager.take_new_block_ids() == []
    manager.allocate_slots(r, 8)
    assert manager.take_new_block_ids() == manager.get_block_ids("r")[0][3:]


def test_new_block_ids_are_collected_for_mamba_alone(stage):
    """Where nobody asks for them they must not pile up."""
    manager = manager_of(stage, 30, full(stage), mamba(stage))
    run(manager, request(stage, "r", 9))
    assert manager.take_new_block_ids() == manager.get_block_ids("r")[0]
    for specs in ((full(stage),), (full(stage), sliding(stage, 5))):
        manager = manager_of(stage, 30, *specs)
        run(manager, request(stage, "r", 9))
        with pytest.raises(ValueError, match="collect_new_block_ids is off"):
            manager.take_new_block_ids()
        managers = manager.coordinator.single_type_managers
        assert not any(single.new_block_ids for single in managers)


def test_mla_collects_no_ids(stage):
    manager = manager_of(stage, 30, full(stage, "MLAAttentionSpec"), collect_new_block_ids=True)
    run(manager, request(stage, "r", 9))
    assert manager.take_new_block_ids() == []


def test_events_of_both_groups(stage):
    manager = manager_of(stage, 30, full(stage), sliding(stage, 5), enable_events=True)
    run(manager, request(stage, "r", 9))
    assert [(event.group_idx, len(event.block_hashes)) for event in manager.take_events()] == [
        (0, 2),
        (1, 2),
    ]
    assert manager.take_events() == []


def test_usage(stage):
    manager = manager_of(stage, 11)
    run(manager, request(stage, "r", 9))
    assert manager.usage == pytest.approx(0.3)


# Blocks by group.


def test_blocks_are_joined_group_by_group(stage):
    manager = manager_of(stage, 30, full(stage), sliding(stage, 5))
    r = request(stage, "r", 16)
    first = run(manager, r, 7)
    second = run(manager, r, 6)
    both = first + second
    assert both.get_block_ids() == ([1, 2, 5, 6], [3, 4, 7, 8])
    assert first.get_block_ids() == ([1, 2], [3, 4]), "the parts are as they were"
    assert both.get_unhashed_block_ids_of_groups() == ([6], [8])
    assert manager.get_blocks("r").get_unhashed_block_ids_of_groups() == ([6], [8]), "no null"
    with pytest.raises(ValueError, match=r"one group .* there are 2"):
        both.get_unhashed_block_ids()


def test_no_blocks(stage):
    manager = manager_of(stage, 30)
    blocks = manager.get_blocks("nobody")
    assert (blocks.get_block_ids(), blocks.get_block_ids_or_none()) == (([],), None)
    found = run(manager, request(stage, "r", 6))
    assert found.get_block_ids_or_none() == ([1, 2],)
    assert found.get_unhashed_block_ids() == [2]


# Configurations.


@pytest.mark.parametrize(
    ("sizes", "rank_sizes", "expected"),
    [((16,), {}, 16), ((8, 12), {}, 4), ((16,), {"decode_context_parallel_size": 2}, 32)],
)
def test_how_many_tokens_a_digest_covers(stage, sizes, rank_sizes, expected):
    specs = [
        stage.FullAttentionSpec(
            block_size=sizes[0], num_kv_heads=1, head_size=1, dtype=torch.float32
        )
    ]
    specs += [
        stage.SlidingWindowSpec(
            block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=9
        )
        for size in sizes[1:]
    ]
    groups = tuple(stage.KVCacheGroupSpec((f"layer {i}",), spec) for i, spec in enumerate(specs))
    manager = stage.KVCacheManager(
        stage.KVCacheConfig(10, (), groups), stage.Limits(max_model_len=64, **rank_sizes)
    )
    assert manager.hash_block_size == expected


def test_groups_that_cannot_be(stage):
    for options, message in (
        ({"hash_block_size": 8}, "covers 8 tokens"),
        ({"hash_block_size": 0}, "hash_block_size must be at least 1"),
        ({"use_eagle": True, "eagle_groups": [1]}, "eagle_groups"),
    ):
        with pytest.raises(ValueError, match=message):
            manager_of(stage, 10, **options)
    with pytest.raises(ValueError, match="num_blocks"):
        manager_of(stage, 0)


# Invariants: each is broken by hand.


@pytest.fixture
def running(stage):
    """Full attention and a window of 5; "a" with 4 blocks in each, of which 2 have left the window,
    and "b" behind it."""
    manager = manager_of(stage, 30, full(stage), sliding(stage, 5))
    a = request(stage, "a", 13)
    run(manager, a)
    a.append([99])
    run(manager, a, 1)
    run(manager, request(stage, "b", 14))
    manager.check_invariants()
    return manager


def _free_twice(manager):
    manager.pool.free_queue.append(manager.pool.blocks[29])


def _count_wrongly(manager):
    manager.pool.blocks[1].ref_cnt += 1


def _lose(manager):
    manager.coordinator.single_type_managers[0].req_to_blocks.pop("a")


def _count_the_null_block(manager):
    manager.pool.null_block.ref_cnt = -3


def _rename(manager):
    manager.pool.blocks[1].block_hash = bytes(36)


def _forget(manager):
    key = manager.pool.blocks[1].block_hash
    del manager.pool.cached_blocks[key]


def _twins_of_nothing(manager):
    manager.pool.duplicates[bytes(36)] = {}


def _in_two_groups(manager):
    one, two = manager.coordinator.single_type_managers
    two.req_to_blocks["a"][3], one.req_to_blocks["a"][3] = (
        one.req_to_blocks["a"][3],
        two.req_to_blocks["a"][3],
    )
    one.req_to_blocks["c"] = [two.req_to_blocks["a"][3]]
    two.req_to_blocks["a"][3].ref_cnt += 1


def _too_short(manager):
    manager.pool.free_blocks([manager.coordinator.single_type_managers[1].req_to_blocks["b"].pop()])


def _null_in_full_attention(manager):
    (table, _) = manager.get_blocks("b").blocks
    manager.pool.free_blocks([table[-1]])
    manager.coordinator.single_type_managers[0].req_to_blocks["b"][-1] = manager.pool.null_block


def _null_in_the_window(manager):
    table = manager.coordinator.single_type_managers[1].req_to_blocks["b"]
    manager.pool.free_blocks([table[-1]])
    table[-1] = manager.pool.null_block


def _more_registered_than_there_are(manager):
    manager.coordinator.single_type_managers[0].num_cached_blocks["a"] = 5


def _registered_and_not_counted(manager):
    manager.coordinator.single_type_managers[0].num_cached_blocks["a"] = 2


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (_free_twice, "I1: block 29 has ref_cnt 0 and stands 2 times"),
        (_count_wrongly, "I3: block 1 has ref_cnt 3 and stands in 2 tables"),
        (_lose, "I3: block 1 has ref_cnt 2 and stands in 1 tables"),
        (_count_the_null_block, "I1: the null block"),
        (_rename, "I6: the map leads to block 1"),
        (_forget, "I6: the digest of block 1 is not in the map"),
        (_twins_of_nothing, "I6: twins"),
        (_in_two_groups, "block 4 is in groups"),
        (_too_short, "request b has tables of"),
        (_null_in_full_attention, "request b in group 0: there is a null block"),
        (_null_in_the_window, "request b in group 1: a null block stands behind"),
        (_more_registered_than_there_are, "request a in group 0: 5 blocks are registered, of 4"),
        (_registered_and_not_counted, "request a in group 0: block 3 has a digest"),
    ],
)
def test_a_broken_invariant_is_named(running, break_it, message):
    break_it(running)
    with pytest.raises(InvariantError) as error:
        running.check_invariants()
    assert message in str(error.value)
    assert "free queue [" in str(error.value)
