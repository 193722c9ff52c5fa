"""Results that the text states and that a reader cannot get on any machine, kept with their proof.

One JSON file a result, in `chapters/NN/evidence/`: the command, the card, the versions, the date,
the SHA-256 of the sources that the result speaks of, and the result itself. When one of those
sources changes, `check` says so: the result must then be measured again.
"""

import datetime
import json
import platform
from collections.abc import Iterable
from hashlib import sha256
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

_FIELDS = {"command", "card", "versions", "date", "sources", "result"}


def record(path: Path, command: str, sources: Iterable[str], result: Any, root: Path) -> None:
    """Writes one result, measured here and now by `command`.

    `sources` are paths seen from `root`, the checkout; `result` is anything that JSON can hold.
    Raises ValueError for a source that is not there.
    """
    evidence = {
        "command": command,
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "versions": _versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "sources": {source: _checksum(root / source) for source in sorted(sources)},
        "result": result,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(evidence, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if util.find_spec("triton"):
        versions["triton"] = metadata.version("triton")
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def _checksum(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"there is no source {path}")
    return sha256(path.read_bytes()).hexdigest()


def check(root: Path) -> list[str]:
    """What is wrong with the evidence of a checkout, one line each: stale, broken, incomplete."""
    problems = []
    for path in sorted(root.glob("chapters/*/evidence/*.json")):
        name = path.relative_to(root)
        try:
            problems += [f"{name}: {problem}" for problem in _problems(path, root)]
        except ValueError as error:
            problems.append(f"{name}: {error}")
    return problems


def _problems(path: Path, root: Path) -> list[str]:
    evidence = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(evidence, dict) or evidence.keys() != _FIELDS:
        return [f"its fields are not {', '.join(sorted(_FIELDS))}"]
    if not evidence["sources"]:
        return ["it names no source, so it could never be out of date"]
    return [
        f"{source} has changed since {evidence['date']}; run again: {evidence['command']}"
        for source, checksum in evidence["sources"].items()
        if _checksum(root / source) != checksum
    ]
