"""A hit that all groups can serve, against every length tried by hand, for every set of blocks that
can be in the cache.

A group can go on from a length if it has all blocks that the tokens behind it look at. Which these
are is written out below for each kind, as its attention says it. Blocks have 4 tokens.
"""

from itertools import product

import pytest
import torch

from pagedattn.prefix import BlockHasher

BLOCK = 4
SIZES = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
HASHER = BlockHasher(BLOCK, seed="tests")


def spec_of(stage, kind, n):
    if kind == "full":
        return stage.FullAttentionSpec(**SIZES)
    if kind == "window":
        return stage.SlidingWindowSpec(**SIZES, sliding_window=n)
    if kind == "chunk":
        return stage.ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=n)
    return stage.MambaSpec(
        block_size=BLOCK, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="all"
    )


def seen_from(kind, n, length):
    """The blocks that the token behind so many tokens needs, and those after it."""
    first_token = {
        "full": 0,
        "window": max(length - n + 1, 0),
        "chunk": length // n * n if n else 0,
        "state": max(length - 1, 0),
    }[kind]
    return range(first_token // BLOCK, length // BLOCK)


def longest(kinds, cached, num_blocks):
    """The longest length that all groups can go on from, in tokens: the longest first."""
    for length in range(num_blocks * BLOCK, 0, -BLOCK):
        if all(
            cached[group] >= set(seen_from(kind, n, length))
            for group, (kind, n) in enumerate(kinds)
        ):
            return length
    return 0


def manager_with(stage, kinds, cached, num_blocks):
    """A manager, a prompt of so many blocks and a token more, and of it ``cached[group]``."""
    groups = tuple(
        stage.KVCacheGroupSpec((f"layer {i}",), spec_of(stage, *kind))
        for i, kind in enumerate(kinds)
    )
    config = stage.KVCacheConfig(40, (), groups)
    manager = stage.KVCacheManager(config, stage.Limits(max_model_len=64))
    prompt = stage.Request("old", range(num_blocks * BLOCK + 1), HASHER)
    assert manager.allocate_slots(prompt, prompt.num_tokens) is not None
    tables = manager.get_block_ids("old")
    manager.free(prompt)
    manager.new_step_starts()
    manager.evict_blocks(
        [
            tables[group][i]
            for group, blocks in enumerate(cached)
            for i in range(num_blocks)
            if i not in blocks
        ]
    )
    return manager, stage.Request("new", range(num_blocks * BLOCK + 1), HASHER), tables


def all_subsets(num_groups, num_blocks):
    subsets = [
        {i for i in range(num_blocks) if bits[i]} for bits in product((0, 1), repeat=num_blocks)
    ]
    return product(subsets, repeat=num_groups)


def one_pass(manager, request):
    """What each group in turn finds up to the length so far: the length in the end."""
    length = request.num_tokens - 1
    for group in manager.coordinator.single_type_managers:
        (blocks,) = group.find_longest_cache_hit(
            request.block_hashes, length, (group.group_id,), manager.pool, group.spec,
            drop_eagle_block=False, alignment_tokens=BLOCK,
        )  # fmt: skip
        length = min(length, len(blocks) * BLOCK)
    return length


FULL, SHORT, SHORTER, LONG = ("full", 0), ("window", 5), ("window", 3), ("window", 9)


def test_the_smallest_hit_that_one_pass_gets_wrong(stage):
    """vllm-project/vllm#31707. Of all sets of two blocks in three groups this is the only one."""
    wrong = []
    for cached in all_subsets(3, 2):
        manager, request, _ = manager_with(stage, [FULL, SHORT, SHORTER], cached, 2)
        _, num_hits = manager.get_computed_blocks(request)
        if (length := one_pass(manager, request)) != num_hits:
            wrong.append((cached, length, num_hits))
    assert wrong == [(({0, 1}, {1}, {0}), 4, 0)]


@pytest.mark.parametrize(
    "kinds",
    [
        (FULL, SHORT),
        (SHORT, FULL),
        (SHORT, SHORTER),
        (FULL, SHORT, SHORTER),
        (LONG, FULL, SHORT),
        (FULL, ("chunk", 8), SHORT),
        (("chunk", 4), ("chunk", 8), LONG),
        (FULL, ("state", 0), SHORT),
        (("state", 0), LONG, FULL),
    ],
    ids=lambda kinds: "-".join(f"{kind}{n or ''}" for kind, n in kinds),
)
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_the_longest_hit_of_all_groups(stage, kinds, num_blocks):
    for cached in all_subsets(len(kinds), num_blocks):
        manager, request, tables = manager_with(stage, kinds, cached, num_blocks)
        hits, num_hits = manager.get_computed_blocks(request)
        what = f"{kinds} with {cached} in the cache"
        assert num_hits == longest(kinds, cached, num_blocks), what
        for (kind, n), table, ids in zip(kinds, tables, hits.get_block_ids(), strict=True):
            assert len(ids) == num_hits // BLOCK, f"{what}: a list of {len(ids)} blocks"
            for i in seen_from(kind, n, num_hits):
                assert ids[i] == table[i], f"{what}: block {i} of {kind} is not the one found"
