"""The analogy: a process's pages and a sequence's blocks, each found through a table."""

from dataclasses import replace

from matplotlib.figure import Figure

from pagedattn.paged import build_cache
from pagedattn.viz import shapes, style
from pagedattn.viz.scenes import grow, small_config, start
from pagedattn.viz.script import run_script
from pagedattn.viz.state import BlockState, OwnerState, capture_pool
from pagedattn.viz.tables import paint_block_tables

HALF, TOP = 2.45, 0.95
PAIRS = (
    ("page", "logical block", 0.39),
    ("page table", "block table", 0.87),
    ("frame", "physical block", 2.37),
)


def draw() -> Figure:
    cache = build_cache(small_config(num_blocks=7))
    start(cache, "A", 4)
    start(cache, "B", 3)
    grow(cache, {"A": 6, "B": 3})
    state = capture_pool(cache)
    # The same tables once more, in an operating system's words; frame 0 is the system's own.
    system = BlockState(0, (OwnerState("OS", 5, 1),), 1, ref_cnt=1)
    frames = (system, *(replace(b, num_used=1 if b.owner else 0) for b in state.blocks[1:]))
    machine = replace(state, blocks=frames, block_size=1)

    figure, axes = style.card(3.85, "A block table is a page table")
    right = style.WIDTH - style.MARGIN - HALF
    blank = ("", "", "")
    for x, words in ((style.MARGIN, "virtual memory"), (right, "the paged KV cache")):
        shapes.text(axes, x, TOP - 0.2, words, ha="left", fontweight="bold", color=style.MUTED)
    paint_block_tables(axes, style.MARGIN, TOP, HALF, machine, blank, 0.0, "process {name}", "os-")
    paint_block_tables(axes, right, TOP, HALF, state, blank, 0.0)
    for left_words, right_words, y in PAIRS:
        shapes.text(axes, style.WIDTH / 2, TOP + y - 0.09, left_words)
        shapes.text(axes, style.WIDTH / 2, TOP + y + 0.09, right_words, fontweight="bold")
    return figure


if __name__ == "__main__":
    run_script(__file__, draw)
