"""Blocks leave the free queue at its head and come back at its tail, a sequence's last first."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pagedattn.paged import build_cache
from pagedattn.viz import Recording, shapes, style
from pagedattn.viz.scenes import grow, small_config, start
from pagedattn.viz.script import run_script
from pagedattn.viz.state import PoolState

TOP, PITCH = 1.0, 0.62
POOL, QUEUE = 1.95, 5.0  # where the two columns begin


def record() -> Recording:
    cache = build_cache(small_config(num_blocks=8))
    recording = Recording(cache)
    recording.snapshot("all blocks are free")
    start(cache, "A", 10)
    recording.snapshot("A starts\nget_new_blocks(3)")
    start(cache, "B", 7)
    recording.snapshot("B starts\nget_new_blocks(2)")
    cache.free("A")
    recording.snapshot("A ends\nfree_blocks([3, 2, 1])")
    grow(cache, {"B": 2})
    recording.snapshot("B grows\nget_new_blocks(1)")
    start(cache, "C", 8)
    recording.snapshot("C starts\nget_new_blocks(2)")
    return recording


def draw() -> Figure:
    frames = record().frames
    title = "Out at the head, back at the tail"
    figure, axes = style.card(TOP + PITCH * len(frames) + 0.1, title)
    for x, words in ((POOL, "pool"), (QUEUE, "free queue: head first")):
        shapes.text(axes, x, TOP - 0.3, words, ha="left", color=style.MUTED)
    before = None
    for i, frame in enumerate(frames):
        y = TOP + i * PITCH + shapes.ID_ROOM
        event, *call = frame.caption.split("\n")
        shapes.text(axes, style.MARGIN, y + (0.03 if call else 0.12), event, ha="left")
        for words in call:
            mono = {"family": "DejaVu Sans Mono", "fontsize": 7.5, "color": style.MUTED}
            shapes.text(axes, style.MARGIN, y + 0.22, words, ha="left", **mono)
        assert isinstance(frame.state, PoolState)
        _paint_row(axes, y, frame.state, before or frame.state, f"step-{i}-block")
        before = frame.state
    return figure


def _paint_row(axes: Axes, y: float, state: PoolState, before: PoolState, name: str) -> None:
    """The pool and the queue after one step; blocks that just came back have their old colour."""
    pitch = (QUEUE - POOL - 0.25) / len(state.blocks)
    for block in state.blocks:
        x = POOL + block.block_id * pitch
        shapes.block(axes, x, y, pitch - 0.05, 0.25, block, state.block_size, name=name)
    for place, block_id in enumerate(state.free_queue):
        x, owner = QUEUE + place * 0.27, before.blocks[block_id].owner
        fill = style.tint(style.owner_colour(owner.number), 0.4) if owner else style.FREE
        edge = style.line_colour(owner.number) if owner else style.LINE
        shapes.box(axes, x, y, 0.22, 0.25, fill, edgecolor=edge, gid=f"{name}-queue-{place}")
        shapes.text(axes, x + 0.11, y + 0.125, str(block_id), fontsize=style.SMALL)


if __name__ == "__main__":
    run_script(__file__, draw)
