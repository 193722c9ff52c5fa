"""``allocate_slots``: five kinds of tokens, what is returned, and what a refusal leaves.

Blocks have 4 tokens unless a test says otherwise. Ids follow from the free queue, which begins as
1, 2, 3, …
"""

import pytest
import torch

from pagedattn.prefix import BlockHasher


def full(stage, block_size=4):
    return stage.FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )


def sliding(stage, window, block_size=4):
    return stage.SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=1,
        dtype=torch.float32,
        sliding_window=window,
    )


def manager_of(stage, num_blocks, *specs, max_model_len=64, max_num_batched_tokens=None, **options):
    groups = tuple(stage.KVCacheGroupSpec((f"layer {i}",), spec) for i, spec in enumerate(specs))
    limits = stage.Limits(
        max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens
    )
    config = stage.KVCacheConfig(num_blocks, (), groups or (full_group(stage),))
    return stage.KVCacheManager(config, limits, **options)


def full_group(stage):
    return stage.KVCacheGroupSpec(("layer",), full(stage))


def request(stage, name, num_tokens, first=0):
    return stage.Request(name, range(first, first + num_tokens), BlockHasher(4, "seed"))


def run(manager, request, new, **options):
    """Allocate, and count as computed; the new ids by group, or None."""
    blocks = manager.allocate_slots(request, new, **options)
    if blocks is None:
        return None
    request.num_computed_tokens += new + options.get("num_new_computed_tokens", 0)
    request.num_computed_tokens += options.get("num_external_computed_tokens", 0)
    manager.check_invariants()
    return [list(ids) for ids in blocks.get_block_ids()]


def start(manager, request, new=None):
    """Look up, and allocate the rest: the hit, and the new ids by group."""
    hits, num_hits = manager.get_computed_blocks(request)
    if new is None:
        new = request.num_tokens - num_hits
    found = run(manager, request, new, num_new_computed_tokens=num_hits, new_computed_blocks=hits)
    return num_hits, found


def table(manager, request):
    return [list(ids) for ids in manager.get_block_ids(request.request_id)]


def state(manager):
    pool = manager.pool
    return (
        [block.block_id for block in pool.free_queue],
        [block.ref_cnt for block in pool.blocks],
        [block.block_hash for block in pool.blocks],
        [
            {name: [b.block_id for b in blocks] for name, blocks in m.req_to_blocks.items()}
            for m in manager.coordinator.single_type_managers
        ],
        [dict(m.num_cached_blocks) for m in manager.coordinator.single_type_managers],
    )


# The five kinds.


def test_a_prompt_then_token_by_token(stage):
    """6 tokens fill 2 blocks, up to 8; token 9 needs a third."""
    manager = manager_of(stage, 10)
    r = request(stage, "r", 6)
    assert run(manager, r, 6) == [[1, 2]]
    answers = []
    for token in range(4):
        r.append([100 + token])
        answers.append(run(manager, r, 1))
    assert answers == [[[]], [[]], [[3]], [[]]], "no new block is an empty answer, not None"
    assert table(manager, r) == [[1, 2, 3]]


def test_hits_are_not_new(stage):
    manager = manager_of(stage, 10)
    run(manager, request(stage, "a", 9), 9)
    b = request(stage, "b", 12)
    assert start(manager, b) == (8, [[4]])
    assert table(manager, b) == [[1, 2, 4]]
    assert [block.ref_cnt for block in manager.pool.blocks[:5]] == [0, 2, 2, 1, 1]


def test_lookahead_gets_slots_and_no_digest(stage):
    """3 + 6 tokens need 3 blocks. What is known are 3, so nothing is full."""
    manager = manager_of(stage, 10)
    r = request(stage, "r", 3)
    assert run(manager, r, 3, num_lookahead_tokens=6) == [[1, 2, 3]]
    assert manager.pool.cached_blocks == {}


def test_drafts_are_never_registered(stage):
    """8 slots are new, and 6 tokens are known: 2 drafts. One block is full of known tokens."""
    manager = manager_of(stage, 10)
    r = request(stage, "r", 6)
    assert run(manager, r, 8) == [[1, 2]]
    assert [block.block_hash is not None for block in manager.pool.blocks[1:3]] == [True, False]
    r.num_computed_tokens = 6  # both drafts were rejected
    r.append([50, 51])
    assert run(manager, r, 2) == [[]]
    assert manager.pool.blocks[2].block_hash is not None


@pytest.mark.parametrize(
    ("new", "lookahead", "blocks"), [(7, 0, 2), (7, 1, 2), (7, 9, 3), (9, 9, 3)]
)
def test_no_slot_behind_the_longest_length(stage, new, lookahead, blocks):
    """At most 10 tokens, 3 blocks, however many are asked for."""
    manager = manager_of(stage, 10, max_model_len=10)
    r = request(stage, "r", new)
    (ids,) = run(manager, r, new, num_lookahead_tokens=lookahead)
    assert len(ids) == blocks


def test_what_is_behind_the_longest_length_is_not_registered(stage):
    manager = manager_of(stage, 10, max_model_len=10)
    assert run(manager, request(stage, "r", 20), 20) == [[1, 2, 3]]
    assert len(manager.pool.cached_blocks) == 2, "10 tokens fill 2 blocks"


def test_blocks_of_external_tokens_are_not_returned(stage):
    """16 tokens from elsewhere and none new: 4 blocks are taken, and nothing is returned."""
    manager = manager_of(stage, 10)
    r = request(stage, "r", 17)
    assert run(manager, r, 0, num_external_computed_tokens=16) == [[]]
    assert table(manager, r) == [[1, 2, 3, 4]]
    assert run(manager, r, 1) == [[5]]


def test_external_tokens_behind_a_hit(stage):
    """A hit of 8, then 8 from elsewhere and 3 new: 2 blocks for those, 1 for these."""
    manager = manager_of(stage, 12)
    run(manager, request(stage, "a", 9), 9)
    r = request(stage, "r", 19)
    hits, num_hits = manager.get_computed_blocks(r)
    options = {"num_new_computed_tokens": num_hits, "new_computed_blocks": hits}
    assert num_hits == 8
    assert run(manager, r, 3, num_external_computed_tokens=8, **options) == [[6]]
    assert table(manager, r) == [[1, 2, 4, 5, 6]]


def test_external_tokens_of_a_window(stage):
    """Window 4: of 16 tokens from elsewhere the last 3 are seen, which lie in the fourth block."""
    manager = manager_of(stage, 10, sliding(stage, 4))
    r = request(stage, "r", 20)
    assert run(manager, r, 4, num_external_computed_tokens=16) == [[2]]
    assert table(manager, r) == [[0, 0, 0, 1, 2]]


def test_delayed_blocks_are_registered_later(stage):
    manager = manager_of(stage, 10)
    r = request(stage, "r", 9)
    run(manager, r, 9, delay_cache_blocks=True)
    assert manager.pool.cached_blocks == {}
    manager.cache_blocks(r, 7)
    assert len(manager.pool.cached_blocks) == 1
    manager.cache_blocks(r, 9)
    manager.cache_blocks(r, 3)
    assert len(manager.pool.cached_blocks) == 2
    manager.check_invariants()


def test_with_caching_off_nothing_is_registered_or_found(stage):
    manager = manager_of(stage, 10, enable_caching=False)
    a = stage.Request("a", range(9))
    run(manager, a, 9)
    manager.cache_blocks(a, 9)
    assert manager.pool.cached_blocks == {}
    assert manager.get_computed_blocks(stage.Request("b", range(9)))[1] == 0


# Refused.


def test_a_refusal_changes_nothing(stage):
    manager = manager_of(stage, 5)
    r = request(stage, "r", 9)
    run(manager, r, 9)
    other = request(stage, "o", 13)
    before = state(manager)
    assert start(manager, other) == (8, None), "2 more are needed, 1 is free"
    assert state(manager) == before
    assert run(manager, r, 8) is None
    assert state(manager) == before


def test_a_hit_in_the_free_queue_counts(stage):
    """4 blocks, 2 of them hits: who needs 3 more than these has too few, though 4 are free."""
    manager = manager_of(stage, 5)
    a = request(stage, "a", 9)
    run(manager, a, 9)
    manager.free(a)
    assert manager.pool.num_free_blocks == 4
    before = state(manager)
    assert start(manager, request(stage, "b", 17)) == (8, None)
    assert state(manager) == before
    assert start(manager, request(stage, "c", 16)) == (8, [[4, 3]]), "4, which was never used"


def test_a_refusal_leaves_the_window_trimmed(stage):
    """A window of 5 behind 13 tokens reaches back to token 9, so blocks 1 and 2 are out of it. The
    request is refused the 3 blocks that it asks for, and has given these back all the same."""
    manager = manager_of(stage, 5, sliding(stage, 5))
    r = request(stage, "r", 40)
    assert run(manager, r, 13) == [[1, 2, 3, 4]]
    assert run(manager, r, 12) is None
    assert table(manager, r) == [[0, 0, 3, 4]]
    assert [block.block_id for block in manager.pool.free_queue] == [2, 1]
    manager.check_invariants()
    assert run(manager, r, 8) == [[2, 1]]


def test_the_whole_must_fit(stage):
    """20 tokens need 5 blocks; 4 are free. Their first 8 fit, but not if all must."""
    manager = manager_of(stage, 5)
    r = request(stage, "r", 20)
    before = state(manager)
    assert run(manager, r, 8, full_sequence_must_fit=True) is None
    assert state(manager) == before
    assert run(manager, r, 8) == [[1, 2]]


def test_of_a_window_only_so_much_must_fit(stage):
    """A window of 4, steps of 8: at most ceil((3 + 8) / 4) + 1 = 4 blocks at a time, so a prompt of
    40 tokens fits into 4 free blocks, and not into 3."""
    for num_blocks, answer in ((5, [[1, 2]]), (4, None)):
        manager = manager_of(stage, num_blocks, sliding(stage, 4), max_num_batched_tokens=8)
        r = request(stage, "r", 40)
        assert run(manager, r, 8, full_sequence_must_fit=True) == answer


def test_more_than_the_longest_need_not_fit(stage):
    """20 tokens are known, and 12 are the longest: 3 blocks must fit, and do."""
    manager = manager_of(stage, 4, max_model_len=12)
    assert run(manager, request(stage, "r", 20), 4, full_sequence_must_fit=True) == [[1]]


# Several groups.


def test_group_by_group(stage):
    """Full attention, and a window of 5. First the hits of all groups, then new blocks."""
    manager = manager_of(stage, 20, full(stage), sliding(stage, 5))
    a = request(stage, "a", 13)
    assert run(manager, a, 13) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    b = request(stage, "b", 18)
    assert start(manager, b) == (12, [[9, 10], [11, 12]])
    assert table(manager, b) == [[1, 2, 3, 9, 10], [0, 0, 7, 11, 12]]
    a.append([70])
    assert run(manager, a, 1) == [[], []]
    assert table(manager, a) == [[1, 2, 3, 4], [0, 0, 7, 8]]
    manager.free(a)
    assert [block.block_id for block in manager.pool.free_queue][-4:] == [6, 5, 4, 8]


def test_two_block_sizes(stage):
    """Blocks of 8 and of 4: 12 tokens are 2 and 3 of them."""
    manager = manager_of(stage, 20, full(stage, 8), sliding(stage, 9))
    assert manager.hash_block_size == 4
    assert run(manager, request(stage, "a", 12), 12) == [[1, 2], [3, 4, 5]]
    assert len(manager.pool.cached_blocks) == 4


def test_cross_attention_takes_the_encoders_blocks_once(stage):
    cross = stage.CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype=torch.float32)
    manager = manager_of(stage, 20, full(stage), cross, enable_caching=False)
    r = stage.Request("r", range(6), num_encoder_tokens=9)
    assert run(manager, r, 6, num_encoder_tokens=9) == [[1, 2], [3, 4, 5]]
    r.append([7, 8, 9])
    assert run(manager, r, 3) == [[6], []]


# Wrong input, before anything changes.


def test_nothing_to_give_slots_for(stage):
    manager = manager_of(stage, 10, sliding(stage, 4))
    r = request(stage, "r", 13)
    run(manager, r, 12)
    before = state(manager)
    for new, options in (
        (0, {}),
        (-1, {}),
        (1, {"num_lookahead_tokens": -1}),
        (1, {"num_external_computed_tokens": -1}),
        (-1, {"num_external_computed_tokens": 8}),
    ):
        with pytest.raises(ValueError, match=r"request r: .* nothing to give slots for"):
            manager.allocate_slots(r, new, **options)
        assert state(manager) == before, (new, options)


def test_hits_that_cannot_be_taken(stage):
    manager = manager_of(stage, 12)
    a = request(stage, "a", 9)
    run(manager, a, 9)
    b = request(stage, "b", 12)
    hits, num_hits = manager.get_computed_blocks(b)
    run(manager, b, 4)
    c = request(stage, "c", 12)
    two_groups = stage.KVCacheBlocks((hits.blocks[0], hits.blocks[0]))
    before = state(manager)
    for who, given, num, message in (
        (b, hits, num_hits, "request b has blocks; hits can only begin a table"),
        (c, hits, 4, "2 hits of 4 tokens each are not 4 tokens"),
        (c, None, 8, "hits in 0 groups; there are 1"),
        (c, two_groups, 8, "hits in 2 groups; there are 1"),
    ):
        with pytest.raises(ValueError, match=message):
            manager.allocate_slots(who, 4, num_new_computed_tokens=num, new_computed_blocks=given)
        assert state(manager) == before, message


def test_a_hit_that_was_evicted(stage):
    manager = manager_of(stage, 6)
    a = request(stage, "a", 9)
    run(manager, a, 9)
    manager.free(a)
    b = request(stage, "b", 12)
    hits, num_hits = manager.get_computed_blocks(b)
    manager.evict_blocks([2])
    before = state(manager)
    with pytest.raises(ValueError, match="block 2 was evicted since it was found"):
        manager.allocate_slots(b, 4, num_new_computed_tokens=num_hits, new_computed_blocks=hits)
    assert state(manager) == before


def test_a_request_without_digests(stage):
    manager = manager_of(stage, 10)
    before = state(manager)
    with pytest.raises(ValueError, match="request r lacks digests of 4 tokens"):
        manager.allocate_slots(stage.Request("r", range(9)), 9)
    with pytest.raises(ValueError, match="lacks digests"):
        manager.allocate_slots(stage.Request("s", range(9), BlockHasher(8)), 9)
    assert state(manager) == before


def test_external_tokens_come_first(stage):
    manager = manager_of(stage, 10)
    r = request(stage, "r", 13)
    run(manager, r, 3, delay_cache_blocks=True)
    before = state(manager)
    with pytest.raises(ValueError, match="has 1 blocks; external tokens come first"):
        manager.allocate_slots(r, 1, num_external_computed_tokens=4)
    assert state(manager) == before
