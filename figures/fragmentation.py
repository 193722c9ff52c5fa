"""A recorded trace under four ways to reserve: what is used, empty, and free of no use."""

from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.traces import load_trace, policy_named, replay, select
from pagedattn.viz.script import run_script

NUM_SLOTS = 160_000
POLICIES = {
    "slabs of 4,096": "max",
    "buddies †": "buddy",
    "first fit †": "exact_ff",
    "any place †": "exact",
    "blocks of 16": "paged16",
}


def draw() -> Figure:
    requests, max_seq_len = select(load_trace("azure_conv"), "le4096", NUM_SLOTS)
    runs = {
        words: replay(requests, policy_named(name, NUM_SLOTS, max_seq_len))
        for words, name in POLICIES.items()
    }
    title = f"Where {NUM_SLOTS:,} slots are while a request waits"
    return viz.draw_pool_shares(runs, title, "† if the length of every answer were known")


if __name__ == "__main__":
    run_script(__file__, draw)
