"""Reading traces: those that come with the package, and files of the same two formats.

A `.csv` file starts with the line `input_length,output_length`, with `arrival_ms,` before it where
arrivals are known. Every further line holds those whole numbers.

A `.jsonl` file has the format of Mooncake (Qin et al., FAST 2025): every line is an object with the
keys `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`.

Either may be packed with gzip (`.csv.gz`, `.jsonl.gz`). Arrivals never go back.
"""

import gzip
import json
import zlib
from collections.abc import Callable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pagedattn.traces.recorded import Request

COLUMNS = ("arrival_ms", "input_length", "output_length")
HEADERS = (COLUMNS, COLUMNS[1:])  # the second for traces that have no arrival times
KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
SUFFIXES = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz")


def shipped_traces() -> list[str]:
    """The names of the traces that come with the package."""
    return sorted(_shipped_files())


def _shipped_files() -> dict[str, Traversable]:
    folder = resources.files("pagedattn.data") / "traces"
    files = (entry for entry in folder.iterdir() if entry.name.endswith(SUFFIXES))
    return {file.name.partition(".")[0]: file for file in files}


def load_trace(name_or_path: str | Path) -> list[Request]:
    """The requests of a shipped trace, or of a file, in file order.

    A string that is the name of a shipped trace means that trace.

    Raises ValueError naming the file, and the line and value where there is one.
    """
    source: Traversable = Path(name_or_path)
    shipped = _shipped_files()
    if isinstance(name_or_path, str) and name_or_path in shipped:
        source = shipped[name_or_path]
    elif not source.is_file():
        names = ", ".join(sorted(shipped))
        raise ValueError(f"no trace {str(name_or_path)!r}: neither shipped ({names}) nor a file")
    elif not source.name.endswith(SUFFIXES):
        raise ValueError(f"{source}: the name must end with one of {', '.join(SUFFIXES)}")
    try:
        content = source.read_bytes()
        text = (gzip.decompress(content) if source.name.endswith(".gz") else content).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: cannot be read: {error}") from error
    parse = _parse_jsonl if source.name.removesuffix(".gz").endswith(".jsonl") else _parse_csv
    requests = parse(str(source), text.splitlines())
    if not requests:
        raise ValueError(f"{source}: the trace is empty")
    return requests


def _parse_csv(source: str, lines: list[str]) -> list[Request]:
    header = tuple(lines[0].split(",")) if lines else ()
    if header not in HEADERS:
        known = " or ".join(repr(",".join(columns)) for columns in HEADERS)
        raise ValueError(f"{source}, line 1: the header is {','.join(header)!r}, not {known}")
    return _parse_lines(source, lines[1:], 2, lambda line: _request_of_row(header, line))


def _parse_jsonl(source: str, lines: list[str]) -> list[Request]:
    return _parse_lines(source, lines, 1, _request_of_object)


def _parse_lines(
    source: str, lines: list[str], first: int, parse: Callable[[str], Request]
) -> list[Request]:
    requests: list[Request] = []
    for number, line in enumerate(lines, start=first):
        try:
            request = parse(line)
            if requests and (request.arrival_ms or 0) < (before := requests[-1].arrival_ms or 0):
                raise ValueError(f"an arrival at {request.arrival_ms} ms after one at {before} ms")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{source}, line {number}: {error}") from error
        requests.append(request)
    return requests


def _request_of_row(header: tuple[str, ...], line: str) -> Request:
    values = line.split(",")
    if len(values) != len(header):
        raise ValueError(f"{line!r} has {len(values)} values, not {len(header)}")
    for name, value in zip(header, values, strict=True):
        # int() alone would also take "1_000", " 12" and digits of other scripts.
        if not (value.isascii() and value.removeprefix("-").isdigit()):
            raise ValueError(f"{name} is {value!r}, not a whole number")
    numbers = {name: int(value) for name, value in zip(header, values, strict=True)}
    return Request(numbers["input_length"], numbers["output_length"], numbers.get("arrival_ms"))


def _request_of_object(line: str) -> Request:
    try:
        pairs = json.loads(line, object_pairs_hook=list)  # a dict would hide a key given twice
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{line[:60]!r} is not JSON: {error.msg} at character {error.colno}"
        ) from error
    if not line.lstrip().startswith("{"):
        raise ValueError(f"{line[:60]!r} is not an object")
    if sorted(name for name, _ in pairs) != sorted(KEYS):
        raise ValueError(f"the keys are {[name for name, _ in pairs]}, not {list(KEYS)}")
    values: dict[str, Any] = dict(pairs)
    for name in KEYS[:3]:
        _check_whole(name, values[name])
    if not isinstance(values["hash_ids"], list):
        raise ValueError(f"hash_ids is {values['hash_ids']!r}, not a list")
    for hash_id in values["hash_ids"]:
        _check_whole("one of hash_ids", hash_id)
        if hash_id.bit_length() > 63:
            raise ValueError(f"one of hash_ids is {hash_id}; ids are below 2**63")
    return Request(
        values["input_length"],
        values["output_length"],
        values["timestamp"],
        tuple(values["hash_ids"]),
    )


def _check_whole(name: str, value: object) -> None:
    # bool is a kind of int in Python, but true is no length.
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, not a whole number")
