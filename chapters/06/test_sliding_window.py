"""A sliding window: what is out of reach, and the rightmost run that covers a window."""

import random

import pytest
import torch

from pagedattn.prefix import BlockHasher

KV = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}


def ids(blocks):
    return [block.block_id for block in blocks]


def register(pool, request, indices, group_id=0):
    """Blocks with the digests of the request's blocks at these indices, in a group."""
    blocks = [pool.null_block] * (max(indices, default=-1) + 1)
    for index in sorted(indices):
        (blocks[index],) = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, blocks, 0, len(blocks), 4, group_id)


def find(stage, pool, request, max_length, window, groups=(0,), eagle=False, align=4):
    hits = stage.SlidingWindowManager.find_longest_cache_hit(
        request.block_hashes,
        max_length,
        groups,
        pool,
        stage.SlidingWindowSpec(sliding_window=window, **KV),
        drop_eagle_block=eagle,
        alignment_tokens=align,
    )
    return [ids(blocks) for blocks in hits]


def manager_of(stage, window, pool, **limits):
    spec = stage.SlidingWindowSpec(sliding_window=window, **KV)
    return stage.get_manager_for_spec(spec)(
        spec,
        pool,
        0,
        limits=stage.Limits(**{"max_model_len": 64, **limits}),
        enable_caching=True,
    )


@pytest.fixture
def long(stage):
    """A request of 40 tokens: 10 blocks of 4."""
    return stage.Request("a", range(40), BlockHasher(4, "seed"))


# What is out of reach.


@pytest.mark.parametrize(
    ("window", "computed", "skipped"),
    [(4, 7, 4), (4, 3, 0), (4, 4, 1), (4, 0, 0), (1, 5, 5), (10, 9, 0), (10, 21, 12)],
)
def test_tokens_before_the_window_of_the_next(stage, window, computed, skipped):
    """Of window 4, token 7 sees 4, 5, 6 and itself."""
    manager = manager_of(stage, window, stage.BlockPool(9))
    assert manager.get_num_skipped_tokens(computed) == skipped


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 6, 9, 13])
def test_what_is_held_is_what_later_tokens_see(stage, window):
    """Token by token, all blocks and no other that hold a token in the window of the next one."""
    manager = manager_of(stage, window, stage.BlockPool(30))
    for computed in range(40):
        manager.remove_skipped_blocks("a", computed)
        manager.allocate_new_blocks("a", computed + 1, computed + 1)
        seen = range(max(0, computed - window + 1), computed + 1)
        held = [i for i, block in enumerate(manager.req_to_blocks["a"]) if not block.is_null]
        assert held == sorted({position // 4 for position in seen})


@pytest.mark.parametrize("window", [1, 2, 3, 6, 8, 9, 14])
@pytest.mark.parametrize("step", [1, 3, 4, 7, 16])
def test_the_cap_bounds_what_is_held(stage, window, step):
    """Steps of any size up to the limit, from the beginning to the end."""
    pool = stage.BlockPool(60)
    manager = manager_of(stage, window, pool, max_model_len=100, max_num_batched_tokens=step)
    cap = manager.get_num_blocks_to_allocate("a", 100, (), 0, 100, apply_admission_cap=True)
    random_steps, computed, most = random.Random(window * step), 0, 0
    while computed < 100:
        manager.remove_skipped_blocks("a", computed)
        computed = min(computed + random_steps.randint(1, step), 100)
        manager.allocate_new_blocks("a", computed, computed)
        most = max(most, 59 - pool.num_free_blocks)
    assert most <= cap <= most + 1


def test_no_window_over_several_ranks(stage):
    with pytest.raises(ValueError, match="context-parallel"):
        manager_of(stage, 4, stage.BlockPool(9), decode_context_parallel_size=2)


def test_no_blocks_are_common(stage):
    manager = manager_of(stage, 4, stage.BlockPool(9))
    manager.allocate_new_blocks("a", 8, 8)
    assert manager.get_num_common_prefix_blocks("a") == 0


# What is found. With indices 0, 2, 3, 5 registered the ids are 1, 2, 3, 4.


@pytest.mark.parametrize(
    ("cached", "max_length", "window", "hit"),
    [
        ([0, 2, 3, 5], 39, 6, [0, 0, 2, 3]),
        ([0, 2, 3, 5], 39, 9, [0, 0, 2, 3]),
        ([0, 2, 3, 5], 39, 10, [1]),
        ([0, 2, 3, 5], 39, 5, [0, 0, 0, 0, 0, 4]),
        ([0, 2, 3, 5], 39, 2, [0, 0, 0, 0, 0, 4]),
        ([0, 2, 3, 5], 23, 5, [0, 0, 0, 3]),
        ([0, 2, 3, 5], 15, 6, [1]),
        ([2, 3, 5], 15, 6, []),
        ([0, 1], 39, 30, [1, 2]),
        ([0, 1, 2, 3, 4], 39, 9, [0, 0, 0, 4, 5]),
        ([], 39, 6, []),
        ([0, 1], 3, 6, []),
        ([0, 1], 0, 6, []),
        ([4], 39, 1, [0, 0, 0, 0, 1]),
    ],
)
def test_the_rightmost_run_that_covers_a_window(stage, long, cached, max_length, window, hit):
    pool = stage.BlockPool(20)
    register(pool, long, cached)
    before = [block.ref_cnt for block in pool.blocks]
    assert find(stage, pool, long, max_length, window) == [hit]
    assert [block.ref_cnt for block in pool.blocks] == before, "a lookup changes nothing"


@pytest.mark.parametrize(("num_cached", "length"), [(2, 0), (3, 0), (4, 0), (5, 2), (7, 4)])
def test_a_short_run_is_cut_twice(stage, long, num_cached, length):
    """At the beginning, with EAGLE and an alignment to 8 tokens: first to the alignment, then the
    EAGLE block, then to the alignment again. Of 5 blocks 4 are left, 3, and 2."""
    pool = stage.BlockPool(20)
    register(pool, long, range(num_cached))
    hits = find(stage, pool, long, 39, 60, eagle=True, align=8)
    assert hits == [list(range(1, length + 1))]


def test_all_groups_must_have_the_run(stage, long):
    pool = stage.BlockPool(20)
    register(pool, long, [0, 1, 2, 3], group_id=0)
    register(pool, long, [0, 1, 2], group_id=1)
    assert find(stage, pool, long, 39, 6, groups=(0, 1)) == [[0, 2, 3], [0, 6, 7]]
    assert find(stage, pool, long, 39, 6, groups=(0,)) == [[0, 0, 3, 4]]


@pytest.mark.parametrize(
    ("cached", "max_length", "window", "hit"),
    [
        ([1, 2, 3], 39, 6, [0, 1, 2]),
        ([2, 3], 39, 6, []),
        ([0, 1], 39, 6, [1]),
        ([0], 39, 6, []),
        ([0, 1, 2, 3], 12, 6, [1, 2]),
        ([5], 39, 1, [0] * 5),
    ],
)
def test_eagle_needs_one_block_more_and_leaves_it_out(stage, long, cached, max_length, window, hit):
    pool = stage.BlockPool(20)
    register(pool, long, cached)
    assert find(stage, pool, long, max_length, window, eagle=True) == [hit]


@pytest.mark.parametrize(
    ("cached", "window", "eagle", "hit"),
    [
        ([2, 3, 4], 6, False, [0, 0, 1, 2]),
        ([3, 4], 6, False, []),
        ([0, 1, 2], 30, False, [1, 2]),
        ([0], 30, False, []),
        ([2, 3, 4], 6, True, [0, 0, 1, 2]),
        ([2, 3, 4, 5], 6, True, [0, 0, 1, 2]),
        ([3, 4, 5], 6, True, []),
    ],
)
def test_a_hit_ends_at_the_alignment(stage, long, cached, window, eagle, hit):
    """Another group has blocks of 8 tokens. With EAGLE the run ends one block later."""
    pool = stage.BlockPool(20)
    register(pool, long, cached)
    assert find(stage, pool, long, 39, window, eagle=eagle, align=8) == [hit]


@pytest.mark.parametrize("align", [4, 8, 12])
def test_a_run_is_found_if_and_only_if_there_is_one(stage, align):
    """Against the definition: the greatest aligned length of which all tokens that the next token
    sees are in the cache."""
    draw = random.Random(align)
    for _ in range(300):
        num_tokens, window = draw.randint(1, 60), draw.randint(2, 24)
        prompt = stage.Request("a", range(num_tokens), BlockHasher(4, "seed"))
        cached = {i for i in range(num_tokens // 4) if draw.random() < 0.8}
        pool = stage.BlockPool(20)
        register(pool, prompt, cached)
        lengths = [
            length
            for length in range(0, num_tokens, align)
            if {p // 4 for p in range(max(0, length - window + 1), length)} <= cached
        ]
        (hit,) = find(stage, pool, prompt, num_tokens - 1, window, align=align)
        assert len(hit) * 4 == max(lengths), f"{sorted(cached)}, window {window}"


def test_a_run_with_eagle_is_found_if_and_only_if_there_is_one(stage):
    """The same, and the block behind must be there, too."""
    draw = random.Random(5)
    for _ in range(300):
        num_tokens, window = draw.randint(1, 60), draw.randint(2, 24)
        prompt = stage.Request("a", range(num_tokens), BlockHasher(4, "seed"))
        cached = {i for i in range(num_tokens // 4) if draw.random() < 0.8}
        pool = stage.BlockPool(20)
        register(pool, prompt, cached)
        lengths = [0] + [
            length
            for length in range(4, num_tokens - 4, 4)
            if {p // 4 for p in range(max(0, length - window + 1), length + 1)} <= cached
        ]
        (hit,) = find(stage, pool, prompt, num_tokens - 1, window, eagle=True)
        assert len(hit) * 4 == max(lengths), f"{sorted(cached)}, window {window}"
