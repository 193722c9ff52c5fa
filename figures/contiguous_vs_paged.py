"""The same requests in the same memory, in slabs and in blocks."""

from matplotlib.figure import Figure

from pagedattn import contiguous, paged
from pagedattn.viz import shapes, style
from pagedattn.viz.pool import grid_height, paint_arena, paint_grid, paint_usage
from pagedattn.viz.scenes import serve, small_config
from pagedattn.viz.script import run_script
from pagedattn.viz.state import capture_arena, capture_pool

# Tokens of the prompt, and tokens generated so far.
REQUESTS = {"A": (6, 5), "B": (17, 3), "C": (3, 2), "D": (9, 6), "E": (12, 7), "F": (8, 1)}
LEFT, WIDTH = style.MARGIN, style.WIDTH - 2 * style.MARGIN


def draw() -> Figure:
    config = small_config(num_blocks=33, max_seq_len=32)
    slabs, pages = contiguous.build_cache(config), paged.build_cache(config)
    waiting = {"slabs": serve(slabs, REQUESTS), "pages": serve(pages, REQUESTS)}
    arena, pool = capture_arena(slabs), capture_pool(pages)

    total = slabs.usage().total
    y_pool = 2.25
    height = y_pool + grid_height(pool, WIDTH) + 0.5
    figure, axes = style.card(height, f"Six requests, {total} slots")
    for y, words, refused in (
        (0.74, "A slab of 32 slots each", waiting["slabs"]),
        (y_pool - 0.16, "Blocks of 4 slots as they are needed", waiting["pages"]),
    ):
        running = len(REQUESTS) - len(refused)
        tail = f", {' and '.join(refused)} wait" if refused else ""
        shapes.text(axes, LEFT, y, f"{words}: {running} run{tail}", ha="left", fontweight="bold")
    paint_arena(axes, LEFT, 0.9, WIDTH, arena)
    paint_usage(axes, LEFT, 1.64, arena.usage)
    paint_grid(axes, LEFT, y_pool, WIDTH, pool)
    paint_usage(axes, LEFT, y_pool + grid_height(pool, WIDTH) + 0.14, pool.usage)
    return figure


if __name__ == "__main__":
    run_script(__file__, draw)
