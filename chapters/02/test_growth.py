"""Sequences that grow and end: how many blocks they have, and how much of them is wasted."""

import pytest
import torch

from pagedattn.cache import Config
from pagedattn.course.witness import DEVICE

fresh_tokens = iter(range(10**9))  # no two sequences have a token in common


def make_config(num_blocks=9, block_size=4, **options):
    defaults = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "max_seq_len": 64}
    defaults |= {"dtype": torch.float64, "device": DEVICE, "poison": True}
    return Config(num_blocks=num_blocks, block_size=block_size, **defaults | options)


def tokens(n):
    return [next(fresh_tokens) for _ in range(n)]


def compute(cache, num_new_tokens):
    """Reserve, attend with random numbers, commit."""
    batch, config = cache.reserve(num_new_tokens), cache.config
    shape = (3, len(batch.token_ids), config.num_kv_heads, config.head_dim)
    for layer in range(config.num_layers):
        q, k, v = torch.randn(shape, dtype=config.dtype, device=DEVICE).unbind()
        batch.attend(layer, q, k, v)
    batch.commit()


def start(cache, **lengths):
    """Begin sequences of so many tokens and compute all of them."""
    for seq_id, length in lengths.items():
        cache.add(seq_id, tokens(length))
    compute(cache, lengths)


def decode(cache, seq_id, n=1):
    """Append and compute n tokens, one at a time."""
    for _ in range(n):
        cache.append(seq_id, tokens(1))
        compute(cache, {seq_id: 1})


def queue(cache):
    return [block.block_id for block in cache.pool.free_queue]


@pytest.mark.contract
def test_blocks_by_length(stage):
    """The rule of lengths: a token that was sampled but not computed yet takes no slot."""
    cache = stage.build_cache(make_config())
    start(cache, A=3)
    for length, blocks in {3: 1, 4: 1, 5: 2, 6: 2, 7: 2, 8: 2, 9: 3}.items():
        if length > 3:
            cache.append("A", tokens(1))
            before = len(cache.block_ids("A"))
            assert before == -(-(length - 1) // 4), f"`append` takes no block: {cache!r}"
            compute(cache, {"A": 1})
        assert len(cache.block_ids("A")) == blocks, (
            f"{length} computed tokens need {blocks} blocks of 4: {cache!r}"
        )
        cache.check_invariants()


@pytest.mark.contract
def test_a_prompt_of_exactly_one_block(stage):
    cache = stage.build_cache(make_config())
    start(cache, A=4)
    assert len(cache.block_ids("A")) == 1, f"4 tokens fill one block of 4: {cache!r}"
    decode(cache, "A")
    assert len(cache.block_ids("A")) == 2, f"the fifth token opens the second block: {cache!r}"


@pytest.mark.contract
def test_usage_by_hand(stage):
    cache = stage.build_cache(make_config(num_blocks=101, block_size=16, max_seq_len=1400))
    start(cache, A=1331, B=16, C=1)
    usage = cache.usage()
    assert usage.used == 1331 + 16 + 1
    assert usage.reserved == 84 * 16 + 16 + 16, "84 blocks (1344 slots), 1 block, 1 block"
    assert usage.wasted == 13 + 0 + 15, "13 slots of A's last block, none of B's, 15 of C's"
    assert (usage.total, usage.free) == (1600, 1600 - 86 * 16)


@pytest.mark.contract
def test_slots_of_an_open_batch_are_reserved_but_not_used(stage):
    cache = stage.build_cache(make_config())
    start(cache, A=3)
    cache.append("A", tokens(2))
    batch = cache.reserve({"A": 2})
    assert (cache.usage().used, cache.usage().reserved) == (3, 8), repr(cache)
    batch.abort()
    assert (cache.usage().used, cache.usage().reserved) == (3, 4), repr(cache)


@pytest.mark.contract
def test_abort_keeps_what_was_computed_before(stage):
    cache = stage.build_cache(make_config())
    start(cache, A=6)
    blocks = cache.block_ids("A")
    cache.append("A", tokens(5))
    cache.reserve({"A": 5}).abort()
    assert cache.block_ids("A") == blocks, f"6 tokens were computed and need 2 blocks: {cache!r}"
    assert cache.num_computed_tokens("A") == 6
    cache.check_invariants()


def test_free_gives_back_the_last_block_first(stage):
    cache = stage.build_cache(make_config())
    start(cache, A=9, B=4)
    cache.free("A")
    assert queue(cache) == [5, 6, 7, 8, 3, 2, 1], (
        f"A had blocks 1 2 3; its last block is the first to be used again: {cache!r}"
    )


@pytest.mark.contract
def test_every_block_comes_back(stage):
    cache = stage.build_cache(make_config())
    for round_ in range(10):
        start(cache, A=9, B=5, C=1)
        decode(cache, "B", n=4)
        for seq_id in "BAC" if round_ % 2 else "CAB":
            cache.free(seq_id)
        assert cache.pool.num_free_blocks == 8, f"round {round_} lost blocks: {cache!r}"
        cache.check_invariants()


def test_rows_close_up_when_a_sequence_leaves(stage):
    cache = stage.build_cache(make_config(num_blocks=20, max_seq_len=24))
    start(cache, A=18, B=7)
    assert cache.block_table.table[:2].tolist() == [[1, 2, 3, 4, 5, 0], [6, 7, 0, 0, 0, 0]]
    cache.free("A")
    assert cache.block_table.table[:2].tolist() == [[6, 7, 0, 0, 0, 0], [0] * 6], (
        "B has moved to row 0; 3, 4 and 5 were A's and must not stand behind B's blocks"
    )
    decode(cache, "B", n=2)
    assert cache.block_table.table[0].tolist() == [6, 7, 8, 0, 0, 0], repr(cache)
    cache.check_invariants()
