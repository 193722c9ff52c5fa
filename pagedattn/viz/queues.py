"""The free queue in the order of eviction, moment by moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from pagedattn.viz import shapes, style
from pagedattn.viz.recording import Frame
from pagedattn.viz.state import PoolState, capture_pool

PITCH = 0.74
POOL, QUEUE = 1.9, 4.75  # where the two columns begin
BLOCK, ENTRY = 0.25, 0.27  # a block's height, an entry's width
MAX_BLOCKS = 8


@style.styled
def draw_free_queue(frames: Sequence[Frame], title: str | None = None) -> style.Picture:
    """A row a moment: what happened, the usable blocks with the first digits of their digests, and
    the free queue, the block that leaves next on the left. A free block that can be found is ruled;
    digests that are gone since the moment before stand crossed out behind the queue.

    ``frames`` are those of a Recording; the lines of a caption after the first are calls. Raises
    ValueError without a frame, for anything but a paged cache, and for more than 8 blocks.
    """
    if not frames:
        raise ValueError("draw_free_queue needs at least one frame")
    states = [capture_pool(frame.state) for frame in frames]
    num_blocks = len(states[0].blocks)
    if num_blocks > MAX_BLOCKS:
        raise ValueError(f"{num_blocks} blocks; at most {MAX_BLOCKS} can be drawn")
    top = style.MARGIN + (0.7 if title else 0.4)
    bottom = top + PITCH * len(frames)
    figure, axes = style.card(bottom + 0.32, title)
    for x, words in ((POOL, "pool"), (QUEUE, "free queue: next to leave first")):
        shapes.text(axes, x, top - 0.2, words, ha="left", color=style.MUTED)
    for i, (frame, state) in enumerate(zip(frames, states, strict=True)):
        y = top + i * PITCH + shapes.ID_ROOM
        event, *calls = frame.caption.split("\n")
        lines: list[tuple[str, dict[str, Any]]] = [(event, {})]
        lines += [(call, {"fontsize": 7.0, "color": style.MUTED, **shapes.MONO}) for call in calls]
        first = y + BLOCK / 2 - 0.085 * (len(lines) - 1)
        for place, (words, look) in enumerate(lines):
            shapes.text(axes, style.MARGIN, first + 0.17 * place, words, ha="left", **look)
        pitch = (QUEUE - POOL - 0.25) / (num_blocks - 1)
        for block in state.blocks[1:]:
            x = POOL + (block.block_id - 1) * pitch
            name = f"step-{i}-block"
            shapes.block(axes, x, y, pitch - 0.05, BLOCK, block, state.block_size, name=name)
        _paint_queue(axes, y, state, states[i - 1] if i else state, f"step-{i}-queue")
    _paint_legend(axes, bottom + 0.02)
    return figure


def _paint_queue(axes: Axes, y: float, state: PoolState, before: PoolState, name: str) -> None:
    x = QUEUE
    for place, block_id in enumerate(state.free_queue):
        block = state.blocks[block_id]
        if block.is_findable:
            former = block.former
            shapes.findable(axes, x, y, ENTRY, BLOCK, former, f"{name}-{place}-findable")
        else:
            shapes.box(axes, x, y, ENTRY, BLOCK, style.FREE, gid=f"{name}-{place}-free")
        middle = (x + ENTRY / 2, y + BLOCK / 2)
        shapes.text(axes, *middle, str(block_id), fontsize=style.SMALL)
        x += ENTRY + 0.015
    kept = {block.block_hash for block in state.blocks}
    for block in before.blocks:
        if block.block_hash not in kept:
            look = {"fontsize": 7.0, "color": style.ACCENT, **shapes.MONO}
            shapes.text(axes, x + 0.19, y + BLOCK / 2, block.digits(), **look)
            line = [y + BLOCK / 2] * 2
            axes.plot([x + 0.04, x + 0.34], line, color=style.ACCENT, lw=1.0)
            x += 0.34


def _paint_legend(axes: Axes, y: float) -> None:
    look: dict[str, Any] = {"ha": "left", "fontsize": style.SMALL, "color": style.MUTED}
    x = style.MARGIN
    shapes.findable(axes, x, y - 0.06, 0.12, 0.12, None, "legend-findable")
    shapes.text(axes, x + 0.19, y, "free, and can be found", **look)
    shapes.swatch(axes, x + 1.75, y, style.FREE)
    shapes.text(axes, x + 1.94, y, "free and blank", **look)
    look["color"] = style.ACCENT
    shapes.text(axes, x + 3.1, y, "✓ hit: it was free", **look)
    shapes.text(axes, x + 4.45, y, "crossed out: digest lost", **look)
