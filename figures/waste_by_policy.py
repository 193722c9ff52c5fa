"""A recorded trace through one pool: slabs of max_seq_len slots against blocks of 16."""

from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.bench.waste import measure_waste
from pagedattn.traces import load_trace, select
from pagedattn.viz.script import run_script

NUM_SLOTS = 160_000


def draw() -> Figure:
    requests, max_seq_len = select(load_trace("azure_conv"), "le4096", NUM_SLOTS)
    runs = measure_waste(requests, NUM_SLOTS, max_seq_len, block_size=16)
    names = {"max": f"slabs of {max_seq_len:,}", "paged16": "blocks of 16"}
    results = {words: runs[name] for name, words in names.items()}
    title = f"{len(requests):,} recorded chats in {NUM_SLOTS:,} slots"
    return viz.draw_waste(results, NUM_SLOTS, title)


if __name__ == "__main__":
    run_script(__file__, draw)
