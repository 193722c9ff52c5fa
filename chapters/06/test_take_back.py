"""A step that does not run: what was given for it is taken back, and nothing else."""

import pytest
import torch

from pagedattn.attention import AttentionSpec
from pagedattn.course.groups_witness import GroupsWitness
from pagedattn.prefix import BlockHasher

KV = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


@pytest.fixture
def manager(stage):
    """A full group and a window of 5, in 20 blocks of 4 tokens."""
    specs = {
        "f": stage.FullAttentionSpec(**KV),
        "s": stage.SlidingWindowSpec(**KV, sliding_window=5),
    }
    limits = stage.Limits(max_model_len=40)
    (config,) = stage.get_kv_cache_configs([specs], [2**30], limits, num_blocks=20)
    return stage.KVCacheManager(config, limits)


@pytest.fixture
def new_request(stage):
    hasher = BlockHasher(4, "test")
    return lambda name, tokens: stage.Request(name, tokens, hasher)


def run(manager, request, n):
    """A step that runs."""
    assert manager.allocate_slots(request, n) is not None
    request.num_computed_tokens += n
    manager.new_step_starts()


def free_ids(manager):
    return [block.block_id for block in manager.pool.free_queue]


def test_a_first_step_leaves_nothing_behind(stage, manager, new_request):
    """Not even an empty table: who asks for the common prefix would count it."""
    running, other = new_request("running", range(9)), new_request("other", range(50, 63))
    run(manager, running, 9)
    assert manager.get_num_common_prefix_blocks("running") == [3, 0]
    free = free_ids(manager)
    manager.allocate_slots(other, 13)
    assert manager.get_num_common_prefix_blocks("running") == [0, 0]
    stage.take_back_slots(manager, other)
    assert sorted(free_ids(manager)) == sorted(free)
    assert manager.get_num_common_prefix_blocks("running") == [3, 0]
    assert manager.get_block_ids("other") == ([], [])
    assert manager.get_computed_blocks(new_request("again", range(50, 64)))[1] == 0
    manager.check_invariants()


def test_blocks_come_back_in_the_order_of_a_free(stage, manager, new_request):
    """The last block first, group by group; the full group has blocks 1 to 4, the other 5 to 8."""
    request = new_request("a", range(13))
    manager.allocate_slots(request, 13)
    assert manager.get_block_ids("a") == ([1, 2, 3, 4], [5, 6, 7, 8])
    stage.take_back_slots(manager, request)
    assert free_ids(manager)[-8:] == [4, 3, 2, 1, 8, 7, 6, 5]


def test_what_was_computed_before_stays(stage, manager, new_request):
    """7 tokens computed, 6 more given: block 1 becomes full in this step, and is not full after."""
    request = new_request("a", range(13))
    run(manager, request, 7)
    before = manager.get_block_ids("a")
    manager.allocate_slots(request, 6)
    assert manager.get_computed_blocks(new_request("b", range(13)))[1] == 12
    stage.take_back_slots(manager, request)
    assert manager.get_block_ids("a") == before
    assert manager.get_computed_blocks(new_request("b", range(13)))[1] == 4
    manager.check_invariants()
    run(manager, request, 6)
    assert manager.get_computed_blocks(new_request("b", range(13)))[1] == 12
    manager.check_invariants()


def test_hits_of_the_step_are_let_go_and_stay_findable(stage, manager, new_request):
    first, second = new_request("a", range(13)), new_request("b", range(12))
    run(manager, first, 13)
    manager.free(first)
    hits, n = manager.get_computed_blocks(second)
    assert n == 8
    free = sorted(free_ids(manager))
    manager.allocate_slots(second, 4, num_new_computed_tokens=n, new_computed_blocks=hits)
    assert len(free_ids(manager)) == len(free) - 5  # two hits and one block; one and one
    stage.take_back_slots(manager, second)
    assert sorted(free_ids(manager)) == free
    assert manager.get_computed_blocks(second)[1] == 8
    manager.check_invariants()


def test_what_has_left_the_window_does_not_come_back(stage, manager, new_request):
    request = new_request("a", range(20))
    run(manager, request, 11)
    manager.allocate_slots(request, 5)
    assert manager.get_block_ids("a")[1][0] == 0
    stage.take_back_slots(manager, request)
    full, window = manager.get_block_ids("a")
    assert len(full) == len(window) == 3 and window[0] == 0 and 0 not in window[1:]
    run(manager, request, 9)
    manager.check_invariants()


@pytest.mark.parametrize("what", ["append_row", "gather"])
def test_a_reserve_that_fails_half_way_takes_nothing(stage, monkeypatch, what):
    """No memory, for the second of two sequences or for the addresses: both get what they had."""
    specs = (AttentionSpec(), AttentionSpec(window=5))
    witness = GroupsWitness(stage, layer_specs=specs)
    for seq_id in "AB":
        witness.add(seq_id, 12)
    witness.step({"A": 3})
    free = witness.cache.pool.num_free_blocks
    table = witness.cache.block_table[1]
    real, calls = getattr(table, what), []

    def fail(*arguments):
        calls.append(arguments)
        if what == "gather" or len(calls) == 2:
            raise MemoryError
        return real(*arguments)

    monkeypatch.setattr(table, what, fail)
    with pytest.raises(MemoryError):
        witness.reserve({"A": 9, "B": 12})
    monkeypatch.undo()
    witness.check()
    assert witness.cache.pool.num_free_blocks == free
    assert witness.cache.need([*witness.histories["B"].token_ids, 1], 0)[0] == 0
    witness.step({"A": 9, "B": 12})
    witness.check_contents()


def test_an_add_that_fails_leaves_nothing(stage, monkeypatch):
    witness = GroupsWitness(stage)
    witness.live(list(range(9)))
    before = witness.cache.usage(), witness.cache.pool.num_free_blocks

    def fail(*arguments):
        raise MemoryError

    monkeypatch.setattr(witness.cache.block_table, "add_row", fail)
    with pytest.raises(MemoryError):
        witness.add("A", list(range(9)))
    monkeypatch.undo()
    assert (witness.cache.usage(), witness.cache.pool.num_free_blocks) == before
    witness.check()
    assert witness.add("A", list(range(9))) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [({"salt": 1.5}, "salt is 1.5"), ({"extra_keys": "adapter"}, "extra_keys are 'adapter'")],
)
def test_wrong_identities_are_refused(stage, options, message):
    cache = GroupsWitness(stage).cache
    for verb, arguments in ((cache.add, ("A", [1, 2])), (cache.need, ([1, 2], 1))):
        with pytest.raises(ValueError, match=message):
            verb(*arguments, **options)
    assert cache.seq_ids == []
    with pytest.raises(ValueError, match="n is 0 or more"):
        cache.need([1], -1)
    with pytest.raises(ValueError, match="prompt is empty"):
        cache.need([], 1)


def test_a_hasher_of_another_block_size_is_refused(stage):
    config = GroupsWitness(stage).config
    with pytest.raises(ValueError, match="the hasher's block size is 8, the cache's 4"):
        stage.HybridKVCache(config, BlockHasher(8, "test"))
