"""The block table of a group: rows, their copy on the device, and the slots of a step."""

import pytest
import torch

from pagedattn.course.witness import DEVICE


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def int64(numbers):
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def make_table(stage, block_size=4, kernel_block_size=None, *, seqs=3, blocks=3, tokens=8, **more):
    return stage.BlockTable(
        seqs, blocks, block_size, tokens, kernel_block_size=kernel_block_size, device=DEVICE, **more
    )


def state(table):
    """Everything that a change could touch."""
    return (
        table.table.tolist(),
        list(table.num_blocks),
        table.device_table.tolist(),
        table.slot_mapping.tolist(),
    )


# One table.


def test_a_new_table_is_empty(stage):
    table = make_table(stage)
    assert state(table) == ([[0] * 3] * 3, [0] * 3, [[0] * 3] * 3, [-1] * 8)
    assert table.table.dtype == table.device_table.dtype == torch.int32
    assert table.slot_mapping.dtype == torch.int64
    assert table.device_table.device.type == table.slot_mapping.device.type == DEVICE


def test_rows_without_kernel_blocks(stage):
    table = make_table(stage)
    table.append_row([5, 2], 1)
    table.append_row([], 1)
    table.append_row([7], 1)
    table.append_row([9], 2)
    assert table.table.tolist() == [[0, 0, 0], [5, 2, 7], [9, 0, 0]]
    assert list(table.num_blocks) == [0, 3, 1]
    table.add_row([8], 1)
    assert table.table.tolist()[1] == [8, 0, 0], "2 and 7 belong to the row's former owner"
    table.swap_row(1, 2)
    table.move_row(2, 0)
    assert table.table.tolist() == [[8, 0, 0], [9, 0, 0], [8, 0, 0]]
    table.clear_row(2)
    assert table.table.tolist() == [[8, 0, 0], [9, 0, 0], [0, 0, 0]]
    assert list(table.num_blocks) == [1, 1, 0]


def test_rows_in_kernel_blocks(stage):
    """Blocks of 12 tokens for a kernel that takes 4: three for each, and counted as three."""
    table = make_table(stage, 12, 4)
    assert table.table.shape == table.device_table.shape == (3, 9)
    table.append_row([5], 0)
    assert list(table.num_blocks) == [3, 0, 0]
    table.append_row([2], 0)
    assert table.table.tolist()[0] == [15, 16, 17, 6, 7, 8, 0, 0, 0]
    table.add_row([1], 0)
    assert table.table.tolist()[0] == [3, 4, 5, 0, 0, 0, 0, 0, 0]
    assert list(table.num_blocks) == [3, 0, 0]
    table.move_row(0, 2)
    table.append_row([2], 2)
    assert table.table.tolist()[2] == [3, 4, 5, 6, 7, 8, 0, 0, 0]


def test_commit_copies_the_first_rows(stage):
    table = make_table(stage)
    for row, block_ids in enumerate([[5, 2], [7], [9, 3, 1]]):
        table.add_row(block_ids, row)
    table.commit_block_table(2)
    assert table.device_table.tolist() == [[5, 2, 0], [7, 0, 0], [0, 0, 0]]
    table.append_row([4], 0)
    assert table.device_table.tolist()[0] == [5, 2, 0], "the device has what was committed"
    table.commit_block_table(0)
    assert table.device_table.tolist()[0] == [5, 2, 0]
    table.commit_block_table(3)
    assert table.device_table.tolist() == [[5, 2, 4], [7, 0, 0], [9, 3, 1]]


def test_clear_empties_both_copies(stage):
    table = make_table(stage, 4, 2)
    table.add_row([5, 2], 0)
    table.commit_block_table(1)
    table.clear()
    assert table.table.tolist() == table.device_table.tolist() == [[0] * 6] * 3
    assert list(table.num_blocks) == [0] * 3
    table.append_row([1], 0)
    assert table.table.tolist()[0] == [2, 3, 0, 0, 0, 0], "a cleared row begins anew"


# Refusals of one table.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.append_row([6, 7], 0), "row 0 would have 4 blocks; .* 3 a row"),
        (lambda t: t.add_row([6, 7, 8, 9], 0), "row 0 would have 4 blocks; .* 3 a row"),
        (lambda t: t.append_row([-1], 0), "block -1 for row 0; ids go from 0 to 1073741823"),
        (lambda t: t.append_row([2**30], 0), "block 1073741824 for row 0"),
        (lambda t: t.add_row([1, 2**30], 0), "block 1073741824 for row 0"),
        (lambda t: t.append_row([1], 3), "row 3; the table has rows 0 to 2"),
        (lambda t: t.append_row([], 3), "row 3"),
        (lambda t: t.append_row([1], -1), "row -1"),
        (lambda t: t.add_row([1], 3), "row 3"),
        (lambda t: t.clear_row(-1), "row -1"),
        (lambda t: t.move_row(0, 3), "row 3"),
        (lambda t: t.move_row(-1, 0), "row -1"),
        (lambda t: t.swap_row(0, 3), "row 3"),
        (lambda t: t.commit_block_table(4), "4 sequences; the table has 3 rows"),
        (lambda t: t.commit_block_table(-1), "-1 sequences"),
        (lambda t: t.compute_slot_mapping(4, int32([0] * 5), int64([1])), "4 sequences"),
        (lambda t: t.compute_slot_mapping(1, int32([0, 9]), int64([0] * 9)), "8 places for 9"),
        (lambda t: t.compute_slot_mapping(2, int32([0, 2]), int64([0, 1])), "2 sequences need 3"),
    ],
)
def test_a_refused_change_changes_nothing(stage, change, message):
    table = make_table(stage, 4, 2)
    table.add_row([5, 2], 0)
    table.add_row([3], 2)
    table.commit_block_table(3)
    table.compute_slot_mapping(1, int32([0, 2]), int64([0, 7]))
    before = state(table)
    with pytest.raises(ValueError, match=message):
        change(table)
    assert state(table) == before


def test_the_largest_kernel_block_fits_into_32_bits(stage):
    table = make_table(stage, 4, 2)
    table.append_row([2**30 - 1], 0)
    assert table.table.tolist()[0][:2] == [2**31 - 2, 2**31 - 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_block_size": 3}, "kernel_block_size 3 does not divide block_size 4"),
        ({"kernel_block_size": 8}, "kernel_block_size 8 does not divide block_size 4"),
        ({"kernel_block_size": 0}, "kernel_block_size must be at least 1, got 0"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"blocks": 0}, "max_blocks_per_seq must be at least 1, got 0"),
        ({"tokens": 0}, "max_num_batched_tokens must be at least 1, got 0"),
    ],
)
def test_tables_that_cannot_be(stage, options, message):
    with pytest.raises(ValueError, match=message):
        make_table(stage, **options)


def test_an_interleave_that_does_not_divide_the_block(stage):
    ranks = stage.ContextParallel(dcp_world_size=2, interleave=8)
    with pytest.raises(ValueError, match="interleave 8 does not divide block_size 4"):
        make_table(stage, 4, context_parallel=ranks)


# Slots of a step.


@pytest.mark.parametrize("kernel_block_size", [4, 2, 1])
def test_slots_by_hand_whatever_the_kernel_block(stage, kernel_block_size):
    table = make_table(stage, 4, kernel_block_size, tokens=13)
    table.add_row([5, 2, 7], 0)
    table.commit_block_table(1)
    found = table.compute_slot_mapping(1, int32([0, 10]), int64(list(range(10))))
    assert found is table.slot_mapping
    assert found.tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 28, 29, -1, -1, -1]


def test_slots_follow_the_committed_rows(stage):
    table = make_table(stage)
    table.add_row([5], 0)
    table.commit_block_table(1)
    table.add_row([6], 0)
    starts, positions = int32([0, 1]), int64([3])
    assert table.compute_slot_mapping(1, starts, positions).tolist() == [23, *[-1] * 7]
    table.commit_block_table(1)
    assert table.compute_slot_mapping(1, starts, positions).tolist() == [27, *[-1] * 7]


def test_a_smaller_step_leaves_nothing_of_a_larger_one(stage):
    """Buffers keep their size; behind the sequences of a step lies what an earlier one left."""
    table = make_table(stage)
    for row, block in enumerate([5, 3, 8]):
        table.add_row([block], row)
    table.commit_block_table(3)
    starts, positions = int32([0, 2, 3, 5]), int64([0, 1, 2, 0, 3])
    assert table.compute_slot_mapping(3, starts, positions).tolist() == [
        20, 21, 14, 32, 35, -1, -1, -1,
    ]  # fmt: skip
    starts[:3] = int32([0, 1, 2])
    found = table.compute_slot_mapping(2, starts, positions)
    assert found.tolist() == [20, 13, *[-1] * 6], "two sequences of one token"
    assert table.compute_slot_mapping(0, starts, positions).tolist() == [-1] * 8


@pytest.mark.parametrize("kernel_block_size", [8, 4, 2, 1])
@pytest.mark.parametrize("interleave", [1, 2, 8])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_store_each_token_once(stage, kernel_block_size, interleave, world_size):
    """Also where a turn is longer than a kernel block: the blocks of 8 that the manager gave are
    filled by 8 * world_size tokens, in order, on every rank."""
    num_tokens = 2 * 8 * world_size
    stored = []
    for rank in range(world_size):
        ranks = stage.ContextParallel(
            dcp_world_size=world_size, dcp_rank=rank, interleave=interleave
        )
        table = make_table(stage, 8, kernel_block_size, tokens=num_tokens, context_parallel=ranks)
        table.add_row([5, 2], 0)
        table.commit_block_table(1)
        positions = int64(list(range(num_tokens)))
        found = table.compute_slot_mapping(1, int32([0, num_tokens]), positions).tolist()
        own = [position for position, slot in enumerate(found) if slot >= 0]
        assert [found[position] for position in own] == [*range(40, 48), *range(16, 24)]
        stored += own
    assert sorted(stored) == list(range(num_tokens)), "each token on one rank"
