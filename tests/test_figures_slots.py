"""Pictures of slots: kernel blocks inside the manager's blocks, tokens over several ranks."""

from typing import Any

import pytest

from pagedattn import viz
from pagedattn.manager import BlockTable
from tests.pictures import rectangle, rectangles, words


def marked(figure: Any) -> set[str]:
    return {gid for gid in rectangles(figure) if gid.endswith("-marked")}


@pytest.fixture
def table() -> BlockTable:
    """Blocks 3 and 1 of 6 tokens, three kernel blocks of 2 in each: 9 10 11, 3 4 5."""
    table = BlockTable(2, 4, 6, 8, kernel_block_size=2)
    table.add_row([2], 0)
    table.add_row([3, 1], 1)
    return table


def test_kernel_blocks_lie_inside_the_blocks(table: BlockTable) -> None:
    figure = viz.draw_kernel_blocks(table, 1, 9)
    drawn = rectangles(figure)
    entries = [gid for gid in drawn if gid.startswith("entry-")]
    assert [gid.removesuffix("-marked").split("-")[-1] for gid in entries] == [
        "9", "10", "11", "3", "4", "5",
    ]  # fmt: skip
    for gid, block in ((f"entry-{i}-block-{9 + i}", "block-3") for i in range(3)):
        inner, outer = rectangle(figure, gid), rectangle(figure, block)
        assert inner.get_width() == pytest.approx(outer.get_width() / 3)
        start = outer.get_x() - 1e-9
        assert start <= inner.get_x() <= start + outer.get_width()
    pool = [gid for gid in drawn if gid.startswith("kernel-block-")]
    assert len(pool) == 3 * 5, "blocks 0 to 3, and one more"


def test_both_ways_to_count_end_at_one_slot(table: BlockTable) -> None:
    """Position 9 is the fourth token of block 1, the second of kernel block 4: slot 9 both times,
    and in row 0, position 5 is the last token of block 2."""
    figure = viz.draw_kernel_blocks(table, 1, 9)
    assert marked(figure) == {"entry-4-block-4-marked", "kernel-block-4-marked"}
    assert {"1 × 6 + 3 = 9", "4 × 2 + 1 = 9"} <= set(words(figure))
    figure = viz.draw_kernel_blocks(table, 0, 5)
    assert marked(figure) == {"entry-2-block-8-marked", "kernel-block-8-marked"}
    assert {"2 × 6 + 5 = 17", "8 × 2 + 1 = 17"} <= set(words(figure))


@pytest.mark.parametrize("position", [-1, 12])
def test_a_position_outside_the_row(table: BlockTable, position: int) -> None:
    with pytest.raises(ValueError, match=f"position {position}; row 1 has 2 blocks of 6"):
        viz.draw_kernel_blocks(table, 1, position)


def test_what_kernel_blocks_have_no_room_for(table: BlockTable) -> None:
    table.add_row([8], 0)
    with pytest.raises(ValueError, match="up to block 9 has 30 kernel blocks; at most 28"):
        viz.draw_kernel_blocks(table, 0, 0)


def test_two_ranks_keep_what_they_are_dealt() -> None:
    figure = viz.draw_rank_slots([5, 2], 4, 9, world_size=2, interleave=2)
    drawn = rectangles(figure)
    owners = [gid for gid in drawn if gid.startswith("position-")]
    assert owners == [f"position-{p}-rank-{r}" for p, r in enumerate([0, 0, 1, 1, 0, 0, 1, 1, 0])]
    for rank, slots in enumerate(
        ([20, 21, -1, -1, 22, 23, -1, -1, 8], [-1, -1, 20, 21, -1, -1, 22, 23, -1])
    ):
        for position, slot in enumerate(slots):
            assert f"rank-{rank}-position-{position}-slot-{slot}" in drawn
    stored = {gid for gid in drawn if gid.startswith(("rank-0-slot-", "rank-1-slot-"))}
    assert {gid for gid in stored if not gid.endswith("-free")} == {
        *(f"rank-0-slot-{s}-position-{p}" for s, p in ((20, 0), (21, 1), (22, 4), (23, 5), (8, 8))),
        *(f"rank-1-slot-{s}-position-{p}" for s, p in ((20, 2), (21, 3), (22, 6), (23, 7))),
    }
    assert len(stored) == 16, "two blocks of 4 on each rank"
    assert {"rank 0 keeps 5 of 9 tokens", "rank 1 keeps 4 of 9 tokens"} <= set(words(figure))


def test_a_ranks_slots_stand_below_their_positions() -> None:
    figure = viz.draw_rank_slots([1, 4], 2, 13, world_size=4)
    for rank, position, slot in ((0, 4, 3), (3, 3, 2), (2, 10, 8)):
        above = rectangle(figure, f"position-{position}-rank-{rank}")
        below = rectangle(figure, f"rank-{rank}-position-{position}-slot-{slot}")
        assert below.get_x() == pytest.approx(above.get_x())
        assert below.get_y() > above.get_y() + above.get_height()  # y grows downward
    assert "rank 0: 4 tokens" in words(figure) and "rank 1: 3 tokens" in words(figure)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 1}, "1 ranks; 2 to 4"),
        ({"world_size": 5}, "5 ranks; 2 to 4"),
        ({"num_tokens": 0}, "0 tokens; the table holds 16"),
        ({"num_tokens": 17}, "17 tokens; the table holds 16"),
        ({"block_size": 16}, "64 slots on all ranks; at most 32"),
        ({"interleave": 3}, "interleave 3 does not divide block_size 4"),
    ],
)
def test_ranks_that_cannot_be_drawn(changes: dict[str, int], message: str) -> None:
    good: dict[str, Any] = {"block_size": 4, "num_tokens": 9, "world_size": 2, "interleave": 2}
    with pytest.raises(ValueError, match=message):
        viz.draw_rank_slots([5, 2], **good | changes)
