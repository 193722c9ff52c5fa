"""A buddy arena: slabs are halved until they fit, and buddies that are both free merge."""

from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.traces import BuddyArena
from pagedattn.viz.script import run_script


def draw() -> Figure:
    run = viz.ArenaRecording(BuddyArena(128))
    for name, num_slots in {"A": 20, "B": 10, "C": 40, "D": 16}.items():
        run.take(name, num_slots)
    run.give_back("B")
    run.give_back("A")
    run.take("E", 40)
    run.give_back("D")
    run.take("E", 40)
    return run.draw("Buddies: halved to fit, merged when both are free")


if __name__ == "__main__":
    run_script(__file__, draw)
