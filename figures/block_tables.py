"""Logical blocks of three sequences, their block tables, and where the blocks lie."""

from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.paged import build_cache
from pagedattn.viz.scenes import grow, small_config, start
from pagedattn.viz.script import run_script


def draw() -> Figure:
    cache = build_cache(small_config(num_blocks=12))
    for seq_id, prompt in {"A": 5, "B": 8, "C": 3}.items():
        start(cache, seq_id, prompt)
    grow(cache, {"A": 5, "B": 1, "C": 3})
    return viz.draw_block_tables(cache, "The tokens are in order, the blocks lie anywhere")


if __name__ == "__main__":
    run_script(__file__, draw)
