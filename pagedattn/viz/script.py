"""What every script of ``figures/`` ends with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from pagedattn.viz.style import save, styled


def run_script(file: str, draw: Callable[[], Figure]) -> None:
    """``python figures/NAME.py [OUTDIR]``: draw NAME.svg, by default beside the script."""
    script = Path(file)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else script.parent
    save(styled(draw)(), folder / f"{script.stem}.svg")
