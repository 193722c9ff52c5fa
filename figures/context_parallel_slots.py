"""Nine tokens dealt to two ranks, two at a time, and the slots that they get on each."""

from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.viz.script import run_script


def draw() -> Figure:
    title = "Slots over two context-parallel ranks"
    return viz.draw_rank_slots([5, 2], 4, 9, world_size=2, interleave=2, title=title)


if __name__ == "__main__":
    run_script(__file__, draw)
