"""The memory of a cache, block by block or slab by slab."""

from __future__ import annotations

import math
from collections.abc import Iterable

from matplotlib.axes import Axes

from pagedattn.cache import KVCache, Usage
from pagedattn.viz import shapes, style
from pagedattn.viz.state import ArenaState, OwnerState, PoolState, State, capture, slots_used

MAX_BLOCKS = 512
MANY_BLOCKS = 64  # from here on blocks are small and only rows are numbered
GAP = 0.1
LEGEND_ROW = 0.22
ARENA_HEIGHT = 0.42


@style.styled
def draw_pool(cache: KVCache | State, title: str | None = None) -> style.Picture:
    """The memory of a cache, coloured by owner.

    A paged cache is a grid of blocks: filled slots in full colour, slots that are reserved and
    empty hatched, free blocks pale, the null block crossed; a block that several sequences share
    has a band for each, and its ``ref_cnt`` beside its number. Below stands the free queue, the
    next block to leave in front. A contiguous cache is one row of slots, cut into slabs.

    Raises ValueError for anything but a cache, and for a pool of more than 512 blocks.
    """
    state = capture(cache)
    top = style.MARGIN + (0.3 if title else 0.0)
    left, width = style.MARGIN, style.WIDTH - 2 * style.MARGIN
    if isinstance(state, PoolState):
        if len(state.blocks) > MAX_BLOCKS:
            raise ValueError(f"{len(state.blocks)} blocks; at most {MAX_BLOCKS} can be drawn")
        body = grid_height(state, width) + 0.26
    else:
        body = ARENA_HEIGHT + 0.3
    figure, axes = style.card(top + body + legend_height(state, width) + 0.26, title)
    if isinstance(state, PoolState):
        paint_grid(axes, left, top, width, state)
        paint_queue(axes, left, top + body - 0.14, width, state.free_queue)
    else:
        paint_arena(axes, left, top + 0.05, width, state)
    paint_legend(axes, left, top + body + 0.06, width, state)
    return figure


def _cells(state: PoolState, width: float) -> tuple[int, float, float, float]:
    """Blocks a row, and a block's width, height and the step from row to row."""
    num_blocks = len(state.blocks)
    if num_blocks > MANY_BLOCKS:
        per_row = 16 if num_blocks <= 256 else 32
        return per_row, (width - 0.35) / per_row - 0.04, 0.2, 0.25
    least = max(0.42, 0.045 * state.block_size)
    fit = max(1, int((width + GAP) / (least + GAP)))
    per_row = math.ceil(num_blocks / math.ceil(num_blocks / fit))
    cell_width = min((width + GAP) / per_row - GAP, max(0.62, 0.08 * state.block_size))
    below = shapes.DIGEST_ROOM if state.has_digests else 0.0
    return per_row, cell_width, 0.34, 0.34 + shapes.ID_ROOM + below + 0.05


def grid_height(state: PoolState, width: float) -> float:
    """The height that ``paint_grid`` fills."""
    per_row, _, _, pitch = _cells(state, width)
    return math.ceil(len(state.blocks) / per_row) * pitch


def paint_grid(
    axes: Axes, x: float, y: float, width: float, state: PoolState, name: str = "block"
) -> None:
    """Blocks row by row, each with its number; of many blocks only the first of a row has one."""
    per_row, cell_width, height, pitch = _cells(state, width)
    many = len(state.blocks) > MANY_BLOCKS
    for i, block in enumerate(state.blocks):
        row, column = divmod(i, per_row)
        if many:
            left, upper = x + 0.35 + column * (cell_width + 0.04), y + row * pitch
        else:
            left, upper = x + column * (cell_width + GAP), y + shapes.ID_ROOM + row * pitch
        shapes.block(
            axes,
            left,
            upper,
            cell_width,
            height,
            block,
            state.block_size,
            name=name,
            show_id=not many,
            fontsize=6.0 if many else style.NORMAL,
        )
        if many and column == 0:
            shapes.text(
                axes,
                x + 0.27,
                upper + height / 2,
                str(i),
                ha="right",
                fontsize=style.SMALL,
                color=style.MUTED,
            )


def paint_queue(axes: Axes, x: float, y: float, width: float, free_queue: Iterable[int]) -> None:
    """The free queue as a line of numbers: the head, which leaves next, on the left."""
    ids = [str(block_id) for block_id in free_queue]
    room = int((width - 1.9) / 0.0715)  # characters
    shown: list[str] = []
    while len(shown) < len(ids) and sum(len(i) + 2 for i in [*shown, ids[len(shown)]]) <= room:
        shown.append(ids[len(shown)])
    rest = f"   and {len(ids) - len(shown)} more" if shown != ids else ""
    shapes.text(
        axes,
        x,
        y,
        "free queue, next to leave first:",
        ha="left",
        fontsize=style.SMALL,
        color=style.MUTED,
    )
    words = "  ".join(shown) + rest
    shapes.text(axes, x + 1.95, y, words or "empty", ha="left", fontsize=style.SMALL)


def paint_arena(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    state: ArenaState,
    name: str = "slab",
    height: float = ARENA_HEIGHT,
) -> None:
    """One row of slots: slabs in their owners' colours, holes pale, first slots below."""
    scale = width / state.usage.total
    for start, size in state.holes:
        left = x + start * scale
        shapes.box(axes, left, y, size * scale, height, style.FREE, gid=f"{name}-{start}-free")
        words = f"{size} free"
        if shapes.fit(words, size * scale, style.SMALL) == words:
            middle = (left + size * scale / 2, y + height / 2)
            shapes.text(axes, *middle, words, fontsize=style.SMALL, color=style.MUTED)
    for owner, start, size in state.slabs:
        left, gid = x + start * scale, f"{name}-{start}-owner-{owner.number}"
        shapes.span(axes, left, y, size * scale, height, owner, owner.num_tokens / size, gid)
        words = shapes.fit(owner.name, size * scale)
        colour = style.owner_colour(owner.number)
        at = left + shapes.name_place(owner.num_tokens / size, size * scale)
        shapes.plate(axes, at, y + height / 2, words, colour)
    edges = [start for _, start, _ in state.slabs] + [start for start, _ in state.holes]
    free_from = -1.0
    for edge in [*sorted(edges), state.usage.total]:
        if edge * scale > free_from:
            shapes.text(
                axes,
                x + edge * scale,
                y + height + 0.12,
                str(edge),
                fontsize=style.SMALL,
                color=style.MUTED,
            )
            free_from = edge * scale + 0.1 + 0.07 * len(str(edge))


def _entries(state: State, width: float) -> list[list[tuple[float, OwnerState, str]]]:
    """The legend's rows of (x, owner, words): each sequence with its slots, oldest first."""
    slots: dict[OwnerState, tuple[int, int]] = {}  # used, reserved
    if isinstance(state, PoolState):
        for owner, ids in state.tables:  # of all groups
            used, reserved = slots.get(owner, (0, 0))
            for i, block_id in enumerate(ids):
                if block_id:
                    used += slots_used(owner, i, state.block_size)
                    reserved += state.block_size
            slots[owner] = used, reserved
    else:
        slabs = sorted(state.slabs, key=lambda slab: slab[0].number)
        slots = {owner: (owner.num_tokens, size) for owner, _, size in slabs}
    rows: list[list[tuple[float, OwnerState, str]]] = []
    x = width
    for owner, (used, reserved) in slots.items():
        words = f"{owner.name}: {used} of {reserved} slots used"
        length = 0.4 + 0.063 * len(words)
        if x + length > width:
            rows.append([])
            x = 0.0
        rows[-1].append((x, owner, words))
        x += length
    return rows


def legend_height(state: State, width: float) -> float:
    """The height that ``paint_legend`` fills."""
    has_digests = isinstance(state, PoolState) and state.has_digests
    return (len(_entries(state, width)) + 1 + has_digests) * LEGEND_ROW


def paint_legend(axes: Axes, x: float, y: float, width: float, state: State) -> None:
    """Who has how much, and the whole."""
    rows = _entries(state, width)
    for i, entries in enumerate(rows):
        for left, owner, words in entries:
            middle = y + (i + 0.5) * LEGEND_ROW
            shapes.swatch(axes, x + left, middle, style.owner_colour(owner.number))
            shapes.text(axes, x + left + 0.19, middle, words, ha="left", fontsize=style.SMALL)
    paint_usage(axes, x, y + (len(rows) + 0.5) * LEGEND_ROW, state.usage)
    if isinstance(state, PoolState) and state.has_digests:
        paint_digest_legend(axes, x, y + (len(rows) + 1.5) * LEGEND_ROW, state)


def paint_digest_legend(axes: Axes, x: float, y: float, state: PoolState) -> None:
    """One line: how free blocks look that can be found, and what stands below blocks."""
    num_findable = sum(block.is_findable for block in state.blocks)
    look = {"ha": "left", "fontsize": style.SMALL, "color": style.MUTED}
    shapes.findable(axes, x, y - 0.06, 0.12, 0.12, None, "legend-findable")
    shapes.text(axes, x + 0.19, y, f"{num_findable} free blocks can be found", **look)
    if len(state.blocks) > MANY_BLOCKS:
        return
    shapes.text(axes, x + 2.1, y, "below a block: the first digits of its digest", **look)
    if any(block.is_hit for block in state.blocks):
        shapes.text(axes, x + 5.1, y, "✓ hit: it was free", **{**look, "color": style.ACCENT})


def paint_usage(axes: Axes, x: float, y: float, usage: Usage) -> None:
    """One line: slots used, reserved and empty, free, each with its look."""
    parts = (
        (f"{usage.used} slots used", style.NULL, None),
        (f"{usage.wasted} reserved and empty", style.CARD, "//////"),
        (f"{usage.free} free", style.FREE, None),
    )
    for words, fill, hatch in parts:
        shapes.swatch(axes, x, y, fill, hatch)
        shapes.text(axes, x + 0.19, y, words, ha="left", fontsize=style.SMALL, color=style.MUTED)
        x += 0.4 + 0.063 * len(words)
