"""How much of the reserved memory holds tokens: reservation policies on one recorded trace.

The model is that of `pagedattn.traces`; here its figures are put side by side.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pagedattn.traces import (
    VIEWS,
    Metrics,
    Paged,
    Request,
    ReserveMax,
    load_trace,
    replay,
    select,
    shipped_traces,
)


def measure_waste(
    requests: Sequence[Request], num_slots: int, max_seq_len: int, block_size: int
) -> dict[str, Metrics]:
    """The same requests through the same pool under each policy, by the policy's name.

    `max` comes first. Raises ValueError if the pool cannot hold a request.
    """
    policies = (ReserveMax(num_slots, max_seq_len), Paged(num_slots, block_size))
    return {policy.name: replay(requests, policy) for policy in policies}


def waste_table(results: Mapping[str, Metrics]) -> Table:
    """One column a policy. The first policy is what the others are compared with."""
    table = Table()
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    runs = list(results.values())
    first = next(iter(results))
    first_running = runs[0].saturated_mean_running
    rows = {
        "used / reserved slots": [_percent(run.used_of_reserved) for run in runs],
        "used slots, mean": [f"{run.mean_used:,.0f}" for run in runs],
        "reserved slots, mean": [f"{run.mean_reserved:,.0f}" for run in runs],
        "used / all slots *": [_percent(run.saturated_used_of_pool) for run in runs],
        "running requests, mean *": [_number(run.saturated_mean_running) for run in runs],
        f"  times {first} *": [_number(run.saturated_mean_running / first_running) for run in runs],
        "running requests, peak": [f"{run.peak_running:,}" for run in runs],
        "steps": [f"{run.num_steps:,}" for run in runs],
        "preemptions": [f"{run.num_preemptions:,}" for run in runs],
    }
    for label, cells in rows.items():
        table.add_row(label, *cells)
    table.caption = "* in steps in which a request waits"
    return table


def _number(value: float) -> str:
    return "-" if isnan(value) else f"{value:,.2f}"


def _percent(share: float) -> str:
    return "-" if isnan(share) else f"{share:.2%}"


def add_arguments(parser: ArgumentParser) -> None:
    """The arguments of `pagedattn trace`."""
    parser.add_argument(
        "trace", help=f"{', '.join(shipped_traces())}, or the path of a .csv or .jsonl file"
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
    parser.add_argument("--block-size", type=int, default=16, help="slots a block (%(default)s)")


def run(args: Namespace) -> None:
    """Print the table. Raises ValueError for a bad trace, and for a pool that is too small."""
    requests = load_trace(args.trace)
    kept, max_seq_len = select(requests, args.view, args.slots)
    table = waste_table(measure_waste(kept, args.slots, max_seq_len, args.block_size))
    name = args.trace if args.trace in shipped_traces() else Path(args.trace).name
    console = Console()
    console.print(
        f"{name}, {args.view}: {len(kept):,} of {len(requests):,} requests; "
        f"max_seq_len {max_seq_len:,}; {args.slots:,} slots",
        highlight=False,
        markup=False,
    )
    console.print(table)
