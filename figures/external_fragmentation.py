"""Enough free slots in all, and none of the free pieces large enough."""

from matplotlib.figure import Figure

from pagedattn.cache import OutOfBlocks
from pagedattn.contiguous import build_cache
from pagedattn.viz import shapes, style
from pagedattn.viz.pool import ARENA_HEIGHT, paint_arena
from pagedattn.viz.scenes import small_config, start
from pagedattn.viz.script import run_script
from pagedattn.viz.state import capture_arena

LEFT, WIDTH = style.MARGIN, style.WIDTH - 2 * style.MARGIN


def draw() -> Figure:
    cache = build_cache(small_config(num_blocks=25))
    slabs = {"A": 24, "B": 16, "C": 24, "D": 20, "E": 12}
    for seq_id, max_tokens in slabs.items():
        start(cache, seq_id, max_tokens * 3 // 4, max_tokens)
    full = capture_arena(cache)
    cache.free("B")
    cache.free("D")
    holes = capture_arena(cache, full)
    try:
        cache.add("F", range(20), max_tokens=28)
    except OutOfBlocks as error:
        refusal = error

    figure, axes = style.card(3.45, "36 slots are free, and 28 do not fit")
    for y, words, state in (
        (0.86, "five sequences fill the arena", full),
        (1.81, "B and D have ended", holes),
    ):
        shapes.text(axes, LEFT, y - 0.13, words, ha="left", color=style.MUTED)
        paint_arena(axes, LEFT, y, WIDTH, state, name=f"slab-at-{y}")
    y, scale = 2.76, WIDTH / holes.usage.total
    words = "F asks for a slab of 28 slots"
    shapes.text(axes, LEFT, y - 0.13, words, ha="left", color=style.MUTED)
    refused = {"edgecolor": style.ACCENT, "linestyle": "--", "linewidth": 1.4, "gid": "refused"}
    shapes.box(axes, LEFT, y, refusal.needed * scale, ARENA_HEIGHT, style.CARD, **refused)
    middle = y + ARENA_HEIGHT / 2
    at = LEFT + refusal.needed * scale
    shapes.text(axes, LEFT + (at - LEFT) / 2, middle, f"F: {refusal.needed}", color=style.ACCENT)
    for i, line in enumerate(str(refusal).split("; ")):
        shapes.text(axes, at + 0.15, middle - 0.1 + 0.2 * i, line, ha="left", color=style.ACCENT)
    return figure


if __name__ == "__main__":
    run_script(__file__, draw)
