"""A decode step of six requests that share a system prompt: three of them share a question, too,
and two others one of their own. Blocks hold 1024 tokens here, so that a table fits on the page."""

from dataclasses import replace

import torch
from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.course.witness import DEVICE
from pagedattn.kernels import new_plan, plan_attention
from pagedattn.viz.script import run_script

BLOCK_SIZE = 1024
SYSTEM = [7, 3, 12, 5, 9]
TABLES = (
    [*SYSTEM, 14, 1, 22, 30, 18],
    [*SYSTEM, 6, 25, 10, 33],
    [*SYSTEM, 14, 1, 22, 8],
    [*SYSTEM, 31, 2],
    [*SYSTEM, 14, 1, 22, 16],
    [*SYSTEM, 6, 25, 10, 21, 28],
)
SEQ_LENS = (9800, 9000, 8600, 6800, 8840, 10000)


def draw() -> Figure:
    rows, width = len(TABLES), max(map(len, TABLES))
    plan = new_plan(
        rows, rows, 16, 4, 128, dtype=torch.float32, has_prefill=False,
        share_block_size=BLOCK_SIZE, device=DEVICE,
    )  # fmt: skip
    assert plan.shared is not None
    # For one multiprocessor, whatever this machine has: a larger one would cut what is read.
    plan = replace(plan, target_splits=1, shared=replace(plan.shared, num_programs=1))
    seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
    padded = [table + [0] * (width - len(table)) for table in TABLES]
    block_table = torch.tensor(padded, dtype=torch.int32, device=DEVICE)
    plan_attention(plan, seq_lens, starts, block_table)
    return viz.draw_shared_prefixes(
        plan, block_table, BLOCK_SIZE, "Blocks that rows have in common are read once"
    )


if __name__ == "__main__":
    run_script(__file__, draw)
