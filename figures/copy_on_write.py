"""Two sequences share a partly filled block; the first that writes gets a copy, the last writes in
place."""

from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.sharing import build_cache
from pagedattn.viz.scenes import grow, small_config, start
from pagedattn.viz.script import run_script


def draw() -> Figure:
    cache = build_cache(small_config(num_blocks=5))
    recording = viz.Recording(cache)
    start(cache, "A", 6)
    recording.snapshot("1. A holds 6 tokens")
    cache.fork("A", "B")
    recording.snapshot("2. B is forked: no block is taken")
    grow(cache, {"B": 1})
    recording.snapshot("3. B writes: its last block is copied first")
    grow(cache, {"A": 1})
    recording.snapshot("4. A writes: it is alone, and writes in place")
    return viz.draw_copy_on_write(recording.frames, "Copy before you write")


if __name__ == "__main__":
    run_script(__file__, draw)
