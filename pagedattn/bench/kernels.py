"""The kernels by the clock: each row beside what the machine can do and what others reach there.

Times are medians of replayed CUDA graphs, on inputs that together are larger than the L2 cache. The
blocks of each batch lie all over the pool. Machines differ by a few per cent: what counts is the
ratio to a ceiling, or to a peer, of the same run. Every result is checked before it is timed.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pagedattn import viz
from pagedattn.bench.kernel_report import draw, report
from pagedattn.bench.kernel_rows import (
    ATTENTION_ROWS,
    CLIMB,
    QUICK,
    SMALL_ROWS,
    AttentionRow,
    SmallRow,
)
from pagedattn.bench.result_file import write_result

POOL = 2**31  # numbers of K, and as many of V: two million tokens of 8 heads of 128
EVIDENCE = "chapters/05/evidence/kernels.json"
SOURCES = (
    "kernels",
    "kernel_rows",
    "kernel_inputs",
    "kernel_trials",
    "kernel_measure",
    "gpu_clock",
    "host_clock",
    "ceilings",
    "peers",
    "installed_peers",
)


def add_arguments(parser: ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--only", metavar="WORD", default="", help="rows with this in their name")
    parser.add_argument("--quick", action="store_true", help="four rows, few repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the roofline, as SVG")
    parser.add_argument("--evidence", action="store_true", help=f"record it in {EVIDENCE}")


def chosen_rows(only: str, quick: bool) -> tuple[list[AttentionRow | SmallRow], list[AttentionRow]]:
    """The rows with ``only`` in their name, and those to climb at; of the quick ones if so asked.

    Raises ValueError if there is none.
    """
    everything: list[AttentionRow | SmallRow] = [*ATTENTION_ROWS, *SMALL_ROWS]
    rows = [row for row in everything if only in row.name and (not quick or row.name in QUICK)]
    climbs = [row for row in ATTENTION_ROWS if row.name in CLIMB and only in f"climb {row.name}"]
    if quick:
        climbs = []
    if not rows and not climbs:
        names = ", ".join(row.name for row in everything)
        raise ValueError(f"--only {only}: known rows are {names}, climb")
    return rows, climbs


def run(args: Namespace) -> int:
    """Measure, print, and write what is asked for. Returns 1 if a kernel of ours failed.

    Raises ValueError without a GPU, for a word that no row has, and for evidence of a part.
    """
    if args.evidence and (args.only or args.quick):
        raise ValueError("evidence is of the whole run: neither --only nor --quick goes with it")
    rows, climbs = chosen_rows(args.only, args.quick)
    if not torch.cuda.is_available():
        raise ValueError("torch sees no GPU here, and these kernels are timed on one")

    # Triton is not on every machine that has the other benchmarks.
    from pagedattn.bench.gpu_clock import GraphClock
    from pagedattn.bench.host_clock import HostClock
    from pagedattn.bench.installed_peers import installed_versions
    from pagedattn.bench.kernel_inputs import Pool
    from pagedattn.bench.kernel_measure import Measurement, failures, measure

    torch.manual_seed(0)
    clock = GraphClock(repeats=5) if args.quick else GraphClock()
    measurement = Measurement(Pool(POOL), clock, HostClock(), _say, flex=not args.quick)
    result = measure(measurement, rows, climbs)
    result["peer_versions"] = installed_versions() | {
        "torch": torch.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
    }
    report(result, Console())
    if args.json:
        options = [word for word in sys.argv[1:] if word not in ("bench", "kernels")]
        card = {"card": torch.cuda.get_device_name()}
        write_result(args.json, card | result, ["bench", "kernels", *options])
    if args.figure:
        viz.save(draw(result), args.figure)
    failed = failures(result)
    for line in failed:
        _say(line)
    if args.evidence and not failed:
        _record(result)
    return int(bool(failed))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _record(result: dict[str, Any]) -> None:
    from pagedattn.course.chapters import find_root
    from pagedattn.course.evidence import record

    root = find_root()
    kernels = sorted((root / "pagedattn/kernels").glob("*.py"))
    sources = [path.relative_to(root).as_posix() for path in kernels]
    sources += [f"pagedattn/bench/{name}.py" for name in SOURCES]
    record(root / EVIDENCE, "pagedattn bench kernels --evidence", sources, result, root)


if __name__ == "__main__":  # where not all that the other benchmarks need is installed
    parser = ArgumentParser(prog="pagedattn bench kernels")
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
