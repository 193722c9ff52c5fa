"""PagedAttention at a glance: six requests in slabs, and in blocks found through block tables."""

from matplotlib.figure import Figure

from pagedattn import contiguous, paged
from pagedattn.viz import shapes, style
from pagedattn.viz.pool import ARENA_HEIGHT, paint_arena
from pagedattn.viz.scenes import serve, small_config
from pagedattn.viz.script import run_script
from pagedattn.viz.state import OwnerState, capture_arena, capture_pool
from pagedattn.viz.tables import LABEL_ROOM, paint_block_tables

# Tokens of the prompt, and tokens generated so far.
REQUESTS = {"A": (6, 5), "B": (13, 7), "C": (3, 3), "D": (7, 8), "E": (5, 4), "F": (8, 5)}
LEFT, WIDTH = style.MARGIN, style.WIDTH - 2 * style.MARGIN


def draw() -> Figure:
    config = small_config(num_blocks=17, block_size=8, max_seq_len=32)
    slabs, pages = contiguous.build_cache(config), paged.build_cache(config)
    refused = serve(slabs, REQUESTS)
    serve(pages, REQUESTS)
    arena, pool = capture_arena(slabs), capture_pool(pages)

    figure, axes = style.card(4.88)
    x, width = LEFT + LABEL_ROOM, WIDTH - LABEL_ROOM
    for y, words, usage, running in (
        (0.36, "One slab a sequence", arena.usage, len(REQUESTS) - len(refused)),
        (1.64, "PagedAttention", pool.usage, len(REQUESTS)),
    ):
        shapes.text(axes, LEFT, y, words, ha="left", fontsize=style.TITLE, fontweight="bold")
        share = f"{running} of {len(REQUESTS)} requests run"
        tail = f"{usage.used / usage.reserved:.0%} of the reserved slots are used"
        shapes.text(axes, LEFT + WIDTH, y, f"{share},  {tail}", ha="right", color=style.MUTED)
    shapes.text(axes, LEFT, 0.62 + ARENA_HEIGHT / 2, "memory", ha="left", color=style.MUTED)
    slab_width = width - 0.62
    paint_arena(axes, x, 0.62, slab_width, arena)
    for i, seq_id in enumerate(refused):
        owner = OwnerState(seq_id, list(REQUESTS).index(seq_id), 0)
        colour = style.line_colour(owner.number)
        at = x + slab_width + 0.14 + 0.27 * i
        outline = {"edgecolor": colour, "linestyle": "--", "linewidth": 1.2}
        shapes.box(axes, at, 0.62, 0.22, ARENA_HEIGHT, style.CARD, **outline)
        shapes.text(axes, at + 0.11, 0.62 + ARENA_HEIGHT / 2, seq_id, fontweight="bold")
    shapes.text(
        axes,
        x + slab_width + 0.38,
        0.62 + ARENA_HEIGHT + 0.12,
        "wait",
        fontsize=style.SMALL,
        color=style.MUTED,
    )
    labels = ("sequence", "block table", "memory")
    paint_block_tables(axes, LEFT, 1.96, WIDTH, pool, labels, heading="{name}")
    return figure


if __name__ == "__main__":
    run_script(__file__, draw)
