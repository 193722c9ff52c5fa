"""How often a prefix cache hits: recorded prompts through pools of several sizes.

The model is that of `pagedattn.traces.prefix`. Nothing is timed.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pagedattn import viz
from pagedattn.bench.result_file import write_result
from pagedattn.bench.survey import short
from pagedattn.traces import Request, load_trace
from pagedattn.traces.prefix import (
    VARIANTS,
    Hits,
    check_pool,
    check_prefixes,
    infinite_hits,
    prefix_hits,
)

TRACES = ("mooncake_conversation", "mooncake_synthetic")
CAPACITIES = tuple(2**exponent for exponent in range(18, 26))  # tokens
FEWER = CAPACITIES[:5:2]  # small blocks are many, and their runs long
BLOCK_SIZES = {512: CAPACITIES, 64: FEWER, 16: FEWER}
WORDS = {
    "prompt": "full prompt blocks alone take memory",
    "whole": "partial blocks and answers do, too",
}


@dataclass(frozen=True)
class Measured:
    """One trace in blocks of one size."""

    infinite: Hits
    infinite_cap: Hits  # the last token of a prompt is always computed
    runs: dict[int, dict[str, Hits]]  # by capacity in tokens, and variant


Results = dict[str, dict[int, Measured]]  # by trace and block size


def prepare(
    traces: Iterable[str], capacities: Mapping[int, Sequence[int]]
) -> dict[str, list[Request]]:
    """Load the traces and check that every run is possible, before the first one.

    `capacities` are those in tokens, by block size. Raises ValueError for a bad trace, one without
    ids, or two of the same name; for a bad block size; and for a capacity that is not a multiple of
    it or doesn't hold each request.
    """
    loaded: dict[str, list[Request]] = {}
    for trace in dict.fromkeys(traces):
        if short(trace) in map(short, loaded):
            raise ValueError(f"two traces are called {short(trace)}")
        requests = load_trace(trace)
        for block_size, sizes in capacities.items():
            try:
                check_prefixes(requests, block_size)
                for capacity in sizes:
                    if capacity % block_size:
                        raise ValueError(
                            f"a capacity of {capacity} tokens is no whole number of blocks of "
                            f"{block_size}"
                        )
                    for variant in VARIANTS:
                        check_pool(requests, block_size, capacity // block_size, variant)
            except ValueError as error:
                raise ValueError(f"{short(trace)}: {error}") from error
        loaded[trace] = requests
    return loaded


def measure(
    requests: Sequence[Request],
    block_size: int,
    capacities: Sequence[int],
    done: Callable[[], object] = lambda: None,
) -> Measured:
    """Every capacity in both variants. `done` is called after each run."""
    runs: dict[int, dict[str, Hits]] = {}
    for capacity in capacities:
        runs[capacity] = {}
        for variant in VARIANTS:
            runs[capacity][variant] = prefix_hits(
                requests, block_size, capacity // block_size, variant
            )
            done()
    return Measured(
        infinite_hits(requests, block_size),
        infinite_hits(requests, block_size, recompute_last=True),
        runs,
    )


def hits_table(measured: Measured) -> Table:
    """One row a capacity, both variants side by side; below, what a cache that never evicts finds,
    with and without the last token of each prompt."""
    table = Table(
        box=SIMPLE,
        padding=0,  # so that millions of blocks fit into 80 columns
        caption="capped: the same, but the last token of a prompt is always computed",
    )
    for heading in ("capacity,\ntokens", "\nblocks"):
        table.add_column(heading, justify="right")
    for variant in VARIANTS:
        for heading in (f"{variant}:\nhits", "\nhit_tok", "\nevicted"):
            table.add_column(heading, justify="right")
    for capacity, runs in measured.runs.items():
        cells = [cell for hits in runs.values() for cell in _cells(hits)]
        blocks = capacity // measured.infinite.block_size
        table.add_row(f"{capacity:,}", f"{blocks:,}", *cells)
    table.add_section()
    table.add_row("infinite", "", *_cells(measured.infinite))
    table.add_row("capped", "", *_cells(measured.infinite_cap))
    return table


def _cells(hits: Hits) -> tuple[str, str, str]:
    return f"{hits.hit_blocks:,}", f"{hits.token_hit_rate:.6f}", f"{hits.evictions:,}"


def as_json(results: Results) -> dict[str, Any]:
    """All figures, unrounded, by trace and block size."""
    return {
        trace: {
            str(block_size): {
                "infinite": _record(measured.infinite),
                "infinite_cap": _record(measured.infinite_cap),
                "capacities": {
                    str(capacity): {variant: _record(hits) for variant, hits in runs.items()}
                    for capacity, runs in measured.runs.items()
                },
            }
            for block_size, measured in by_size.items()
        }
        for trace, by_size in results.items()
    }


def _record(hits: Hits) -> dict[str, Any]:
    return asdict(hits) | {"hit_tok": hits.token_hit_rate, "hit_blk": hits.block_hit_rate}


def draw(figures: Mapping[str, Any]) -> Figure:
    """Hit rate against capacity, a panel a trace; `figures` as `as_json` gives them.

    Lines for the largest blocks in both variants; for the smallest ones, marks.
    """
    curves: dict[str, dict[str, dict[int, float]]] = {}
    limits = {}
    for trace, by_size in figures.items():
        sizes = sorted(map(int, by_size))
        chosen = [(sizes[-1], variant) for variant in VARIANTS]
        if len(sizes) > 1:
            chosen.append((sizes[0], VARIANTS[0]))
        curves[short(trace)] = {
            f"blocks of {size}: {WORDS[variant]}": {
                int(capacity): runs[variant]["hit_tok"]
                for capacity, runs in by_size[str(size)]["capacities"].items()
            }
            for size, variant in chosen
        }
        limits[short(trace)] = by_size[str(sizes[-1])]["infinite"]["hit_tok"]
    return viz.draw_hit_rates(curves, limits, "Prompt tokens found in the cache")


def add_arguments(parser: ArgumentParser) -> None:
    """The arguments of `pagedattn bench prefix`."""
    parser.add_argument(
        "traces",
        nargs="*",
        metavar="TRACE",
        default=TRACES,
        help=f"{', '.join(TRACES)}, or the path of a .jsonl file (both)",
    )
    parser.add_argument(
        "--block-sizes",
        type=int,
        nargs="+",
        default=list(BLOCK_SIZES),
        help="tokens a block; divisors of 512 (512 64 16)",
    )
    parser.add_argument(
        "--capacities",
        type=int,
        nargs="+",
        help="tokens that the pool holds (2^18, 2^19 … 2^25 for blocks of 512; for others 2^18, "
        "2^20, 2^22)",
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--figure", type=Path, help="draw into this SVG file")


def run(args: Namespace) -> None:
    """Run, print the tables, and write what is asked for.

    Raises ValueError for wrong input and OSError for a file that cannot be written, before the
    first run.
    """
    capacities = {
        size: sorted(set(args.capacities or BLOCK_SIZES.get(size, FEWER)))
        for size in args.block_sizes
    }
    loaded = prepare(args.traces, capacities)
    for path in (args.json, args.figure):
        if path:
            path.touch()
    results: Results = {}
    console = Console(highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        runs = len(loaded) * len(VARIANTS) * sum(map(len, capacities.values()))
        task = progress.add_task("", total=runs)
        for trace, requests in loaded.items():
            results[trace] = {}
            for size, sizes in capacities.items():
                progress.update(task, description=f"{short(trace)}, blocks of {size}")
                results[trace][size] = measure(
                    requests, size, sizes, lambda: progress.advance(task)
                )
    for trace, by_size in results.items():
        for size, measured in by_size.items():
            whole = measured.infinite
            console.print(
                f"{short(trace)}, blocks of {size}: {whole.prompt_tokens:,} prompt tokens, "
                f"{whole.full_blocks:,} full blocks, {whole.cached_blocks:,} distinct; "
                f"infinite hit_blk {whole.block_hit_rate:.6f}",
                markup=False,
            )
            console.print(hits_table(measured))
    traces = as_json(results)
    if args.figure:
        viz.save(draw(traces), args.figure)
    write_result(args.json, {"traces": traces})
