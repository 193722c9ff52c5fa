"""Reserve and abort: slots for the next tokens of a batch, for all of its sequences or for none.

No test of this file attends.
"""

import pytest
import torch

from pagedattn.cache import Config, OutOfBlocks
from pagedattn.course.witness import DEVICE

fresh_tokens = iter(range(10**9))  # no two sequences have a token in common


def make_config(num_blocks=9, block_size=4, **options):
    defaults = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "max_seq_len": 64}
    defaults |= {"dtype": torch.float64, "device": DEVICE, "poison": True}
    return Config(num_blocks=num_blocks, block_size=block_size, **defaults | options)


def tokens(n):
    return [next(fresh_tokens) for _ in range(n)]


def queue(cache):
    return [block.block_id for block in cache.pool.free_queue]


def state(cache):
    """Everything that a failed call must leave as it was."""
    seqs = {s: (cache.num_tokens(s), cache.num_computed_tokens(s)) for s in cache.seq_ids}
    blocks = {s: (cache.block_ids(s), cache.ref_cnts(s)) for s in cache.seq_ids}
    return repr(cache), queue(cache), cache.usage(), seqs, blocks, cache.block_table.table.tolist()


@pytest.mark.contract
@pytest.mark.parametrize("n", range(1, 10))
def test_reserve_takes_as_many_blocks_as_the_tokens_need(stage, n):
    cache = stage.build_cache(make_config())
    cache.add("A", tokens(9))
    assert cache.pool.num_free_blocks == 8, f"`add` alone takes no block: {cache!r}"
    cache.reserve({"A": n})
    expected = [1, 1, 1, 1, 2, 2, 2, 2, 3][n - 1]
    assert len(cache.block_ids("A")) == expected, (
        f"{n} tokens in blocks of 4 need {expected} blocks: {cache!r}"
    )
    assert cache.pool.num_free_blocks == 8 - expected, repr(cache)
    cache.check_invariants()


def test_blocks_are_taken_in_the_order_of_the_batch(stage):
    cache = stage.build_cache(make_config())
    cache.add("A", tokens(5))
    cache.add("B", tokens(6))
    batch = cache.reserve({"B": 6, "A": 5})
    assert repr(cache) == "[0:null 1:B 2:B 3:A 4:A 5:free 6:free 7:free 8:free]"
    assert batch.block_table.tolist() == [[1, 2], [3, 4]], repr(cache)
    expected = [4, 5, 6, 7, 8, 9, 12, 13, 14, 15, 16]
    assert batch.slot_mapping.tolist() == expected, f"B in blocks 1 2, A in blocks 3 4: {cache!r}"


def test_the_batch_is_padded_with_the_null_block(stage):
    cache = stage.build_cache(make_config())
    cache.add("A", tokens(9))
    cache.add("B", tokens(2))
    batch = cache.reserve({"A": 9, "B": 2})
    assert batch.block_table.tolist() == [[1, 2, 3], [4, 0, 0]], repr(cache)
    assert batch.block_table.dtype == torch.int32
    assert batch.seq_lens.tolist() == [9, 2], "the tokens about to be stored count"


@pytest.mark.contract
def test_reserve_is_all_or_nothing(stage):
    cache = stage.build_cache(make_config(num_blocks=6))  # 5 blocks of 4
    for seq_id, length in {"A": 4, "B": 8, "C": 9}.items():  # 1 + 2 + 3 blocks
        cache.add(seq_id, tokens(length))
    before = cache.usage(), cache.pool.num_free_blocks, repr(cache)
    with pytest.raises(OutOfBlocks) as failure:
        cache.reserve({"A": 4, "B": 8, "C": 9})
    assert (failure.value.needed, failure.value.free) == (6, 5), str(failure.value)
    assert [cache.block_ids(s) for s in "ABC"] == [[], [], []], (
        f"6 blocks do not fit into 5, so neither A nor B nor C may take any: {cache!r}"
    )
    assert (cache.usage(), cache.pool.num_free_blocks, repr(cache)) == before
    cache.check_invariants()
    cache.reserve({"A": 4, "B": 8})  # 3 blocks fit
    assert cache.pool.num_free_blocks == 2, repr(cache)


def test_a_failed_reserve_leaves_everything_as_it_was(stage):
    cache = stage.build_cache(make_config(num_blocks=6))
    for seq_id in "ABC":
        cache.add(seq_id, tokens(8))
    cache.reserve({"B": 8}).abort()
    cache.reserve({"A": 1, "C": 4}).abort()  # the queue is no longer in its first order
    before = state(cache)
    with pytest.raises(OutOfBlocks):
        cache.reserve({"A": 8, "B": 8, "C": 5})
    assert state(cache) == before


@pytest.mark.contract
def test_abort_gives_back_all_blocks_of_the_batch(stage):
    cache = stage.build_cache(make_config())
    cache.add("A", tokens(9))
    cache.add("B", tokens(4))
    batch = cache.reserve({"A": 9, "B": 4})
    assert cache.pool.num_free_blocks == 4, repr(cache)
    batch.abort()
    assert cache.pool.num_free_blocks == 8, f"3 blocks of A and 1 of B are lost: {cache!r}"
    assert (cache.block_ids("A"), cache.block_ids("B")) == ([], []), repr(cache)
    assert cache.usage().reserved == 0, repr(cache)
    cache.check_invariants()


def test_abort_gives_back_the_last_block_first(stage):
    cache = stage.build_cache(make_config())
    cache.add("A", tokens(9))
    cache.add("B", tokens(8))
    cache.reserve({"A": 9, "B": 8}).abort()  # A had blocks 1 2 3, B had 4 5
    assert queue(cache) == [6, 7, 8, 5, 4, 3, 2, 1], "the last block opened is freed first"


def test_aborted_rows_of_the_table_are_empty(stage):
    cache = stage.build_cache(make_config())
    cache.add("A", tokens(9))
    cache.reserve({"A": 9}).abort()
    cache.reserve({"A": 4})
    row = cache.block_table.table[0].tolist()
    assert row == [*cache.block_ids("A"), *[0] * 15], f"blocks of the aborted batch stand in {row}"


def test_what_an_aborted_batch_has_written_is_poisoned(stage):
    cache = stage.build_cache(make_config())
    cache.add("A", tokens(6))
    batch = cache.reserve({"A": 6})
    for k_cache, v_cache in zip(cache.k_cache, cache.v_cache, strict=True):
        k, v = torch.randn(2, 6, 2, 4, dtype=torch.float64, device=DEVICE).unbind()
        stage.write_kv(k_cache, v_cache, k, v, batch.slot_mapping)
    batch.abort()
    assert cache.k_cache.isnan().all(), "the batch was given up: nobody may read its keys"
    assert cache.v_cache.isnan().all(), "the batch was given up: nobody may read its values"


@pytest.mark.contract
def test_a_batch_can_be_aborted_again_and_again(stage):
    cache = stage.build_cache(make_config())
    cache.add("A", tokens(30))
    for _ in range(20):
        cache.reserve({"A": 30}).abort()
    assert cache.pool.num_free_blocks == 8, f"every abort lost blocks: {cache!r}"
    cache.free("A")
    assert cache.pool.num_free_blocks == 8, repr(cache)


@pytest.mark.contract
def test_a_sequence_larger_than_the_pool(stage):
    cache = stage.build_cache(make_config(num_blocks=4))  # 12 slots
    cache.add("A", tokens(13), max_tokens=13)
    with pytest.raises(OutOfBlocks) as failure:
        cache.reserve({"A": 13})
    assert (failure.value.needed, failure.value.free) == (4, 3), str(failure.value)
    cache.reserve({"A": 12})
    assert cache.pool.num_free_blocks == 0, f"12 tokens fit exactly: {cache!r}"


def test_need_says_what_reserve_takes(stage):
    cache = stage.build_cache(make_config())
    for n, blocks in {1: 1, 4: 1, 5: 2, 8: 2, 9: 3}.items():
        assert cache.need(tokens(9), n) == (0, blocks), f"{n} tokens in blocks of 4"
    assert cache.pool.num_free_blocks == 8, f"`need` only asks: {cache!r}"


@pytest.mark.contract
def test_a_need_that_cannot_be(stage):
    cache = stage.build_cache(make_config())
    with pytest.raises(ValueError, match="need of -1 tokens"):
        cache.need(tokens(9), -1)
