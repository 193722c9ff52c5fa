"""The debug check of a step: every token lies in a block of the pool."""

import pytest
import torch

from pagedattn.course.witness import DEVICE


def check(stage, rows, seq_lens, num_blocks=10, block_size=4):
    stage.check_block_table(
        torch.tensor(rows, dtype=torch.int32, device=DEVICE),
        torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        num_blocks,
        block_size,
    )


def test_good_tables_pass(stage):
    check(stage, [[5, 2, 9], [1, 0, 0], [0, 0, 0]], [12, 4, 0])


def test_columns_behind_the_last_block_may_hold_anything(stage):
    check(stage, [[5, 2, 99], [1, -1, -1]], [8, 1])


@pytest.mark.parametrize("block_id", [10, -1, 2**31 - 1])
def test_a_block_outside_the_pool(stage, block_id):
    rows = [[5, 2, 9], [1, 3, 4], [6, block_id, 8]]
    message = f"row 2, column 1: block_table has block {block_id}; the pool has blocks 0 to 9"
    with pytest.raises(ValueError, match=message):
        check(stage, rows, [12, 4, 5])


@pytest.mark.parametrize("seq_len", [13, -1])
def test_a_sequence_that_does_not_fit(stage, seq_len):
    message = f"row 1: seq_lens is {seq_len}, which must lie between 0 and the 12 slots of 3"
    with pytest.raises(ValueError, match=message):
        check(stage, [[5, 2, 9], [1, 3, 4]], [12, seq_len])


def test_another_number_of_rows(stage):
    with pytest.raises(ValueError, match=r"seq_lens has shape \[1\]; it must be \[2\]"):
        check(stage, [[5], [2]], [1])
