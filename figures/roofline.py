"""What memory and arithmetic allow, and what the kernels of chapter 05 reach on an H200.

The figures are evidence: `pagedattn bench kernels --evidence`, on a GPU.
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

from pagedattn.bench.kernel_report import draw as draw_rows
from pagedattn.viz.script import run_script

EVIDENCE = Path(__file__).parents[1] / "chapters" / "05" / "evidence" / "kernels.json"


def draw() -> Figure:
    return draw_rows(json.loads(EVIDENCE.read_text())["result"])


if __name__ == "__main__":
    run_script(__file__, draw)
