"""Three sequences in slabs of max_seq_len slots: what is used, what is reserved, what is free."""

from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.contiguous import build_cache
from pagedattn.viz.scenes import grow, small_config, start
from pagedattn.viz.script import run_script


def draw() -> Figure:
    cache = build_cache(small_config(num_blocks=33, max_seq_len=32))
    for seq_id, prompt in {"A": 6, "B": 17, "C": 3}.items():
        start(cache, seq_id, prompt)
    grow(cache, {"A": 5, "B": 3, "C": 2})
    return viz.draw_pool(cache, "Three sequences, each in a slab of max_seq_len = 32 slots")


if __name__ == "__main__":
    run_script(__file__, draw)
