"""How many blocks sharing saves: samples and beams of recorded requests, beside what the vLLM paper
reports; and small scenarios, block by block.

The measure is the paper's (Kwon et al., SOSP 2023, section 6.3): blocks saved by sharing over
blocks without sharing, both summed over the steps of all generations. Nothing is timed.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pagedattn import viz
from pagedattn.bench.recorded_beams import endless_parents
from pagedattn.bench.result_file import write_result
from pagedattn.bench.scenarios import scenario_table, scenarios
from pagedattn.bench.shared_blocks import Blocks, Done, beam_blocks, most_shared, sample_blocks
from pagedattn.bench.survey import short
from pagedattn.traces import Request, load_trace

TRACE = "sharegpt_len"
NUM_REQUESTS = 40
NUMBERS = (2, 4, 6)
SHORT = 512  # prompts of up to so many tokens are as long on average as the paper's: 161
# Section 6.3: the least and the most, of 2 and of 6 sequences.
PAPER = {
    "samples": {"Alpaca": (0.061, 0.098), "ShareGPT": (0.162, 0.305)},
    "beams": {"Alpaca": (0.376, 0.552), "ShareGPT": (0.443, 0.663)},
}
PAPER_LENGTHS = {"Alpaca": (19, 58), "ShareGPT": (161, 338)}  # figure 11: tokens, mean
Count = Callable[[Sequence[Request], int, int, Done], Blocks]
Results = dict[str, dict[str, dict[int, Blocks]]]  # by view, kind and number


@dataclass(frozen=True)
class View:
    """Those requests of a trace that the view keeps, and some of them that stand for all."""

    name: str
    num_kept: int
    requests: Sequence[Request]

    @property
    def mean_lengths(self) -> tuple[float, float]:
        """Tokens of the prompt and of the answer."""
        return (
            mean(request.input_length for request in self.requests),
            mean(request.output_length for request in self.requests),
        )

    @property
    def num_steps(self) -> int:
        """Steps of all requests: the first token of an answer comes with its prompt."""
        return sum(request.output_length - 1 for request in self.requests)


def views(trace: Sequence[Request], num_requests: int) -> list[View]:
    """All requests, and those with short prompts; of each, so many that stand for all: sorted by
    length and cut into groups of one size, the middle one of each group.

    Raises ValueError when a view has none.
    """
    found = []
    for name, limit in (("all", None), (f"prompts up to {SHORT}", SHORT)):
        kept = [r for r in trace if limit is None or r.input_length <= limit]
        if not kept:
            raise ValueError(f"the trace has no request with a prompt of up to {limit} tokens")
        by_length = sorted(kept, key=lambda request: request.total_length)
        num_groups = min(num_requests, len(kept))
        middles = [(2 * i + 1) * len(kept) // (2 * num_groups) for i in range(num_groups)]
        found.append(View(name, len(kept), [by_length[i] for i in middles]))
    return found


def count_samples(requests: Sequence[Request], n: int, block_size: int, done: Done) -> Blocks:
    """Parallel sampling: n samples of each prompt."""
    return sample_blocks(requests, n, block_size, done)


def count_beams(requests: Sequence[Request], n: int, block_size: int, done: Done) -> Blocks:
    """Beam search of width n with recorded choices; which ones follows from the place."""
    choices = [endless_parents(n, seed) for seed in range(len(requests))]
    return beam_blocks(requests, n, block_size, choices, done)


def count_most(requests: Sequence[Request], n: int, block_size: int, done: Done) -> Blocks:
    """The most that beams could share, by arithmetic."""
    return most_shared(requests, n, block_size)


COUNTS: dict[str, Count] = {
    "samples": count_samples,
    "beams": count_beams,
    "at most": count_most,
}
LABELS = {
    "samples": "parallel sampling",
    "beams": "beam search",
    "at most": "beams at most",
}


def measure(
    requests: Sequence[Request], block_size: int, done: Callable[[str], object] = lambda what: None
) -> dict[str, dict[int, Blocks]]:
    """Blocks summed over all steps, by kind and number of samples or beams of each request.

    ``done`` is called after each step on a cache, with what is counted.
    """
    return {
        kind: {
            n: counted(requests, n, block_size, partial(done, f"{LABELS[kind]}, n = {n}"))
            for n in NUMBERS
        }
        for kind, counted in COUNTS.items()
    }


def sharing_table(results: Results) -> Table:
    """Percent of the blocks saved: a row a kind and view, a column a number of sequences."""
    table = Table("", "", title="Blocks saved by sharing, of those without it")
    for number in NUMBERS:
        table.add_column(f"n = {number}", justify="right")
    for kind, label in LABELS.items():
        for view, by_kind in results.items():
            cells = [f"{blocks.saved:.1%}" for blocks in by_kind[kind].values()]
            table.add_row(label, view, *cells)
        for name, (least, most) in PAPER.get(kind, {}).items():
            table.add_row(label, f"the paper, {name}", f"{least:.1%}", "", f"{most:.1%}")
        table.add_section()
    table.caption = "beams at least: as parallel sampling"
    return table


def as_json(found: Sequence[View], results: Results) -> dict[str, Any]:
    """All figures, unrounded, by view, kind and number."""
    return {
        view.name: {
            "num_kept": view.num_kept,
            "num_requests": len(view.requests),
            "mean_lengths": view.mean_lengths,
            **{
                kind: {str(n): asdict(b) | {"saved": b.saved} for n, b in by_number.items()}
                for kind, by_number in results[view.name].items()
            },
        }
        for view in found
    }


def draw(figures: Mapping[str, Any]) -> Figure:
    """What is saved, by n, beside the paper's ranges; ``figures`` as ``as_json`` gives them."""
    groups: dict[str, dict[str, dict[int, float]]] = {}
    for kind, reported in PAPER.items():
        rows: dict[str, dict[int, float]] = {}
        for name, (least, most) in reported.items():
            prompt, answer = PAPER_LENGTHS[name]
            rows[f"paper, {name}: {prompt} + {answer}"] = {NUMBERS[0]: least, NUMBERS[-1]: most}
        hollow = list(rows)
        for view, measured in figures.items():
            row = "{}: {:,.0f} + {:,.0f}".format(view, *measured["mean_lengths"])
            rows[row] = {int(n): blocks["saved"] for n, blocks in measured[kind].items()}
        groups[LABELS[kind]] = rows
    return viz.draw_sharing_saved(groups, hollow, "Blocks saved (mean tokens: prompt + answer)")


def add_arguments(parser: ArgumentParser) -> None:
    """The arguments of `pagedattn bench sharing`."""
    parser.add_argument(
        "trace", nargs="?", default=TRACE, help="a shipped trace, or a file (%(default)s)"
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=NUM_REQUESTS,
        help="requests generated of each view (%(default)s)",
    )
    parser.add_argument("--block-size", type=int, default=16, help="slots a block (%(default)s)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--figure", type=Path, help="draw into this SVG file")


def run(args: Namespace) -> None:
    """Count, print the tables, and write what is asked for.

    Raises ValueError for wrong input and OSError for a file that cannot be written, before the
    first request.
    """
    for name in ("requests", "block_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} is {getattr(args, name)}; at least 1 is needed")
    trace = load_trace(args.trace)
    found = views(trace, args.requests)
    for path in (args.json, args.figure):
        if path:
            path.touch()
    results: Results = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        longest = (max(r.output_length for r in view.requests) for view in found)
        runs = 2 * len(NUMBERS)  # samples and beams
        task = progress.add_task("", total=runs * sum(length - 1 for length in longest))
        for view in found:
            results[view.name] = measure(
                view.requests,
                args.block_size,
                done=lambda what: progress.update(task, advance=1, description=what),
            )
    small = scenarios()
    console = Console(highlight=False)
    for view in found:
        prompts, answers = view.mean_lengths
        kept = f"{len(view.requests)} of {view.num_kept:,} requests"
        console.print(
            f"{short(args.trace)}, {view.name}: {kept}; mean prompt {prompts:,.0f}, "
            f"answer {answers:,.0f} tokens",
            markup=False,
        )
    console.print(sharing_table(results))
    for view in found:
        copies = results[view.name]["beams"][4].copies
        console.print(
            f"{view.name}: four beams, {copies:,} blocks copied in {view.num_steps:,} steps"
        )
    console.print(scenario_table(small))
    content: dict[str, Any] = {
        "block_size": args.block_size,
        "views": as_json(found, results),
        "scenarios": [asdict(scenario) | {"saved": scenario.saved} for scenario in small],
    }
    if args.figure:
        viz.save(draw(content["views"]), args.figure)
    write_result(args.json, content)
