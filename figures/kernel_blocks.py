"""Two blocks of 32 tokens as the four blocks of 16 that a kernel reads."""

from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.manager import BlockTable
from pagedattn.viz.script import run_script


def draw() -> Figure:
    table = BlockTable(1, 2, 32, 64, kernel_block_size=16)
    table.add_row([5, 2], 0)
    return viz.draw_kernel_blocks(table, 0, 40, "Kernel blocks inside the manager's blocks")


if __name__ == "__main__":
    run_script(__file__, draw)
