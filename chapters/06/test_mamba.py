"""Mamba: states, in three modes, with blocks for drafts."""

import random

import pytest
import torch

from pagedattn.cache import OutOfBlocks
from pagedattn.prefix import BlockHasher


def ids(blocks):
    return [block.block_id for block in blocks]


def mamba(stage, mode, block_size=4, num_speculative_blocks=0):
    return stage.MambaSpec(
        block_size=block_size,
        shapes=((8, 16),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
        num_speculative_blocks=num_speculative_blocks,
    )


def make(stage, mode, num_blocks=20, block_size=4, spec_blocks=0, enable_caching=True, **limits):
    spec = mamba(stage, mode, block_size, spec_blocks)
    pool = stage.BlockPool(num_blocks)
    manager = stage.get_manager_for_spec(spec)(
        spec,
        pool,
        0,
        limits=stage.Limits(**{"max_model_len": 64, **limits}),
        enable_caching=enable_caching,
    )
    return manager, pool


def request(stage, name, num_tokens):
    return stage.Request(name, range(num_tokens), BlockHasher(4, "seed"))


def register(pool, request, indices, group_id=0):
    blocks = [pool.null_block] * (max(indices, default=-1) + 1)
    for index in indices:
        (blocks[index],) = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, blocks, 0, len(blocks), 4, group_id)


def find(stage, pool, request, max_length, groups=(0,), eagle=False, align=4):
    return stage.MambaManager.find_longest_cache_hit(
        request.block_hashes,
        max_length,
        groups,
        pool,
        mamba(stage, "all"),
        drop_eagle_block=eagle,
        alignment_tokens=align,
    )


def step(manager, name, computed, new, lookahead=0):
    """Slots for ``new`` tokens behind ``computed``: the need, what is new and the table."""
    manager.remove_skipped_blocks(name, computed)
    total = computed + new
    need = manager.get_num_blocks_to_allocate(name, total + lookahead, (), computed, total)
    before = manager.pool.num_free_blocks
    blocks = manager.allocate_new_blocks(name, total + lookahead, total)
    assert before - manager.pool.num_free_blocks == need, "what was predicted is what was taken"
    return need, ids(blocks), ids(manager.req_to_blocks[name])


# What is found.


@pytest.mark.parametrize(
    ("cached", "max_length", "hit"),
    [
        ([0, 2, 5], 39, [0, 0, 0, 0, 0, 3]),
        ([0, 2, 5], 23, [0, 0, 2]),
        ([0, 2, 5], 11, [1]),
        ([2], 11, []),
        ([], 39, []),
        ([0], 0, []),
    ],
)
def test_the_rightmost_state(stage, cached, max_length, hit):
    pool, long = stage.BlockPool(20), request(stage, "a", 40)
    register(pool, long, cached)
    assert [ids(blocks) for blocks in find(stage, pool, long, max_length)] == [hit]


def test_all_groups_must_have_the_state(stage):
    pool, long = stage.BlockPool(20), request(stage, "a", 40)
    register(pool, long, [0, 1, 2], group_id=0)
    register(pool, long, [1], group_id=2)
    hits = find(stage, pool, long, 39, groups=(0, 2))
    assert [ids(blocks) for blocks in hits] == [[0, 2], [0, 4]]
    assert find(stage, pool, long, 39, groups=(1, 2)) == ([], [])


def test_a_hit_ends_at_the_alignment(stage):
    pool, long = stage.BlockPool(20), request(stage, "a", 40)
    register(pool, long, [1, 2, 4])
    assert ids(find(stage, pool, long, 39, align=8)[0]) == [0, 1]
    assert ids(find(stage, pool, long, 39, align=12)[0]) == [0, 0, 2]


def test_no_block_is_left_out_for_eagle(stage):
    pool, long = stage.BlockPool(20), request(stage, "a", 40)
    register(pool, long, [2])
    assert ids(find(stage, pool, long, 39, eagle=True)[0]) == [0, 0, 1]


# none


@pytest.mark.parametrize(("spec_blocks", "blocks"), [(0, [1]), (2, [1, 2, 3])])
def test_none_keeps_one_state(stage, spec_blocks, blocks):
    manager, _ = make(stage, "none", block_size=64, spec_blocks=spec_blocks, enable_caching=False)
    assert step(manager, "a", 0, 10) == (len(blocks), blocks, blocks)
    for computed in (10, 11, 40, 63):
        assert step(manager, "a", computed, 1) == (0, [], blocks)


# all


def test_all_allocates_like_full_attention_and_keeps_the_last_state(stage):
    manager, pool = make(stage, "all")
    assert step(manager, "a", 0, 10) == (3, [1, 2, 3], [1, 2, 3])
    manager.cache_blocks(request(stage, "a", 20), 10)
    assert step(manager, "a", 10, 1) == (0, [], [0, 0, 3])
    assert ids(pool.free_queue)[-2:] == [2, 1]
    assert step(manager, "a", 11, 1) == (0, [], [0, 0, 3])
    assert step(manager, "a", 12, 1) == (1, [4], [0, 0, 3, 4]), "token 11's state is the last"
    assert step(manager, "a", 13, 1) == (0, [], [0, 0, 0, 4])
    assert ids(find(stage, pool, request(stage, "b", 20), 19)[0]) == [0, 2]


def test_all_with_blocks_for_drafts(stage):
    """Two drafts: two blocks more, and states go only when they are needed whatever is rejected."""
    manager, _ = make(stage, "all", spec_blocks=2)
    assert step(manager, "a", 0, 4, lookahead=2) == (4, [1, 2, 3, 4], [1, 2, 3, 4])
    assert step(manager, "a", 4, 3) == (0, [], [1, 2, 3, 4])
    assert step(manager, "a", 5, 3) == (0, [], [1, 2, 3, 4])
    assert step(manager, "a", 6, 3) == (1, [5], [1, 2, 3, 4, 5]), "of 6 tokens 4 are sure"
    assert step(manager, "a", 7, 3) == (0, [], [0, 2, 3, 4, 5])


def test_a_hit_is_attached_with_its_state_alone(stage):
    manager, pool = make(stage, "all")
    step(manager, "a", 0, 12)
    manager.cache_blocks(request(stage, "a", 12), 12)
    manager.free("a")
    manager.new_step_starts()
    hits = find(stage, pool, request(stage, "b", 13), 12)[0]
    assert manager.get_num_blocks_to_allocate("b", 13, hits, 12, 13) == 1 + 1
    assert manager.allocate_new_computed_blocks("b", hits, 12, 0) == 0
    assert ids(manager.allocate_new_blocks("b", 13, 13)) == [4]
    assert ids(manager.req_to_blocks["b"]) == [0, 0, 3, 4]
    assert [block.ref_cnt for block in pool.blocks[1:5]] == [0, 0, 1, 1]


# align


def test_align_keeps_the_running_state_and_the_one_before(stage):
    """8, 8 and 1 tokens in blocks of 4: one block a step, and null blocks."""
    manager, pool = make(stage, "align")
    assert step(manager, "a", 0, 8) == (1, [0, 1], [0, 1])
    assert step(manager, "a", 8, 8) == (1, [0, 2], [0, 1, 0, 2])
    assert step(manager, "a", 16, 1) == (1, [3], [0, 0, 0, 2, 3])
    assert step(manager, "a", 17, 1) == (0, [], [0, 0, 0, 0, 3])
    assert pool.num_free_blocks == 18
    manager.free("a")
    assert pool.num_free_blocks == 19
    assert step(manager, "a", 0, 4) == (1, [4], [4]), "it starts anew"


def test_align_ignores_slots_of_lookahead(stage):
    manager, _ = make(stage, "align")
    assert step(manager, "a", 0, 8, lookahead=3) == (1, [0, 1], [0, 1])
    assert step(manager, "a", 8, 4, lookahead=5) == (1, [2], [0, 1, 2])


def test_align_takes_its_blocks_for_drafts_along(stage):
    """Two of them, blocks 2 and 3. The running state needs index 3, so block 3 is where it must be;
    block 2 moves behind it, and one new block comes last."""
    manager, _ = make(stage, "align", spec_blocks=2)
    assert step(manager, "a", 0, 8) == (3, [0, 1, 2, 3], [0, 1, 2, 3])
    assert step(manager, "a", 8, 8) == (1, [2, 4], [0, 1, 0, 3, 2, 4])
    assert step(manager, "a", 16, 1) == (1, [5], [0, 0, 0, 3, 2, 4, 5])
    assert step(manager, "a", 17, 1) == (0, [], [0, 0, 0, 3, 2, 4, 5]), "17 - 2 tokens are sure"
    assert step(manager, "a", 19, 1) == (0, [], [0, 0, 0, 0, 2, 4, 5])


def test_align_a_long_step_moves_all_blocks_for_drafts(stage):
    manager, _ = make(stage, "align", spec_blocks=2)
    step(manager, "a", 0, 4)
    assert step(manager, "a", 4, 16) == (1, [0, 2, 3, 4], [1, 0, 0, 0, 2, 3, 4])


def test_align_after_drafts_were_rejected(stage):
    """A table never becomes shorter."""
    manager, _ = make(stage, "align")
    step(manager, "a", 0, 8)
    assert step(manager, "a", 8, 3) == (1, [2], [0, 1, 2])
    assert step(manager, "a", 7, 1) == (0, [], [0, 1, 2])


def test_align_goes_on_from_a_hit(stage):
    """The hit's state is kept for one step: the first new state is computed from it."""
    manager, pool = make(stage, "align", spec_blocks=1)
    register(pool, request(stage, "a", 40), [2])
    pool.free_blocks([pool.blocks[1]])
    b = request(stage, "b", 40)
    hits = find(stage, pool, b, 39)[0]
    assert ids(hits) == [0, 0, 1]
    assert manager.get_num_blocks_to_allocate("b", 20, hits, 12, 20) == 2 + 1
    assert manager.allocate_new_computed_blocks("b", hits, 12, 0) == 0
    assert ids(manager.allocate_new_blocks("b", 20, 20)) == [0, 2, 3]
    assert step(manager, "b", 20, 4) == (1, [4], [0, 0, 0, 0, 2, 3, 4])
    assert pool.blocks[1].ref_cnt == 0
    assert step(manager, "b", 24, 1) == (1, [5], [0, 0, 0, 0, 0, 3, 4, 5])


def test_align_with_tokens_from_outside(stage):
    """Of 12 tokens one state comes from outside, in a block of its own, whether or not some of
    them were found."""
    for found in ([], [0]):
        manager, pool = make(stage, "align", spec_blocks=1)
        register(pool, request(stage, "a", 40), found)
        pool.free_blocks(pool.blocks[1 : 1 + len(found)])
        hits = find(stage, pool, request(stage, "b", 40), 39)[0]
        assert manager.get_num_blocks_to_allocate("b", 16, hits, 12, 16) == 1 + 2
        missing = manager.allocate_new_computed_blocks("b", hits, 4 * len(hits), 12 - 4 * len(hits))
        assert missing == 1
        manager.append_new_blocks("b", missing)
        assert len(manager.allocate_new_blocks("b", 16, 16)) == 2
        assert [block.is_null for block in manager.req_to_blocks["b"]] == [1, 1, 0, 0, 0]


def test_align_refuses_without_a_change(stage):
    manager, pool = make(stage, "align", num_blocks=3)
    step(manager, "a", 0, 8)
    step(manager, "a", 8, 1)
    with pytest.raises(OutOfBlocks):
        manager.allocate_new_blocks("a", 13, 13)
    assert (ids(manager.req_to_blocks["a"]), pool.num_free_blocks) == ([0, 1, 2], 0)
    with pytest.raises(OutOfBlocks):
        manager.allocate_new_blocks("b", 4, 4)
    assert "b" not in manager.req_to_blocks
    assert step(manager, "a", 9, 4) == (1, [1], [0, 0, 2, 1]), "two states again"


def test_align_takes_hits_at_the_beginning_only(stage):
    manager, pool = make(stage, "align")
    step(manager, "a", 0, 8)
    register(pool, request(stage, "a", 40), [2])
    hits = find(stage, pool, request(stage, "a", 40), 39)[0]
    with pytest.raises(ValueError, match="can only begin a table"):
        manager.get_num_blocks_to_allocate("a", 20, hits, 12, 20)


@pytest.mark.parametrize("spec_blocks", [0, 1, 3])
def test_align_holds_two_states_at_most(stage, spec_blocks):
    """Whole blocks at a time, then token by token; the running state is where its token is."""
    draw = random.Random(spec_blocks)
    for _ in range(30):
        manager, _ = make(stage, "align", num_blocks=2 + spec_blocks + 1, spec_blocks=spec_blocks)
        computed = 0
        while computed < 60:
            new = 4 * draw.randint(1, 4) if computed < 30 else 1
            step(manager, "a", computed, new)
            computed += new
            manager.remove_skipped_blocks("a", computed)
            table = manager.req_to_blocks["a"]
            assert not table[(computed - 1) // 4].is_null
            assert len({block for block in table if not block.is_null}) <= 2 + spec_blocks


# What was registered in this step.


@pytest.mark.parametrize("mode", ["all", "align"])
def test_a_state_of_this_step_has_to_wait(stage, mode):
    manager, pool = make(stage, mode)
    step(manager, "a", 0, 8)
    manager.cache_blocks(request(stage, "a", 8), 8)
    b = request(stage, "b", 12)
    hits = find(stage, pool, b, 11)[0]
    assert manager.get_num_blocks_to_allocate("b", 12, hits, 8, 12) == 20 + 1
    assert manager.get_num_blocks_to_allocate("c", 12, (), 0, 12) < 20, "without a hit it may run"
    manager.new_step_starts()
    assert manager.get_num_blocks_to_allocate("b", 12, hits, 8, 12) == 1


def test_only_the_last_state_of_a_hit_matters(stage):
    """Blocks 0 and 1 are old; block 2, of this step, is behind the hit."""
    manager, pool = make(stage, "all")
    a = request(stage, "a", 16)
    step(manager, "a", 0, 8)
    manager.cache_blocks(a, 8)
    manager.new_step_starts()
    step(manager, "a", 8, 4)
    manager.cache_blocks(a, 12)
    b = request(stage, "b", 16)
    hits = find(stage, pool, b, 11)[0]
    assert manager.get_num_blocks_to_allocate("b", 16, hits, 8, 16) == 2
    hits = find(stage, pool, b, 15)[0]
    assert manager.get_num_blocks_to_allocate("b", 16, hits, 12, 16) == 20 + 1


def test_no_states_are_looked_up_over_several_ranks(stage):
    with pytest.raises(ValueError, match="context-parallel"):
        make(stage, "all", decode_context_parallel_size=2)
    make(stage, "none", enable_caching=False, decode_context_parallel_size=2)


def test_no_blocks_are_common(stage):
    manager, _ = make(stage, "all")
    step(manager, "a", 0, 8)
    assert manager.get_num_common_prefix_blocks("a") == 0
