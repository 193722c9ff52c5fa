"""All recorded traces in blocks of 1, 8, 16, … 128 slots: what is empty, and how many blocks."""

from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.traces import (
    fragmentation,
    load_trace,
    policy_named,
    replay,
    select,
    shipped_traces,
)
from pagedattn.viz.script import run_script

NUM_SLOTS = 160_000
BLOCK_SIZES = (1, 8, 16, 32, 64, 128)


def draw() -> Figure:
    runs, blocks = {}, {}
    for trace in shipped_traces():
        requests, max_seq_len = select(load_trace(trace), "le4096", NUM_SLOTS)
        runs[trace] = {
            size: replay(requests, policy_named(f"paged{size}", NUM_SLOTS, max_seq_len))
            for size in BLOCK_SIZES
        }
        blocks[trace] = {size: fragmentation(requests, size) for size in BLOCK_SIZES}
    return viz.draw_block_sizes(runs, blocks, "Small blocks waste less, large blocks are fewer")


if __name__ == "__main__":
    run_script(__file__, draw)
