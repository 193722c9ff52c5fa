"""Every policy on every trace: how much of one pool is used, and how many requests run at a time.

The model is that of `pagedattn.traces`. Nothing is timed but the replay itself.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pagedattn import viz
from pagedattn.bench.result_file import write_result
from pagedattn.traces import (
    VIEWS,
    Fragmentation,
    Metrics,
    Request,
    fragmentation,
    load_trace,
    policy_named,
    replay,
    select,
    shipped_traces,
)

SLABS = ("max", "buddy", "exact_ff", "exact")
BLOCK_SIZES = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Selected:
    """The part of a trace that is replayed."""

    num_requests: int  # in the whole trace
    kept: list[Request]
    max_seq_len: int


@dataclass(frozen=True)
class Surveyed:
    """One trace: its runs by policy with the seconds each took, and what blocks waste, by size."""

    runs: dict[str, Metrics]
    seconds: dict[str, float]
    blocks: dict[int, Fragmentation]

    def times_max(self, policy: str) -> float:
        """Running requests as a multiple of those under `max`, mean over the saturated steps."""
        return self.runs[policy].saturated_mean_running / self.runs["max"].saturated_mean_running


def policies(block_sizes: Iterable[int]) -> list[str]:
    """The names of all policies: slabs, then pages, then pages with a promise."""
    sizes = list(block_sizes)
    return [*SLABS, *(f"paged{size}" for size in sizes), *(f"pagedR{size}" for size in sizes)]


def prepare(
    traces: Iterable[str], view: str, num_slots: int, block_sizes: Sequence[int]
) -> dict[str, Selected]:
    """Load the traces and check that every run is possible, before the first one.

    Raises ValueError for a bad trace, for two of the same name, for a pool that is too small, and
    for a bad block size.
    """
    selected: dict[str, Selected] = {}
    for trace in dict.fromkeys(traces):
        if short(trace) in map(short, selected):
            raise ValueError(f"two traces are called {short(trace)}")
        requests = load_trace(trace)
        kept, max_seq_len = select(requests, view, num_slots)
        for name in policies(block_sizes):
            policy = policy_named(name, num_slots, max_seq_len)
            for request in kept:
                policy.check(request)
        selected[trace] = Selected(len(requests), kept, max_seq_len)
    return selected


def survey(
    selected: Selected,
    num_slots: int,
    block_sizes: Sequence[int],
    done: Callable[[str], object] = lambda policy: None,
) -> Surveyed:
    """Replay the requests under every policy. `done` is called with each policy's name after it."""
    runs, seconds = {}, {}
    for name in policies(block_sizes):
        start = time.perf_counter()
        runs[name] = replay(selected.kept, policy_named(name, num_slots, selected.max_seq_len))
        seconds[name] = time.perf_counter() - start
        done(name)
    blocks = {size: fragmentation(selected.kept, size) for size in block_sizes}
    return Surveyed(runs, seconds, blocks)


def runs_table(result: Surveyed) -> Table:
    """One trace: one row a policy."""
    table = Table("", caption="* in steps in which a request waits")
    for heading in ("used /\nreserved", "used /\nall *", "running,\nmean *", "times\nmax *"):
        table.add_column(heading, justify="right")
    for heading in ("running,\npeak", "steps", "pre-\nempted"):
        table.add_column(heading, justify="right")
    for policy, run in result.runs.items():
        table.add_row(
            policy,
            _words(run.used_of_reserved, "{:.2%}"),
            _words(run.saturated_used_of_pool, "{:.2%}"),
            _words(run.saturated_mean_running, "{:.2f}"),
            _words(result.times_max(policy), "{:.2f}"),
            f"{run.peak_running:,}",
            f"{run.num_steps:,}",
            f"{run.num_preemptions:,}",
        )
    return table


def blocks_table(results: dict[str, Surveyed]) -> Table:
    """All traces: one row a trace and block size."""
    table = Table("block\nsize", caption="reserved slots that hold no token, and blocks a request")
    for heading in (
        "of the\nprompt",
        "over\nthe life",
        "at the\nend",
        "slots\nat the end",
        "blocks",
    ):
        table.add_column(heading, justify="right")
    for trace, result in results.items():
        table.add_section()
        table.add_row(f"[bold]{escape(short(trace))}")
        for size, blocks in result.blocks.items():
            table.add_row(
                str(size),
                *(f"{share:.2%}" for share in (blocks.prompt, blocks.life, blocks.final)),
                f"{blocks.mean_waste:.2f}",
                f"{blocks.mean_blocks:.1f}",
            )
    return table


def short(trace: str) -> str:
    """What a trace is called in tables and figures: its name, or its file's."""
    return trace if trace in shipped_traces() else Path(trace).name


def _words(value: float, form: str) -> str:
    return "-" if isnan(value) else form.format(value)


def as_json(selected: dict[str, Selected], results: dict[str, Surveyed]) -> dict[str, Any]:
    """All figures, unrounded, by trace. What no step could give is null."""
    return {
        trace: {
            "num_requests": selected[trace].num_requests,
            "num_kept": len(selected[trace].kept),
            "max_seq_len": selected[trace].max_seq_len,
            "policies": {
                name: _no_nan(asdict(run))
                | _no_nan({"times_max": result.times_max(name)})
                | {"seconds": round(result.seconds[name], 3)}
                for name, run in result.runs.items()
            },
            "fragmentation": {size: asdict(blocks) for size, blocks in result.blocks.items()},
        }
        for trace, result in results.items()
    }


def _no_nan(values: dict[str, float]) -> dict[str, float | None]:
    return {key: None if isnan(value) else value for key, value in values.items()}


def save_figures(results: dict[str, Surveyed], block_sizes: Sequence[int], folder: Path) -> None:
    """Write `waste_policies.svg`, and `waste_block_sizes.svg` for two block sizes or more."""
    size = 16 if 16 in block_sizes else block_sizes[0]
    shown = (*SLABS, f"paged{size}")
    by_policy = {short(t): {name: r.runs[name] for name in shown} for t, r in results.items()}
    title = "The same pool under each policy"
    viz.save(viz.draw_policies(by_policy, title), folder / "waste_policies.svg")
    if len(block_sizes) > 1:
        by_size = {
            short(t): {size: r.runs[f"paged{size}"] for size in sorted(r.blocks)}
            for t, r in results.items()
        }
        blocks = {short(t): dict(sorted(r.blocks.items())) for t, r in results.items()}
        title = "Small blocks waste less, large blocks are fewer"
        viz.save(viz.draw_block_sizes(by_size, blocks, title), folder / "waste_block_sizes.svg")


def add_arguments(parser: ArgumentParser) -> None:
    """The arguments of `pagedattn bench waste`."""
    parser.add_argument(
        "traces",
        nargs="*",
        metavar="TRACE",
        default=shipped_traces(),
        help=f"{', '.join(shipped_traces())}, or the path of a .csv or .jsonl file (all shipped)",
    )
    parser.add_argument(
        "--slots", type=int, default=160_000, help="KV slots in the pool, one a token (%(default)s)"
    )
    parser.add_argument(
        "--view",
        choices=VIEWS,
        default=VIEWS[0],
        help="requests of up to 4096 tokens, or all that the pool can hold (%(default)s)",
    )
    parser.add_argument(
        "--block-sizes", type=int, nargs="+", default=BLOCK_SIZES, help="slots a block (8 … 128)"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--figures", type=Path, help="draw into this folder, as SVG")


def run(args: Namespace) -> None:
    """Replay, print the tables, and write what is asked for.

    Raises ValueError for wrong input and OSError for a place that cannot be written, before the
    first run.
    """
    block_sizes = list(dict.fromkeys(args.block_sizes))
    selected = prepare(args.traces, args.view, args.slots, block_sizes)
    if args.json:
        args.json.touch()
    if args.figures:
        args.figures.mkdir(parents=True, exist_ok=True)
    results = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(selected) * len(policies(block_sizes)))
        for trace, part in selected.items():
            progress.update(task, description=short(trace))
            results[trace] = survey(
                part, args.slots, block_sizes, lambda policy: progress.advance(task)
            )
    console = Console()
    for trace, part in selected.items():
        console.print(
            f"{short(trace)}, {args.view}: {len(part.kept):,} of {part.num_requests:,} requests; "
            f"max_seq_len {part.max_seq_len:,}; {args.slots:,} slots",
            highlight=False,
            markup=False,
        )
        console.print(runs_table(results[trace]))
    console.print(blocks_table(results))
    if args.figures:
        save_figures(results, block_sizes, args.figures)
    traces = as_json(selected, results)
    write_result(args.json, {"num_slots": args.slots, "view": args.view, "traces": traces})
