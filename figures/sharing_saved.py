"""Blocks saved by sharing, on recorded lengths, beside what the vLLM paper reports.

The figures come from a run that takes minutes, and lie beside this script:
`pagedattn bench sharing --json figures/sharing_saved.json`.
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

from pagedattn.bench.sharing import draw as draw_saved
from pagedattn.viz.script import run_script


def draw() -> Figure:
    content = json.loads(Path(__file__).with_suffix(".json").read_text())
    return draw_saved(content["views"])


if __name__ == "__main__":
    run_script(__file__, draw)
