"""Several groups: which coordinator they have, and what they take and give back together."""

import random

import pytest
import torch

from pagedattn.prefix import BlockHasher

KV = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
LIMITS = {"max_model_len": 200, "max_encoder_len": 40}


def ids(blocks):
    return [block.block_id for block in blocks]


def full(stage, block_size=4, **kwargs):
    return stage.FullAttentionSpec(block_size=block_size, **KV, **kwargs)


def sliding(stage, window, block_size=4):
    return stage.SlidingWindowSpec(sliding_window=window, block_size=block_size, **KV)


def chunked(stage, chunk, block_size=4):
    return stage.ChunkedLocalAttentionSpec(attention_chunk_size=chunk, block_size=block_size, **KV)


def cross(stage):
    return stage.CrossAttentionSpec(block_size=4, **KV)


def mamba(stage, mode="all", block_size=4):
    return stage.MambaSpec(
        block_size=block_size, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )


def make(stage, specs, num_blocks=60, enable_caching=True, hash_block_size=4, **kwargs):
    limits = {name: kwargs.pop(name) for name in list(kwargs) if name.endswith("parallel_size")}
    config = stage.KVCacheConfig(
        num_blocks,
        (),
        tuple(stage.KVCacheGroupSpec((f"layer.{i}",), spec) for i, spec in enumerate(specs)),
    )
    pool = stage.BlockPool(num_blocks, enable_caching=enable_caching)
    coordinator = stage.get_kv_cache_coordinator(
        config,
        pool,
        stage.Limits(**LIMITS, **limits),
        enable_caching=enable_caching,
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


# Which coordinator.


def test_which_coordinator_a_configuration_has(stage):
    def kind(specs, **kwargs):
        return type(make(stage, specs, **kwargs)[0])

    assert kind([], enable_caching=False) is stage.NoPrefixCacheCoordinator
    assert kind([full(stage)], enable_caching=False) is stage.NoPrefixCacheCoordinator
    assert kind([full(stage), cross(stage)], enable_caching=False) is stage.NoPrefixCacheCoordinator
    assert kind([full(stage)]) is stage.UnitaryCoordinator
    assert kind([full(stage), sliding(stage, 8)]) is stage.HybridCoordinator


def test_each_kind_has_its_manager(stage):
    coordinator, _ = make(
        stage,
        [full(stage), sliding(stage, 8), chunked(stage, 8), mamba(stage), mamba(stage, "align")],
    )
    assert [type(manager) for manager in coordinator.single_type_managers] == [
        stage.FullAttentionManager,
        stage.SlidingWindowManager,
        stage.ChunkedLocalAttentionManager,
        stage.MambaManager,
        stage.AlignedMambaManager,
    ]
    with pytest.raises(ValueError, match="EncoderOnly"):
        stage.get_manager_for_spec(stage.EncoderOnlyAttentionSpec(block_size=4, **KV))


@pytest.mark.parametrize(
    ("build", "options", "match"),
    [
        (lambda s: [full(s)], {"hash_block_size": 2}, "a digest covers 2 tokens"),
        (lambda s: [full(s)], {"decode_context_parallel_size": 2}, "a digest covers 4 tokens"),
        (lambda s: [full(s, 4), sliding(s, 8, 6)], {}, "digests of 4 tokens"),
        (lambda s: [full(s), full(s)], {}, "2 groups of 1 kinds"),
        (lambda s: [], {}, "0 groups"),
        (
            lambda s: [full(s), mamba(s)],
            {"prefill_context_parallel_size": 2},
            "context-parallel",
        ),
        (lambda s: [full(s), cross(s)], {}, "turn caching off"),
        (lambda s: [full(s), chunked(s, 8)], {"use_eagle": True}, "EAGLE"),
        (lambda s: [full(s, 8), chunked(s, 8)], {}, "blocks of one size"),
        (lambda s: [full(s)], {"use_eagle": True, "eagle_groups": (1,)}, "eagle_groups"),
    ],
)
def test_what_cannot_be_looked_up_is_refused_at_the_start(stage, build, options, match):
    with pytest.raises(ValueError, match=match):
        make(stage, build(stage), **options)


# Nothing, and one group.


def test_without_caching_nothing_is_found_or_common(stage):
    coordinator, _ = make(stage, [full(stage), cross(stage)], enable_caching=False)
    a = request(stage, "a", 20)
    coordinator.allocate_new_blocks("a", 20, 20, 8)
    assert find(coordinator, a) == ([[], []], 0)
    assert coordinator.get_num_common_prefix_blocks("a") == [0, 0]
    none, _ = make(stage, [], enable_caching=False)
    assert none.find_longest_cache_hit((), 8) == ((), 0)
    assert none.get_num_blocks_to_allocate("a", 9, (), 0, 0, 9) == 0
    assert none.allocate_new_blocks("a", 9, 9) == ()


@pytest.mark.parametrize(("use_eagle", "hits"), [(False, [8, 12, 12, 16]), (True, [4, 8, 8, 12])])
def test_one_group_of_full_attention(stage, use_eagle, hits):
    """Prompts of 12, 13, 16 and 17 tokens, all of them computed before."""
    for num_tokens, length in zip((12, 13, 16, 17), hits, strict=True):
        coordinator, _ = make(stage, [full(stage)], use_eagle=use_eagle)
        prompt = request(stage, "a", num_tokens)
        compute(coordinator, prompt, num_tokens)
        assert find(coordinator, prompt) == ([list(range(1, length // 4 + 1))], length)


def test_one_group_over_two_ranks(stage):
    coordinator, _ = make(
        stage, [full(stage, 2)], hash_block_size=4, decode_context_parallel_size=2
    )
    compute(coordinator, request(stage, "a", 15), 15)
    assert find(coordinator, request(stage, "b", 17)) == ([[1, 2, 3]], 12)


def test_one_group_of_chunks_with_an_empty_cache(stage):
    coordinator, _ = make(stage, [chunked(stage, 8)])
    assert find(coordinator, request(stage, "a", 15)) == ([[0, 0]], 8)


# Taking and giving back in all groups.


def test_groups_take_in_their_order(stage):
    coordinator, pool = make(stage, [full(stage), sliding(stage, 6)])
    assert coordinator.get_num_blocks_to_allocate("a", 9, (), 0, 0, 9) == 6
    new = coordinator.allocate_new_blocks("a", 9, 9)
    assert [ids(blocks) for blocks in new] == [[1, 2, 3], [4, 5, 6]]
    assert [ids(blocks) for blocks in coordinator.get_blocks("a")] == [[1, 2, 3], [4, 5, 6]]
    coordinator.remove_skipped_blocks("a", 9)
    assert [ids(blocks) for blocks in coordinator.get_blocks("a")] == [[1, 2, 3], [0, 5, 6]]
    coordinator.free("a")
    assert ids(pool.free_queue)[-6:] == [4, 3, 2, 1, 6, 5]
    assert coordinator.get_blocks("a") == ([], [])


def test_blocks_of_two_sizes_are_counted_each_in_its_own(stage):
    coordinator, _ = make(stage, [full(stage, 8), sliding(stage, 9)])
    assert coordinator.get_num_blocks_to_allocate("a", 21, (), 0, 0, 21) == 3 + 6


def test_the_cap_is_passed_on(stage):
    """No limit a step: ceil(200 / 4) + 1 for the window, never more than without the cap."""
    coordinator, _ = make(stage, [full(stage), sliding(stage, 6)])
    need = coordinator.get_num_blocks_to_allocate
    assert need("a", 200, (), 0, 0, 200, apply_admission_cap=True) == 100


def test_the_encoder_is_counted_in_its_own_tokens(stage):
    coordinator, _ = make(stage, [full(stage), cross(stage)], enable_caching=False)
    assert coordinator.get_num_blocks_to_allocate("a", 5, (), 30, 0, 5) == 2 + 8
    new = coordinator.allocate_new_blocks("a", 5, 5, 30)
    assert [ids(blocks) for blocks in new] == [[1, 2], list(range(3, 11))]
    assert coordinator.get_num_blocks_to_allocate("a", 9, (), 0, 5, 9) == 1
    assert [ids(blocks) for blocks in coordinator.allocate_new_blocks("a", 9, 9)] == [[11], []]


def test_a_hit_is_attached_in_all_groups(stage):
    coordinator, pool = make(stage, [full(stage), sliding(stage, 6)])
    compute(coordinator, request(stage, "a", 16), 16)
    b = request(stage, "b", 17)
    hits, length = coordinator.find_longest_cache_hit(b.block_hashes, 16)
    assert ([ids(blocks) for blocks in hits], length) == ([[1, 2, 3, 4], [0, 0, 7, 8]], 16)
    need = coordinator.get_num_blocks_to_allocate("b", 17, hits, 0, 16, 17)
    assert need == (4 + 1) + (2 + 1)
    before = pool.num_free_blocks
    coordinator.allocate_new_computed_blocks("b", hits, 16, 0)
    coordinator.allocate_new_blocks("b", 17, 17)
    assert before - pool.num_free_blocks == need
    assert [ids(blocks) for blocks in coordinator.get_blocks("b")] == [
        [1, 2, 3, 4, 9],
        [0, 0, 7, 8, 10],
    ]


def test_no_hit_is_taken_for_tokens_from_outside(stage):
    """The free queue begins with block 1, a hit of the window. Full attention comes first and needs
    a block for tokens from outside; it must get another one. Block 4, a hit as well, is out of
    reach behind 12 tokens, so it is as free as any."""
    coordinator, pool = make(stage, [full(stage), sliding(stage, 9)], num_blocks=11)
    a = request(stage, "a", 16)
    register(stage, pool, a, 4, [1], 1)
    register(stage, pool, a, 4, [0, 1], 0)
    register(stage, pool, a, 4, [0], 1)
    rest = pool.get_new_blocks(6)
    pool.free_blocks(pool.blocks[1:5])
    pool.free_blocks(rest)
    hits, length = coordinator.find_longest_cache_hit(a.block_hashes, 15)
    assert ([ids(blocks) for blocks in hits], length) == ([[2, 3], [4, 1]], 8)
    assert coordinator.get_num_blocks_to_allocate("a", 16, hits, 0, 12, 16) == (2 + 2) + (1 + 2)
    coordinator.allocate_new_computed_blocks("a", hits, 8, 4)
    coordinator.allocate_new_blocks("a", 16, 16)
    tables = [ids(blocks) for blocks in coordinator.get_blocks("a")]
    assert tables == [[2, 3, 4, 6], [0, 1, 5, 7]]
    assert pool.blocks[1].block_hash is not None


def test_common_blocks_by_group(stage):
    coordinator, _ = make(stage, [full(stage), sliding(stage, 6), mamba(stage)])
    coordinator.allocate_new_blocks("a", 12, 12)
    assert coordinator.get_num_common_prefix_blocks("a") == [3, 0, 0]


def test_a_step_has_to_pass_before_states_are_read(stage):
    coordinator, pool = make(stage, [full(stage), mamba(stage)])
    a, b = request(stage, "a", 9), request(stage, "b", 9)
    coordinator.allocate_new_blocks("a", 9, 9)
    coordinator.cache_blocks(a, 9)
    hits, _ = coordinator.find_longest_cache_hit(b.block_hashes, 8)
    assert coordinator.get_num_blocks_to_allocate("b", 9, hits, 0, 8, 9) > len(pool.blocks)
    coordinator.new_step_starts()
    assert coordinator.get_num_blocks_to_allocate("b", 9, hits, 0, 8, 9) == 2


def test_only_full_attention_collects_ids(stage):
    """Full attention and nothing that is like it: 3 blocks, then 1."""
    specs = [full(stage), sliding(stage, 6), stage.MLAAttentionSpec(block_size=4, **KV)]
    coordinator, _ = make(stage, specs, collect_new_block_ids=True)
    coordinator.allocate_new_blocks("a", 9, 9)
    coordinator.allocate_new_blocks("a", 13, 13)
    assert coordinator.take_new_block_ids() == [1, 2, 3, 10]
    assert coordinator.take_new_block_ids() == []
    coordinator, _ = make(stage, specs)
    coordinator.allocate_new_blocks("a", 9, 9)
    assert coordinator.take_new_block_ids() == []


def test_what_is_predicted_is_what_is_taken(stage):
    """Requests that come with hits, with tokens from outside, run, and go, in all kinds at once."""
    draw = random.Random(8)
    specs = [full(stage), sliding(stage, 6), sliding(stage, 13), mamba(stage), chunked(stage, 8)]
    coordinator, pool = make(stage, specs, num_blocks=120)
    running, num_hits = {}, 0
    for number in range(400):
        coordinator.new_step_starts()
        if len(running) < 4:
            name, num_tokens = f"r{number}", draw.randint(2, 60)
            prompt = request(stage, name, num_tokens)
            hits, local = coordinator.find_longest_cache_hit(prompt.block_hashes, num_tokens - 1)
            external = draw.choice([0, 0, 0, min(8, num_tokens - 1 - local)])
        else:
            name = draw.choice(list(running))
            prompt, local = running[name]
            hits, external = (), 0
            if local >= prompt.num_tokens:
                coordinator.free(name)
                del running[name]
                continue
        computed = local + external
        total = min(computed + draw.randint(1, 12), prompt.num_tokens)
        coordinator.remove_skipped_blocks(name, computed)
        need = coordinator.get_num_blocks_to_allocate(name, total, hits, 0, computed, total)
        before = pool.num_free_blocks
        if need > before:
            assert need > len(pool.blocks) or running
            for other in list(running):
                coordinator.free(other)
            running.clear()
            continue
        num_hits += any(any(not block.is_null for block in blocks) for blocks in hits)
        if external or any(hits):
            coordinator.allocate_new_computed_blocks(name, hits, local, external)
        coordinator.allocate_new_blocks(name, total, total)
        assert before - pool.num_free_blocks == need
        coordinator.cache_blocks(prompt, total)
        running[name] = (prompt, total)
    assert num_hits > 20
