"""The block tables of all groups: one change for all, and how wide a row is."""

import pytest
import torch

from pagedattn.course.witness import DEVICE


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def int64(numbers):
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def make_groups(stage, block_sizes=(4, 8), kernel_block_sizes=(4, 2), **more):
    return stage.MultiGroupBlockTable(
        3, 24, 8, block_sizes, kernel_block_sizes, device=DEVICE, **more
    )


def state(table):
    """Everything that a change could touch."""
    return (
        table.table.tolist(),
        list(table.num_blocks),
        table.device_table.tolist(),
        table.slot_mapping.tolist(),
    )


def test_groups_have_rows_of_their_own(stage):
    groups = make_groups(stage)
    assert len(groups) == 2
    groups.append_row(([5, 2], [7]), 1)
    groups.append_row(([9], []), 1)
    assert groups[0].table.tolist()[1][:4] == [5, 2, 9, 0]
    assert groups[1].table.tolist()[1][:5] == [28, 29, 30, 31, 0]
    assert [list(table.num_blocks) for table in groups.block_tables] == [[0, 3, 0], [0, 4, 0]]
    groups.move_row(1, 0)
    groups.add_row(([1], [1]), 1)
    groups.swap_row(1, 2)
    groups.clear_row(0)
    groups.commit_block_table(3)
    for table, first in zip(groups.block_tables, ([1, 0], [4, 5]), strict=True):
        assert table.table.tolist() == table.device_table.tolist()
        assert [row[:2] for row in table.table.tolist()] == [[0, 0], [0, 0], first]
    groups.clear()
    assert not any(bool(table.device_table.any()) for table in groups.block_tables)
    assert not any(bool(table.table.any()) for table in groups.block_tables)


def test_each_group_has_slots_of_its_own(stage):
    groups = make_groups(stage)
    groups.add_row(([5, 2], [7]), 0)
    groups.add_row(([3], [4]), 1)
    groups.commit_block_table(2)
    found = groups.compute_slot_mapping(2, int32([0, 2, 3]), int64([3, 4, 1]))
    assert [slots.tolist() for slots in found] == [
        [23, 8, 13, *[-1] * 5],
        [59, 60, 33, *[-1] * 5],
    ], "blocks of 4: 5 2 | 3; blocks of 8: 7 | 4"
    assert all(slots is groups[i].slot_mapping for i, slots in enumerate(found))


def test_groups_of_one_rank_among_two(stage):
    ranks = stage.ContextParallel(dcp_world_size=2, dcp_rank=1, interleave=2)
    groups = make_groups(stage, context_parallel=ranks)
    groups.add_row(([5], [7]), 0)
    groups.commit_block_table(1)
    found = groups.compute_slot_mapping(1, int32([0, 8]), int64(list(range(8))))
    assert [slots.tolist() for slots in found] == [
        [-1, -1, 20, 21, -1, -1, 22, 23],
        [-1, -1, 56, 57, -1, -1, 58, 59],
    ]


@pytest.mark.parametrize(
    ("max_model_len", "block_size", "world_size", "width"),
    [
        (100, 16, 1, 8),  # 7, and 8 blocks are 128 slots
        (128, 16, 1, 8),
        (129, 16, 1, 16),
        (100, 16, 2, 8),  # 4
        (2048, 16, 4, 32),
        (300, 128, 1, 3),
        (300, 256, 1, 2),  # as many as are needed: a block is more than 128 slots
        (300, 256, 2, 1),
        (100, 1, 1, 128),
        (100, 48, 1, 4),  # 3, and 128 // 48 is 2
    ],
)
def test_the_width_of_a_row(stage, max_model_len, block_size, world_size, width):
    ranks = stage.ContextParallel(dcp_world_size=world_size)
    groups = stage.MultiGroupBlockTable(
        2, max_model_len, 8, [block_size], device=DEVICE, context_parallel=ranks
    )
    assert groups[0].table.shape == (2, width)


def test_the_width_in_kernel_blocks(stage):
    groups = stage.MultiGroupBlockTable(2, 100, 8, [16, 64], [4, 64], device=DEVICE)
    assert [tuple(table.table.shape) for table in groups.block_tables] == [(2, 32), (2, 2)]


def test_a_width_that_is_given_stays(stage):
    groups = make_groups(stage, max_num_blocks=[3, 5])
    assert [tuple(table.table.shape) for table in groups.block_tables] == [(3, 3), (3, 20)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_block_sizes": [4]}, "kernel_block_sizes has 1 entries for 2 groups"),
        ({"kernel_block_sizes": [4, 2, 2]}, "kernel_block_sizes has 3 entries for 2 groups"),
        ({"max_num_blocks": [3]}, "max_num_blocks has 1 entries for 2 groups"),
        ({"kernel_block_sizes": [4, 3]}, "kernel_block_size 3 does not divide block_size 8"),
    ],
)
def test_groups_that_cannot_be(stage, options, message):
    with pytest.raises(ValueError, match=message):
        make_groups(stage, **options)


@pytest.mark.parametrize("verb", ["append_row", "add_row"])
@pytest.mark.parametrize(
    ("block_ids", "message"),
    [
        (([1],), "block_ids has 1 entries for 2 groups"),
        (([1], [2], [3]), "block_ids has 3 entries for 2 groups"),
        (([1], [2, 3, 4, 5]), "row 1 would have"),  # fits into the first group
        (([1], [-2]), "block -2"),
    ],
)
def test_a_change_happens_in_all_groups_or_none(stage, verb, block_ids, message):
    groups = make_groups(stage, max_num_blocks=[3, 3])
    groups.add_row(([8], [9]), 1)
    before = [state(table) for table in groups.block_tables]
    with pytest.raises(ValueError, match=message):
        getattr(groups, verb)(block_ids, 1)
    assert [state(table) for table in groups.block_tables] == before


@pytest.mark.parametrize(
    ("verb", "rows"), [("clear_row", [3]), ("move_row", [1, 3]), ("swap_row", [1, 3])]
)
def test_a_row_that_is_not_there(stage, verb, rows):
    groups = make_groups(stage)
    groups.add_row(([8], [9]), 1)
    before = [state(table) for table in groups.block_tables]
    with pytest.raises(ValueError, match="row 3"):
        getattr(groups, verb)(*rows)
    assert [state(table) for table in groups.block_tables] == before
