"""Several groups: what of a prompt they all have."""

import math
import random

import torch

from pagedattn.prefix import BlockHasher

KV = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}


def ids(blocks):
    return [block.block_id for block in blocks]


def full(stage, block_size=4, **kwargs):
    return stage.FullAttentionSpec(block_size=block_size, **KV, **kwargs)


def sliding(stage, window, block_size=4):
    return stage.SlidingWindowSpec(sliding_window=window, block_size=block_size, **KV)


def chunked(stage, chunk, block_size=4):
    return stage.ChunkedLocalAttentionSpec(attention_chunk_size=chunk, block_size=block_size, **KV)


def mamba(stage, mode="all", block_size=4):
    return stage.MambaSpec(
        block_size=block_size, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )


def make(stage, specs, num_blocks=60, hash_block_size=4, **kwargs):
    config = stage.KVCacheConfig(
        num_blocks,
        (),
        tuple(stage.KVCacheGroupSpec((f"layer.{i}",), spec) for i, spec in enumerate(specs)),
    )
    pool = stage.BlockPool(num_blocks)
    coordinator = stage.get_kv_cache_coordinator(
        config,
        pool,
        stage.Limits(max_model_len=200),
        enable_caching=True,
        hash_block_size=hash_block_size,
        **kwargs,
    )
    return coordinator, pool


def request(stage, name, num_tokens, hash_block_size=4):
    return stage.Request(name, range(num_tokens), BlockHasher(hash_block_size, "seed"))


def register(stage, pool, request, block_size, indices, group_id):
    """Blocks with the digests of the request's blocks at these indices, in a group."""
    blocks = [pool.null_block] * (max(indices, default=-1) + 1)
    for index in sorted(indices):
        (blocks[index],) = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, blocks, 0, len(blocks), block_size, group_id)


def compute(coordinator, request, num_tokens):
    """Slots for the first tokens of a new request, registered, and free again."""
    coordinator.allocate_new_blocks(request.request_id, num_tokens, num_tokens)
    coordinator.cache_blocks(request, num_tokens)
    coordinator.free(request.request_id)
    coordinator.new_step_starts()


def find(coordinator, request, max_length=None):
    hits, length = coordinator.find_longest_cache_hit(
        request.block_hashes, request.num_tokens - 1 if max_length is None else max_length
    )
    for manager, blocks in zip(coordinator.single_type_managers, hits, strict=True):
        assert len(blocks) * manager.block_size == length, "each list covers exactly the hit"
    return [ids(blocks) for blocks in hits], length


# Several kinds.


def test_blocks_of_two_sizes(stage):
    """Full attention in blocks of 8, window 9 in blocks of 4; 24 tokens are in the cache, and a
    prompt has 21 of them: the hit of full attention is 16, and a window ends there."""
    coordinator, _ = make(stage, [full(stage, 8), sliding(stage, 9)])
    compute(coordinator, request(stage, "a", 24), 24)
    assert find(coordinator, request(stage, "b", 21)) == ([[1, 2], [0, 0, 6, 7]], 16)


def test_a_window_ends_where_the_larger_block_ends(stage):
    """The window has blocks 3 and 4, a run up to 20, which is the middle of a block of 8. Up to 16
    it would need block 2, too."""
    coordinator, pool = make(stage, [full(stage, 8), sliding(stage, 6)])
    prompt = request(stage, "a", 40)
    register(stage, pool, prompt, 8, range(3), 0)
    register(stage, pool, prompt, 4, [3, 4], 1)
    assert find(coordinator, prompt) == ([[], []], 0)


def test_the_shortest_of_all(stage):
    """Full attention has 24 tokens, the window only a run up to 16."""
    coordinator, pool = make(stage, [full(stage), sliding(stage, 6)])
    prompt = request(stage, "a", 40)
    register(stage, pool, prompt, 4, range(6), 0)
    register(stage, pool, prompt, 4, [2, 3, 5], 1)
    assert find(coordinator, prompt) == ([[1, 2, 3, 4], [0, 0, 7, 8]], 16)


def test_full_attention_need_not_be_the_first_group(stage):
    coordinator, pool = make(stage, [sliding(stage, 6), full(stage)])
    prompt = request(stage, "a", 40)
    register(stage, pool, prompt, 4, range(6), 1)
    register(stage, pool, prompt, 4, [2, 3, 5], 0)
    assert find(coordinator, prompt) == ([[0, 0, 7, 8], [1, 2, 3, 4]], 16)


def test_groups_of_one_kind_must_agree(stage):
    coordinator, pool = make(stage, [full(stage), sliding(stage, 6), sliding(stage, 6)])
    prompt = request(stage, "a", 40)
    register(stage, pool, prompt, 4, range(8), 0)
    register(stage, pool, prompt, 4, [2, 3, 6, 7], 1)
    register(stage, pool, prompt, 4, [2, 3, 4, 5], 2)
    assert find(coordinator, prompt) == ([[1, 2, 3, 4], [0, 0, 9, 10], [0, 0, 13, 14]], 16)


def test_two_windows_shorten_each_other(stage):
    """Windows of 5 and 9. The first ends at 24; the second ends at 20, where the first has nothing;
    the first ends at 12, where the second has nothing; both end at 8."""
    coordinator, pool = make(stage, [sliding(stage, 5), sliding(stage, 9)])
    prompt = request(stage, "a", 40)
    register(stage, pool, prompt, 4, [1, 2, 5], 0)
    register(stage, pool, prompt, 4, [0, 1, 3, 4], 1)
    assert find(coordinator, prompt) == ([[0, 1], [4, 5]], 8)


def test_full_attention_is_cut_by_what_comes_later(stage):
    """Two kinds of full attention, in blocks of 4 and 8, and a window: all lists end at 16."""
    coordinator, pool = make(stage, [full(stage), full(stage, 8), sliding(stage, 5)])
    prompt = request(stage, "a", 60)
    register(stage, pool, prompt, 4, range(9), 0)
    register(stage, pool, prompt, 8, range(3), 1)
    register(stage, pool, prompt, 4, [3, 4], 2)
    assert find(coordinator, prompt) == ([[1, 2, 3, 4], [10, 11], [0, 0, 0, 13]], 16)


def test_states_decide(stage):
    coordinator, pool = make(stage, [full(stage), mamba(stage, "align")])
    prompt = request(stage, "a", 40)
    register(stage, pool, prompt, 4, range(6), 0)
    register(stage, pool, prompt, 4, [1, 3, 7], 1)
    assert find(coordinator, prompt) == ([[1, 2, 3, 4], [0, 0, 0, 8]], 16)


def test_chunks_beside_full_attention(stage):
    """Full attention has 12 tokens. Their chunk begins at 8, and its first block is missing."""
    coordinator, pool = make(stage, [full(stage), chunked(stage, 8)])
    prompt = request(stage, "a", 40)
    register(stage, pool, prompt, 4, range(3), 0)
    assert find(coordinator, prompt) == ([[1, 2], [0, 0]], 8)


# EAGLE in several groups.


def test_eagle_looks_one_block_past_the_candidate(stage):
    """Full attention drops its sixth block: 20. The window needs 2 blocks up to 20, and the sixth
    behind them."""
    coordinator, pool = make(stage, [full(stage), sliding(stage, 6)], use_eagle=True)
    prompt = request(stage, "a", 40)
    register(stage, pool, prompt, 4, range(6), 0)
    register(stage, pool, prompt, 4, [3, 4, 5], 1)
    assert find(coordinator, prompt) == ([[1, 2, 3, 4, 5], [0, 0, 0, 7, 8]], 20)


def test_eagle_only_in_the_groups_that_are_named(stage):
    prompt = request(stage, "a", 40)

    def length(eagle_groups):
        coordinator, pool = make(
            stage, [full(stage), sliding(stage, 6)], use_eagle=True, eagle_groups=eagle_groups
        )
        register(stage, pool, prompt, 4, range(6), 0)
        register(stage, pool, prompt, 4, [3, 4, 5], 1)
        return find(coordinator, prompt)[1]

    assert [length(groups) for groups in ((0,), (1,), (0, 1), ())] == [20, 20, 20, 20]

    def without_the_sixth(eagle_groups):
        coordinator, pool = make(
            stage, [full(stage), sliding(stage, 6)], use_eagle=True, eagle_groups=eagle_groups
        )
        register(stage, pool, prompt, 4, range(6), 0)
        register(stage, pool, prompt, 4, [2, 3, 4], 1)
        return find(coordinator, prompt)[1]

    assert [without_the_sixth(groups) for groups in ((0,), (1,), (0, 1))] == [20, 16, 16]


def test_eagle_at_the_end_of_the_prompt(stage):
    """The last token of a prompt is never found, so nothing can be looked at behind it."""
    coordinator, _ = make(stage, [full(stage), sliding(stage, 6)], use_eagle=True)
    compute(coordinator, request(stage, "a", 16), 16)
    assert find(coordinator, request(stage, "a", 16)) == ([[1, 2], [5, 6]], 8)
    assert find(coordinator, request(stage, "a", 17)) == ([[1, 2, 3], [0, 6, 7]], 12)


def test_eagle_drops_once_for_a_candidate(stage):
    """vllm-project/vllm#32802: one block is dropped, not one in each pass."""
    coordinator, _ = make(
        stage, [full(stage), sliding(stage, 6), sliding(stage, 10)], use_eagle=True
    )
    compute(coordinator, request(stage, "a", 41), 41)
    assert find(coordinator, request(stage, "a", 41))[1] == 36


def test_eagle_drops_again_when_a_state_has_shortened_the_candidate(stage):
    """The states end at 16. The window has blocks up to 16, but not the one behind; so 8, where
    there is a state, and blocks 0, 1 and 2 of the window."""
    coordinator, pool = make(stage, [full(stage), sliding(stage, 6), mamba(stage)], use_eagle=True)
    prompt = request(stage, "a", 40)
    register(stage, pool, prompt, 4, range(8), 0)
    register(stage, pool, prompt, 4, [0, 1, 2, 3, 5, 6, 7], 1)
    register(stage, pool, prompt, 4, [1, 3], 2)
    assert find(coordinator, prompt) == ([[1, 2], [9, 10], [0, 16]], 8)


def test_eagle_does_not_drop_again_after_a_drop(stage):
    """Windows of 5 and 4 need one block each. The first ends at 36, with a block behind. The second
    ends at 16 because it drops block 4. There the first has block 3, and needs no other."""
    coordinator, pool = make(stage, [sliding(stage, 5), sliding(stage, 4)], use_eagle=True)
    prompt = request(stage, "a", 41)
    register(stage, pool, prompt, 4, [3, 8, 9], 0)
    register(stage, pool, prompt, 4, [3, 4], 1)
    assert find(coordinator, prompt) == ([[0, 0, 0, 1], [0, 0, 0, 4]], 16)


def test_states_never_lengthen_a_hit(stage):
    """vllm-project/vllm#43559: 12 tokens are in the cache, full attention drops a block, so 8; the
    states said 12 all the same, and the four tokens between were never computed."""
    coordinator, _ = make(stage, [full(stage), mamba(stage)], use_eagle=True)
    compute(coordinator, request(stage, "a", 13), 13)
    assert find(coordinator, request(stage, "a", 13)) == ([[1, 2], [0, 6]], 8)


def test_states_that_are_missing_where_eagle_ends(stage):
    """A state at 12 alone is of no use."""
    coordinator, pool = make(stage, [full(stage), mamba(stage)], use_eagle=True)
    prompt = request(stage, "a", 13)
    register(stage, pool, prompt, 4, range(3), 0)
    register(stage, pool, prompt, 4, [2], 1)
    assert find(coordinator, prompt) == ([[], []], 0)


def test_the_longest_hit_of_all_kinds(stage):
    """Against the definition: the greatest common length of which every group has what the next
    token needs."""
    draw = random.Random(6)
    for _ in range(400):
        specs = [
            draw.choice(
                [
                    full(stage, size),
                    sliding(stage, draw.choice([2, 5, 6, 9, 14, 23]), size),
                    mamba(stage, "all", size),
                ]
            )
            for size in draw.choices([2, 4, 8], k=draw.randint(2, 4))
        ]
        if len(set(specs)) < 2:
            continue
        coordinator, pool = make(stage, specs, num_blocks=200, hash_block_size=2)
        prompt = request(stage, "a", draw.randint(1, 70), hash_block_size=2)
        present = []
        for group_id, spec in enumerate(specs):
            indices = range(prompt.num_tokens // spec.block_size)
            present.append({i for i in indices if draw.random() < 0.9})
            register(stage, pool, prompt, spec.block_size, present[-1], group_id)

        def needed(spec, length):
            begin = 0
            if isinstance(spec, stage.SlidingWindowSpec):
                begin = max(0, length - spec.sliding_window + 1)
            elif isinstance(spec, stage.MambaSpec):
                begin = max(0, length - 1)
            return {position // spec.block_size for position in range(begin, length)}

        lengths = [
            length
            for length in range(
                0, prompt.num_tokens, math.lcm(*(spec.block_size for spec in specs))
            )
            if all(
                needed(spec, length) <= found for spec, found in zip(specs, present, strict=True)
            )
        ]
        assert find(coordinator, prompt)[1] == max(lengths), f"{specs}, {present}"
