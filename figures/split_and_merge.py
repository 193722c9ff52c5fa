"""A decode step of six rows of different length, on a machine that runs four programs at a time:
rows not cut, cut, and cut with the longest splits first."""

from dataclasses import replace

import torch
from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.course.witness import DEVICE
from pagedattn.kernels import new_plan, plan_attention
from pagedattn.viz.script import run_script

SEQ_LENS = (320, 90, 700, 180, 420, 2300)
PLACES = 4


def draw() -> Figure:
    rows = len(SEQ_LENS)
    plan = new_plan(
        4 * rows, rows, 4, 1, 16, dtype=torch.float32, has_prefill=False, device=DEVICE
    )  # fmt: skip
    plan = replace(plan, target_splits=3 * PLACES)  # not what this machine has
    seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32, device=DEVICE)
    plan_attention(plan, seq_lens, torch.arange(rows + 1, dtype=torch.int32, device=DEVICE))
    return viz.draw_plan(plan, PLACES, "Cut the keys, and start with the longest splits")


if __name__ == "__main__":
    run_script(__file__, draw)
