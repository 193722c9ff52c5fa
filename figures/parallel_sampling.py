"""Four samples of one prompt: its full blocks once, and tails of their own."""

from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.sharing import build_cache
from pagedattn.viz.scenes import grow, small_config, start
from pagedattn.viz.script import run_script


def draw() -> Figure:
    cache = build_cache(small_config(num_blocks=16))
    start(cache, "A", 10)
    for sample in ("B", "C", "D"):
        cache.fork("A", sample)
    grow(cache, {"A": 7, "B": 3, "C": 9, "D": 5})
    return viz.draw_shared_tables(cache, "Four samples of a prompt of 10 tokens")


if __name__ == "__main__":
    run_script(__file__, draw)
