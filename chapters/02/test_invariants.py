"""The invariants: each of them breaks when the structure that it speaks of is spoiled by hand."""

import pytest
import torch

from pagedattn.cache import Config, InvariantError
from pagedattn.course.witness import DEVICE


@pytest.fixture
def healthy(stage):
    """[0:null 1:A 2:A 3:B 4:free … 8:free], A with 6 tokens, B with 4."""
    config = Config(
        num_layers=2,
        num_kv_heads=2,
        head_dim=4,
        num_blocks=9,
        block_size=4,
        max_seq_len=64,
        device=DEVICE,
        poison=True,
    )
    cache = stage.build_cache(config)
    cache.add("A", range(6))
    cache.add("B", range(6, 10))
    batch = cache.reserve({"A": 6, "B": 4})
    for layer in range(2):
        q, k, v = torch.randn(3, 10, 2, 4, device=DEVICE).unbind()
        batch.attend(layer, q, k, v)
    batch.commit()
    cache.check_invariants()
    return cache


def assert_breaks(cache, invariant):
    with pytest.raises(InvariantError) as failure:
        cache.check_invariants()
    message = str(failure.value)
    assert message.startswith(invariant), f"expected {invariant} to break, got: {message}"
    assert "0:null" in message, f"the message does not show the pool: {message}"


def test_i1_a_block_in_use_is_not_free(healthy):
    healthy.pool.free_queue.append(healthy.pool.blocks[2])
    assert_breaks(healthy, "I1")


def test_i1_a_block_is_free_once(healthy):
    healthy.pool.free_queue.append(healthy.pool.blocks[7])
    assert_breaks(healthy, "I1")


def test_i1_no_block_is_lost(healthy):
    healthy.pool.free_queue.pop()
    assert_breaks(healthy, "I1")


def test_i1_the_null_block_is_in_no_queue(healthy):
    healthy.pool.free_queue.append(healthy.pool.null_block)
    assert_breaks(healthy, "I1")


def test_i1_the_null_block_is_in_no_table(healthy):
    healthy.sequences["B"].blocks[0] = healthy.pool.null_block
    assert_breaks(healthy, "I1")


def test_i2_a_table_is_as_long_as_its_sequence(healthy):
    [block] = healthy.pool.get_new_blocks(1)
    healthy.sequences["A"].blocks.append(block)  # a third block for 6 tokens
    assert_breaks(healthy, "I2")


def test_i2_a_computed_token_has_a_block(healthy):
    healthy.sequences["A"].num_computed_tokens = 4  # its second block holds nothing
    assert_breaks(healthy, "I2")


def test_i2_a_row_names_the_blocks_of_its_sequence(healthy):
    healthy.block_table.table[0, 1] = 5
    assert_breaks(healthy, "I2")


def test_i2_nothing_stands_behind_a_row(healthy):
    healthy.block_table.table[1, 3] = 5
    assert_breaks(healthy, "I2")


def test_i3_a_block_stands_in_one_table(healthy):
    healthy.sequences["B"].blocks[0] = healthy.sequences["A"].blocks[0]
    assert_breaks(healthy, "I3")


def test_i3_a_block_is_not_shared(healthy):
    """ref_cnt counts right, but in this chapter no two tables name one block."""
    shared = healthy.sequences["A"].blocks[0]
    shared.ref_cnt = 2
    healthy.pool.free_blocks(healthy.sequences["B"].blocks)
    healthy.sequences["B"].blocks[0] = shared
    assert healthy.ref_cnts("A") == [2, 1]
    assert_breaks(healthy, "I3")


def test_i3_a_block_in_use_stands_in_a_table(healthy):
    healthy.pool.get_new_blocks(1)
    assert_breaks(healthy, "I3")


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_i7_a_computed_token_holds_numbers(healthy, name):
    getattr(healthy, name)[1, 2, 1, 0, 0] = float("nan")  # layer 1, A's last token
    assert_breaks(healthy, "I7")


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize(
    ("block", "offset"),
    [(0, 0), (2, 2), (5, 3)],
    ids=["of the null block", "behind the last token", "of a free block"],
)
def test_i7_every_other_slot_is_poisoned(healthy, name, block, offset):
    getattr(healthy, name)[0, block, offset] = 0.0
    assert_breaks(healthy, "I7")
