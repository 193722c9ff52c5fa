"""Results that the text states and that a reader cannot get on any machine, kept with their proof.

One JSON file a result, in `chapters/NN/evidence/`: the command, the card, the versions, the date,
the SHA-256 of the sources that the result speaks of, and the result itself. When one of those
sources changes, `check` says so: the result must then be measured again.
"""

import datetime
import json
import platform
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable
from hashlib import sha256
from importlib import metadata, util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import torch

from pagedattn.course.chapters import chapter_folders, find_root, module_files, stage_path

_SHARED = (
    "attention",
    "batch",
    "cache",
    "config",
    "poison",
    "whole_number",
)  # what every stage stands on

_FIELDS = {"command", "card", "versions", "date", "sources", "result"}


def run_evidence(args: Namespace) -> int:
    """`pagedattn evidence`: run every chapter's tests on the GPU and record how they went.

    A chapter's sources are its tests and those of the chapters below, the stages up to its own and
    what they share. Raises ValueError without a GPU. Returns 1 if a test failed; then that
    chapter's evidence stays as it was.
    """
    if not torch.cuda.is_available():
        raise ValueError("torch sees no GPU here; evidence comes from one")
    root, sources = find_root(), [f"pagedattn/{name}.py" for name in _SHARED]
    failed = False
    for chapter, folder in chapter_folders(root).items():
        files = [*module_files(stage_path(chapter, root)), *folder.glob("test_*.py")]
        sources += [path.relative_to(root).as_posix() for path in files]
        counts = _run_tests(folder)
        print(f"chapters/{chapter}: {counts}")
        if counts["failed"] or not counts["passed"]:
            failed = True
            continue
        path = folder / "evidence" / "gpu_tests.json"
        record(path, f"pytest chapters/{chapter}", sources, counts, root)
    return int(failed)


def _run_tests(folder: Path) -> dict[str, int]:
    """Runs pytest on a folder; how many tests passed, failed and were skipped."""
    with TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = ["-m", "pytest", "-q", "-n", "auto", f"--junitxml={report}", str(folder)]
        subprocess.run([sys.executable, *command], check=False)
        suite = next(ElementTree.parse(report).iter("testsuite"))
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


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
