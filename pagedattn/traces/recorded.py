"""Recorded requests: reading a trace, and keeping the part of it that a model could serve."""

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

COLUMNS = ("arrival_ms", "input_length", "output_length")
HEADERS = (COLUMNS, COLUMNS[1:])  # the second for traces that have no arrival times
VIEWS = ("le4096", "full")


@dataclass(frozen=True)
class Request:
    """One recorded request. Lengths are in tokens, `arrival_ms` in milliseconds.

    Raises ValueError for a length under 1 and for an arrival under 0.
    """

    input_length: int
    output_length: int
    arrival_ms: int | None = None

    def __post_init__(self) -> None:
        for name, value, limit in (
            ("input_length", self.input_length, 1),
            ("output_length", self.output_length, 1),
            ("arrival_ms", self.arrival_ms, 0),
        ):
            if value is not None and value < limit:
                raise ValueError(f"{name} is {value}, but must be at least {limit}")

    @property
    def total_length(self) -> int:
        """Slots in use when the last token is stored."""
        return self.input_length + self.output_length


def shipped_traces() -> list[str]:
    """The names of the traces that come with the package."""
    folder = resources.files("pagedattn.data") / "traces"
    names = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".csv.gz") for name in names if name.endswith(".csv.gz"))


def load_trace(name_or_path: str | Path) -> list[Request]:
    """The requests of a shipped trace, or of a `.csv` or `.csv.gz` file, in file order.

    A string that is the name of a shipped trace means that trace. In a file, the first line is
    `input_length,output_length`, with `arrival_ms,` before it where arrivals are known. Every
    further line holds those whole numbers; arrivals never go back.

    Raises ValueError naming the file, and the line and value where there is one.
    """
    source: Traversable = Path(name_or_path)
    if name_or_path in shipped_traces():
        source = resources.files("pagedattn.data") / "traces" / f"{name_or_path}.csv.gz"
    elif not source.is_file():
        shipped = ", ".join(shipped_traces())
        raise ValueError(f"no trace {str(name_or_path)!r}: neither shipped ({shipped}) nor a file")
    try:
        content = source.read_bytes()
        text = (gzip.decompress(content) if source.name.endswith(".gz") else content).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: cannot be read: {error}") from error
    return _parse(str(source), text.splitlines())


def _parse(source: str, lines: list[str]) -> list[Request]:
    header = tuple(lines[0].split(",")) if lines else ()
    if header not in HEADERS:
        known = " or ".join(repr(",".join(columns)) for columns in HEADERS)
        raise ValueError(f"{source}, line 1: the header is {','.join(header)!r}, not {known}")
    requests: list[Request] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            request = _parse_request(header, line)
            if requests and (request.arrival_ms or 0) < (before := requests[-1].arrival_ms or 0):
                raise ValueError(f"arrival_ms is {request.arrival_ms}, after {before}")
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}") from error
        requests.append(request)
    if not requests:
        raise ValueError(f"{source}: the trace is empty")
    return requests


def _parse_request(header: tuple[str, ...], line: str) -> Request:
    values = line.split(",")
    if len(values) != len(header):
        raise ValueError(f"{line!r} has {len(values)} values, not {len(header)}")
    for name, value in zip(header, values, strict=True):
        # int() alone would also take "1_000", " 12" and digits of other scripts.
        if not (value.isascii() and value.removeprefix("-").isdigit()):
            raise ValueError(f"{name} is {value!r}, not a whole number")
    return Request(**{name: int(value) for name, value in zip(header, values, strict=True)})


def select(requests: Sequence[Request], view: str, num_slots: int) -> tuple[list[Request], int]:
    """The requests that a model with a given context could serve, and its `max_seq_len`.

    `le4096` keeps requests of at most 4096 tokens in all; `max_seq_len` is 4096. `full` keeps those
    within the greatest power of two that is no greater than `num_slots`; `max_seq_len` is the
    longest of them.

    Raises ValueError for an unknown view, an empty trace, and if no request is kept.
    """
    if view not in VIEWS:
        raise ValueError(f"view is {view!r}, but must be one of {', '.join(VIEWS)}")
    if num_slots < 1:
        raise ValueError(f"num_slots is {num_slots}, but must be at least 1")
    if not requests:
        raise ValueError("the trace is empty")
    limit = 4096 if view == "le4096" else 1 << (num_slots.bit_length() - 1)
    kept = [request for request in requests if request.total_length <= limit]
    if not kept:
        shortest = min(request.total_length for request in requests)
        raise ValueError(
            f"view {view} keeps no request: its limit is {limit} tokens, the shortest has "
            f"{shortest}"
        )
    longest = max(request.total_length for request in kept)
    return kept, 4096 if view == "le4096" else longest
