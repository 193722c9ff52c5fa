"""Rows of the block table: what stands in them, and what must not be left behind in them."""

import pytest


def rows(table, *names):
    return [table.table[name].tolist() for name in names]


@pytest.fixture
def table(stage):
    return stage.BlockTable(max_num_seqs=3, max_blocks_per_seq=5)


def test_a_new_table_points_at_the_null_block(table):
    assert rows(table, 0, 1, 2) == [[0] * 5] * 3
    assert list(table.num_blocks) == [0, 0, 0]


def test_append_puts_ids_behind_those_of_the_row(table):
    table.append_row([5, 2], 1)
    table.append_row([7], 1)
    assert rows(table, 0, 1, 2) == [[0] * 5, [5, 2, 7, 0, 0], [0] * 5]
    assert list(table.num_blocks) == [0, 3, 0], "row 1 has 3 blocks, the others none"


def test_append_of_nothing_changes_nothing(table):
    table.append_row([5, 2], 0)
    table.append_row([], 0)
    table.append_row([], 1)
    assert rows(table, 0, 1) == [[5, 2, 0, 0, 0], [0] * 5]
    assert list(table.num_blocks) == [2, 0, 0]


def test_a_row_can_be_full_but_not_fuller(table):
    table.append_row([1, 2, 3], 0)
    table.append_row([4, 5], 0)
    assert rows(table, 0) == [[1, 2, 3, 4, 5]], "5 blocks fit into 5 columns"
    with pytest.raises(ValueError):
        table.append_row([6], 0)
    assert rows(table, 0, 1) == [[1, 2, 3, 4, 5], [0] * 5], "the append failed: nothing changes"
    assert list(table.num_blocks) == [5, 0, 0]


def test_a_row_too_long_is_refused_before_anything_is_written(table):
    table.append_row([1, 2], 0)
    for verb in (table.append_row, table.add_row):
        with pytest.raises(ValueError):
            verb([3, 4, 5, 6, 7, 8], 0)
        assert rows(table, 0) == [[1, 2, 0, 0, 0]], f"{verb.__name__} failed: nothing changes"
        assert list(table.num_blocks) == [2, 0, 0]


def test_add_replaces_the_row(table):
    table.append_row([1, 2, 3, 4], 0)
    table.add_row([9], 0)
    assert rows(table, 0) == [[9, 0, 0, 0, 0]], "2, 3 and 4 belong to the row's former owner"
    assert list(table.num_blocks) == [1, 0, 0]


def test_a_moved_row_leaks_nothing(table):
    table.append_row([1, 2, 3, 4, 5], 0)  # A
    table.append_row([6, 7], 1)  # B
    table.move_row(1, 0)  # A has ended; B takes its row
    assert rows(table, 0) == [[6, 7, 0, 0, 0]], "3, 4 and 5 were A's: B would write into them"
    assert table.num_blocks[0] == 2
    table.append_row([8], 0)
    assert rows(table, 0) == [[6, 7, 8, 0, 0]]


def test_the_source_of_a_move_stays(table):
    table.append_row([6, 7], 1)
    table.move_row(1, 2)
    table.append_row([9], 2)
    assert rows(table, 1, 2) == [[6, 7, 0, 0, 0], [6, 7, 9, 0, 0]], "a move copies, once"
    assert list(table.num_blocks) == [0, 2, 3]


def test_swap_exchanges_rows(table):
    table.append_row([1, 2, 3], 0)
    table.append_row([4], 2)
    table.swap_row(0, 2)
    assert rows(table, 0, 1, 2) == [[4, 0, 0, 0, 0], [0] * 5, [1, 2, 3, 0, 0]]
    assert list(table.num_blocks) == [1, 0, 3]


def test_clear_empties_one_row(table):
    table.append_row([1, 2], 0)
    table.append_row([3, 4], 1)
    table.clear_row(0)
    assert rows(table, 0, 1) == [[0] * 5, [3, 4, 0, 0, 0]]
    assert list(table.num_blocks) == [0, 2, 0]
    table.append_row([9], 0)
    assert rows(table, 0) == [[9, 0, 0, 0, 0]], "a cleared row begins anew"


def test_gather_takes_rows_in_the_order_asked_for(table):
    for row, block_ids in enumerate([[1], [2, 3, 4], [5, 6]]):
        table.append_row(block_ids, row)
    assert table.gather([2, 0]).tolist() == [[5, 6], [1, 0]], "as wide as the longest of the two"
    assert table.gather([1, 2]).tolist() == [[2, 3, 4], [5, 6, 0]]


def test_what_is_gathered_does_not_change_later(table):
    table.append_row([1, 2], 0)
    gathered = table.gather([0])
    table.add_row([8, 9], 0)
    assert gathered.tolist() == [[1, 2]], "a batch keeps the block ids that it was built with"
