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


@pytest.mark.parametrize("seq_len", [13, -1, 2**31 - 1])
def test_a_sequence_that_does_not_fit(stage, seq_len):
    message = f"row 1: seq_lens is {seq_len}, which must lie between 0 and the 12 slots of 3"
    with pytest.raises(ValueError, match=message):
        check(stage, [[5, 2, 9], [1, 3, 4]], [12, seq_len])


def test_lengths_of_any_integer(stage):
    """The longest that 32 bits hold, and one that only 64 bits do."""
    table = torch.tensor([[5, 2]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([2**40], device=DEVICE)
    with pytest.raises(ValueError, match=f"row 0: seq_lens is {2**40}, which must lie between 0"):
        stage.check_block_table(table, lengths, 10, 4)


TABLE = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
REFUSED = [
    ({"block_table": TABLE[0]}, r"block_table has shape \[2\]"),
    ({"block_table": TABLE.float()}, "block_table is torch.float32; it must be torch.int32"),
    ({"seq_lens": TABLE[0, :1].float()}, "seq_lens is torch.float32; it must be torch.int32"),
    ({"seq_lens": TABLE[0, :1].to("meta")}, "seq_lens is on meta, block_table on"),
    ({"block_size": 0}, "block_size must be at least 1, got 0"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[words for _, words in REFUSED])
def test_refusals(stage, change, message):
    good = {"block_table": TABLE, "seq_lens": TABLE[0, :1], "num_blocks": 10, "block_size": 4}
    with pytest.raises(ValueError, match=message):
        stage.check_block_table(**good | change)


def test_another_number_of_rows(stage):
    with pytest.raises(ValueError, match=r"seq_lens has shape \[1\]; it must be \[2\]"):
        check(stage, [[5], [2]], [1])
