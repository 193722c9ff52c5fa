"""A decode step of 128 rows of 64 to 16,384 tokens on an H200, for one KV head of eight: rows
whole, rows cut into splits, and all keys shared out evenly."""

from dataclasses import replace

import torch
from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.bench.kernel_rows import MIXED
from pagedattn.course.witness import DEVICE
from pagedattn.kernels import AttentionPlan, new_plan, plan_attention
from pagedattn.kernels.plan import PROGRAMS
from pagedattn.kernels.shares import cut_shares
from pagedattn.viz.loads import shares_of
from pagedattn.viz.plans import Split, schedule, splits_of
from pagedattn.viz.script import run_script

MULTIPROCESSORS, KV_HEADS = 132, 8
PLACES = PROGRAMS * MULTIPROCESSORS // KV_HEADS  # programs that run at a time
PROGRAMS_WITH_SHARES = MULTIPROCESSORS // KV_HEADS
ROWS = len(MIXED.seq_lens)


def empty_plan() -> AttentionPlan:
    """With the H200's number of splits, not this machine's, and room for them."""
    plan = new_plan(
        ROWS + PLACES, ROWS, 4, 1, 16, dtype=torch.float32, has_prefill=False, device=DEVICE
    )  # fmt: skip
    return replace(plan, target_splits=PLACES)


def loads(splits: list[Split]) -> list[list[Split]]:
    """What each place runs, one split after another."""
    runs = schedule(splits, PLACES)
    return [[run.split for run in runs if run.place == place] for place in range(PLACES)]


def draw() -> Figure:
    seq_lens = torch.tensor(MIXED.seq_lens, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(ROWS + 1, dtype=torch.int32, device=DEVICE)
    cut, shared = empty_plan(), empty_plan()
    plan_attention(cut, seq_lens, starts)
    share_start = torch.zeros(PROGRAMS_WITH_SHARES + 1, dtype=torch.int32, device=DEVICE)
    cut_shares(shared, seq_lens, starts, share_start)
    whole = [Split(row, 0, keys) for row, keys in enumerate(MIXED.seq_lens)]
    return viz.draw_loads(
        {
            "a program a row": loads(whole),
            "splits, the longest first": loads(splits_of(cut)),
            "even shares": shares_of(shared, share_start.tolist()),
        },
        "The same keys, shared out in three ways",
    )


if __name__ == "__main__":
    run_script(__file__, draw)
