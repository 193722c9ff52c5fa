"""How many prompt tokens a prefix cache holds already, by its capacity, on recorded prompts.

The figures come from a run that takes minutes, and lie beside this script:
`pagedattn bench prefix --json figures/hit_rate.json`.
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

from pagedattn.bench.prefix import draw as draw_hits
from pagedattn.viz.script import run_script


def draw() -> Figure:
    content = json.loads(Path(__file__).with_suffix(".json").read_text())
    return draw_hits(content["traces"])


if __name__ == "__main__":
    run_script(__file__, draw)
