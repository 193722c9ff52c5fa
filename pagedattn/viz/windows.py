"""A window that slides over the blocks of a sequence, moment by moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes

from pagedattn.cache import SeqId
from pagedattn.viz import shapes, style

if TYPE_CHECKING:
    from pagedattn.manager import HybridKVCache

LABEL = 1.5  # left of the blocks: what happened
FREE = 1.0  # right of them: how many blocks are free
BLOCK = 0.27  # a block's height
MAX_TABLE, MAX_MOMENTS = 8, 8
FULL, WINDOW = style.OWNER_COLOURS[0], style.OWNER_COLOURS[2]


@dataclass(frozen=True)
class Moment:
    """One sequence between two steps: the table of each group, and how many blocks are free."""

    caption: str
    num_tokens: int
    tables: tuple[tuple[int, ...], ...]
    num_free_blocks: int


class WindowRecording:
    """Moments of one sequence in a cache of two groups: one of full attention, one of a window.

    Raises ValueError for a cache with other groups.
    """

    def __init__(self, cache: HybridKVCache, seq_id: SeqId) -> None:
        self.windows = cache.windows
        if sorted(window is None for window in self.windows) != [False, True]:
            raise ValueError(f"one full group and one window are drawn, not {self.windows}")
        self.cache, self.seq_id = cache, seq_id
        self.moments: list[Moment] = []

    def snapshot(self, caption: str) -> None:
        """Keep what the sequence holds now."""
        cache, tables = self.cache, self.cache.block_ids(self.seq_id)
        self.moments.append(
            Moment(
                caption,
                cache.num_computed_tokens(self.seq_id),
                tuple(tuple(table) for table in tables),
                cache.manager.pool.num_free_blocks,
            )
        )

    @style.styled
    def draw(self, title: str | None = None) -> style.Picture:
        """A row a moment: the table of the window's group, its tokens, and the window of the next
        token; at the end the table of the full group. A block that was given back since the row
        before is named below its place, and one that was taken again is marked.

        Raises ValueError without a moment, for more than 8, and for tables of more than 8 blocks.
        """
        if not 1 <= len(self.moments) <= MAX_MOMENTS:
            raise ValueError(f"{len(self.moments)} moments; 1 to {MAX_MOMENTS} can be drawn")
        longest = max(len(moment.tables[0]) for moment in self.moments)
        if longest > MAX_TABLE:
            raise ValueError(f"tables of {longest} blocks; at most {MAX_TABLE} can be drawn")
        return _Drawing(self, longest).paint(title)


class _Drawing:
    """Where things stand, and the rows."""

    def __init__(self, recording: WindowRecording, num_columns: int) -> None:
        self.moments = recording.moments
        self.block_size = recording.cache.config.block_size
        self.group, self.full_group = (
            next(g for g, window in enumerate(recording.windows) if (window is None) == full)
            for full in (False, True)
        )
        window = recording.windows[self.group]
        assert window is not None
        self.window = window
        self.left = style.MARGIN + LABEL
        # The window of the next token may reach one slot beyond the last block.
        room = style.WIDTH - style.MARGIN - FREE - self.left
        self.slot = room / (num_columns * self.block_size + 1)

    def paint(self, title: str | None) -> style.Picture:
        top = style.MARGIN + (0.62 if title else 0.3)
        pitch = 0.66
        last = top + pitch * len(self.moments) + 0.1
        figure, axes = style.card(last + 0.92, title)
        self._heading(axes, top - 0.17)
        given_back: set[int] = set()
        before: tuple[int, ...] = ()
        for i, moment in enumerate(self.moments):
            table = moment.tables[self.group]
            self._row(axes, top + i * pitch, i, moment, before, given_back)
            given_back |= set(before) - set(table)
            before = table
        self._full_row(axes, last)
        _legend(axes, last + 0.66, self.window)
        return figure

    def _heading(self, axes: Axes, y: float) -> None:
        look: dict[str, Any] = {"color": style.MUTED, "fontsize": style.SMALL, "ha": "left"}
        shapes.text(
            axes, self.left, y, f"block table of the layers with window {self.window}", **look
        )
        shapes.text(axes, style.WIDTH - style.MARGIN, y, "free blocks", **{**look, "ha": "right"})

    def _row(
        self, axes: Axes, y: float, i: int, moment: Moment, before: tuple[int, ...], gone: set[int]
    ) -> None:
        name = f"step-{i}"
        self._captions(axes, y, moment)
        for column, block_id in enumerate(moment.tables[self.group]):
            x, width = self._place(column)
            middle = x + width / 2
            if block_id == 0:
                gid = f"{name}-{column}-null"
                shapes.box(axes, x, y, width, BLOCK, style.FREE, hatch="xxxx", gid=gid)
                if before[column : column + 1] not in ((), (0,)):
                    look: dict[str, Any] = {"fontsize": 7.5, "color": style.ACCENT}
                    words = f"{before[column]} given back"
                    shapes.text(axes, middle, y + BLOCK + 0.11, words, **look)
                continue
            self._block(axes, y, column, block_id, moment.num_tokens, WINDOW, name)
            if block_id in gone and block_id not in before:
                look = {"fontsize": 7.5, "color": style.ACCENT}
                shapes.text(axes, middle, y + BLOCK + 0.11, f"{block_id} again", **look)
        first = max(0, moment.num_tokens + 1 - self.window)
        begin, end = (self.left + p * self.slot for p in (first, moment.num_tokens + 1))
        look = {"edgecolor": style.INK, "linewidth": 1.8, "gid": f"{name}-window", "zorder": 2}
        shapes.box(axes, begin, y - 0.05, end - begin, BLOCK + 0.1, "none", **look)

    def _full_row(self, axes: Axes, y: float) -> None:
        """For comparison: what a layer without a window holds at the end."""
        moment = self.moments[-1]
        look: dict[str, Any] = {"ha": "left", "color": style.MUTED, "fontsize": style.SMALL}
        shapes.text(
            axes, self.left, y - 0.05, "the same moment, the layers without a window", **look
        )
        shapes.text(axes, style.MARGIN, y + 0.2, moment.caption, ha="left")
        for column, block_id in enumerate(moment.tables[self.full_group]):
            self._block(axes, y + 0.07, column, block_id, moment.num_tokens, FULL, "full")

    def _captions(self, axes: Axes, y: float, moment: Moment) -> None:
        middle = y + BLOCK / 2
        shapes.text(axes, style.MARGIN, middle, moment.caption, ha="left")
        shapes.text(
            axes, style.WIDTH - style.MARGIN, middle, str(moment.num_free_blocks), ha="right"
        )

    def _block(
        self, axes: Axes, y: float, column: int, block_id: int, num_tokens: int, colour: str,
        name: str,
    ) -> None:  # fmt: skip
        x, width = self._place(column)
        used = min(max(num_tokens / self.block_size - column, 0), 1)
        gid = f"{name}-{column}-block-{block_id}"
        rest = {"hatch": "////", "edgecolor": style.tint(colour, 0.55), "linewidth": 0}
        shapes.box(axes, x, y, width, BLOCK, style.tint(colour, 0.15), **rest)
        shapes.box(axes, x, y, used * width, BLOCK, colour, linewidth=0, gid=f"{gid}-used")
        shapes.rungs(axes, x, y, width, BLOCK, self.block_size)
        shapes.box(axes, x, y, width, BLOCK, "none", edgecolor=colour, linewidth=1.0, gid=gid)
        shapes.plate(axes, x + width / 2, y + BLOCK / 2, str(block_id), colour)

    def _place(self, column: int) -> tuple[float, float]:
        """Where a block of a table begins, and its width."""
        width = self.block_size * self.slot
        return self.left + column * width, width - 0.04


def _legend(axes: Axes, y: float, window: int) -> None:
    look: dict[str, Any] = {"ha": "left", "fontsize": style.SMALL, "color": style.MUTED}
    x = style.MARGIN
    shapes.box(axes, x, y - 0.07, 0.24, 0.14, "none", edgecolor=style.INK, linewidth=1.8)
    shapes.text(
        axes, x + 0.32, y, f"the {window} tokens that the next one sees, itself included", **look
    )
    shapes.swatch(axes, x + 3.6, y, style.FREE, "xxxx")
    shapes.text(axes, x + 3.79, y, "null block: the table keeps its length", **look)
