"""``pagedattn replay FILE…``: does a manager answer as the recorded one did?

The operations of a recording are run again, and every answer is compared key by key; the first that
differs is shown. What the words mean stands in ``player``.
"""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pagedattn.course.implementations import resolve_stage
from pagedattn.replay.player import Player
from pagedattn.replay.recording import Json, read_recording

_CHAPTER = "06"
_NOTHING = object()


def add_arguments(parser: ArgumentParser) -> None:
    """The options of ``pagedattn replay``."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON, may be gzipped")
    code = parser.add_mutually_exclusive_group()
    code.add_argument("--stage", metavar="NN", help="the library's manager of this chapter")
    code.add_argument("--impl", type=Path, metavar="PATH", help="the manager in this package")
    code.add_argument("--bug", metavar="NAME", help="a manager with this bug")


def run(args: Namespace) -> int:
    """Replay each file: one line if all answers are the recorded ones, else the first that differs.

    Returns 1 if one differs. Raises RecordingError for a file that is no recording, ValueError for
    a stage without a manager.
    """
    chosen = args.stage or args.impl or args.bug
    stage = resolve_stage(args.stage if chosen else _CHAPTER, args.impl, args.bug)
    if not hasattr(stage, "KVCacheManager"):
        raise ValueError(f"{chosen} has no KVCacheManager; chapter {_CHAPTER} builds one")
    recordings = {path: read_recording(path) for path in args.files}
    status = 0
    for path, scripts in recordings.items():
        difference = replay(scripts, stage)
        if difference is None:
            operations = sum(len(script["ops"]) for script in scripts)
            print(f"{path}: {len(scripts)} scripts, {operations} operations, all as recorded")
        else:
            print(f"{path}: {difference}")
            status = 1
    return status


@dataclass(frozen=True)
class Difference:
    """An answer that is not the recorded one."""

    script: int
    number: int
    operation: Json
    key: str
    found: object
    recorded: object

    def __str__(self) -> str:
        return (
            f"script {self.script}, operation {self.number}, {json.dumps(self.operation)}: "
            f"{self.key}\n    found:    {_shown(self.found)}\n    recorded: {_shown(self.recorded)}"
        )


def replay(scripts: Iterable[Json], stage: ModuleType) -> Difference | None:
    """The first answer of the stage's manager that is not the recorded one; None if none is."""
    for index, script in enumerate(scripts):
        player = Player(script["config"], stage)
        for number, (operation, recorded) in enumerate(
            zip(script["ops"], script["expect"], strict=True)
        ):
            found = player.answer(operation)
            for key in sorted(found.keys() | recorded.keys()):
                mine, theirs = found.get(key, _NOTHING), recorded.get(key, _NOTHING)
                if not _equal(key, mine, theirs):
                    return Difference(index, number, operation, key, mine, theirs)
    return None


def _equal(key: str, found: object, recorded: object) -> bool:
    if key == "error":  # which error it is, and its words, are each manager's own
        return (found is _NOTHING) == (recorded is _NOTHING)
    if isinstance(found, float) and isinstance(recorded, float | int):
        return math.isclose(found, recorded, abs_tol=1e-12)
    return found == recorded


def _shown(value: object) -> str:
    return "nothing" if value is _NOTHING else json.dumps(value)
