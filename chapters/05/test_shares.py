"""Even shares: all keys of all decode rows, cut into as many equal parts as there are programs."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedattn.course.witness import DEVICE
from pagedattn.kernels.shares import SHARE_KEYS


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def shares_of(stage, seq_lens, num_programs, query_lens=None, *, window=None, max_rows=None):
    """The items, and which are each program's. Buffers hold rubbish before."""
    query_lens = query_lens or [1] * len(seq_lens)
    rows = max_rows or len(seq_lens)
    plan = stage.new_plan(
        rows, max(1, sum(query_lens)), 2, 1, 8, dtype=torch.float32, window=window, device=DEVICE
    )
    room = rows + num_programs
    plan = replace(plan, decode_items=int32([[-7] * 8] * room))
    plan.arrivals.fill_(3)
    share_start = int32([-7] * (num_programs + 1))
    starts = int32([sum(query_lens[:row]) for row in range(len(query_lens) + 1)])
    stage.shares.cut_shares(plan, int32(seq_lens), starts, share_start)
    assert not plan.arrivals.any(), "no split has arrived yet"
    count = int(plan.num_items[0])
    assert count <= room, f"{count} items; there is room for {room}"
    return plan.decode_items[:count].tolist(), share_start.tolist()


def tiles_of(item):
    return max(1, -(-(item[5] - item[4]) // SHARE_KEYS))


def test_three_rows_and_four_programs(stage):
    """300, 128 and 1000 keys are 3, 1 and 8 tiles of 128: 12, so 3 a program. The cut at tile 3 is
    between two rows; those at 6 and 9 are in the third row, after 2 and 5 of its tiles."""
    items, share_start = shares_of(stage, [300, 128, 1000], 4)
    assert [(item[0], *item[4:]) for item in items] == [
        (0, 0, 300, 1, 0),
        (1, 0, 128, 1, 1),
        (2, 0, 256, 3, 2),
        (2, 256, 640, 3, 2),
        (2, 640, 1000, 3, 2),
    ]  # fmt: skip
    assert share_start == [0, 1, 3, 4, 5], "row 0 | row 1, begin of row 2 | ... | ..."


def test_fewer_tiles_than_programs(stage):
    """Every tile is a share; the other programs have nothing."""
    items, share_start = shares_of(stage, [129, 5], 6)
    assert [item[4:6] for item in items] == [[0, 128], [128, 129], [0, 5]]
    assert share_start == [0, 1, 2, 3, 3, 3, 3]


def test_nothing_to_decode(stage):
    """A padding row, and a prefill row: more queries than a decode tile has."""
    assert shares_of(stage, [0, 100], 3, [0, 40]) == ([], [0, 0, 0, 0])


def test_a_row_without_keys_has_an_item(stage):
    """Somebody must write the zeros of its output."""
    items, share_start = shares_of(stage, [0], 2)
    assert items == [[0, 0, 1, -1, 0, 0, 1, 0]]
    assert share_start == [0, 1, 1]


def test_a_window_cuts_off_whole_tiles(stage):
    """Position 999 sees 700 to 999: the first tile with such a key begins at 640, so there are 3.
    Its keys before 700 are not read, for their blocks may have been given away."""
    items, share_start = shares_of(stage, [1000], 3, window=300)
    assert [item[4:6] for item in items] == [[700, 768], [768, 896], [896, 1000]]
    assert share_start == [0, 1, 2, 3]


lengths = st.lists(st.integers(0, 2000), min_size=1, max_size=12)


@settings(max_examples=30, deadline=None)
@given(lengths, st.integers(1, 9), st.integers(0, 3), st.data())
@example([2000] * 12, 9, 0, None)
def test_every_key_once_and_no_share_longer_than_another(stage, seq_lens, programs, padding, data):
    query_lens = [1] * len(seq_lens)
    if data is not None:
        query_lens = [data.draw(st.integers(0, 10), label="queries") for _ in seq_lens]
    rows = len(seq_lens) + padding
    items, share_start = shares_of(stage, seq_lens, programs, query_lens, max_rows=rows)
    for row, (seq_len, queries) in enumerate(zip(seq_lens, query_lens, strict=True)):
        mine = [item for item in items if item[0] == row]
        if not 0 < queries <= 8:  # a decode tile has 16 rows, of 2 heads each
            assert not mine, f"row {row} does not decode"
            continue
        numbers = [number for number, item in enumerate(items) if item[0] == row]
        first = numbers[0]
        assert numbers == list(range(first, first + len(mine))), "splits of a row stand together"
        assert all(item[6:] == [len(mine), first] for item in mine)
        edges = [mine[0][4], *(item[5] for item in mine)]
        assert edges[0] == 0 and edges[-1] == seq_len
        assert [item[4] for item in mine] == edges[:-1], "each begins where the last one ended"
        token = sum(query_lens[:row])
        assert all(item[1:4] == [token, queries, seq_len - queries] for item in mine)
    assert share_start == sorted(share_start)
    assert share_start[0] == 0 and share_start[-1] == len(items)
    shares = [
        sum(tiles_of(item) for item in items[begin:end]) for begin, end in pairwise(share_start)
    ]
    busy = [share for share in shares if share] or [0]
    assert max(busy) - min(busy) <= 1, f"tiles of each program: {shares}"
    assert len(busy) == max(1, min(programs, sum(shares))), "a program without work"


@pytest.mark.parametrize("programs", [1, 7])
def test_many_rows(stage, programs):
    """More than are looked at together on a small block of rows: the sums carry over."""
    seq_lens = [(37 * row) % 400 + 1 for row in range(70)]
    items, share_start = shares_of(stage, seq_lens, programs, max_rows=70)
    assert sum(tiles_of(item) for item in items) == sum(-(-n // SHARE_KEYS) for n in seq_lens)
    assert share_start[-1] == len(items)
