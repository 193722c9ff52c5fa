"""A chapter's tasks: `tasks.toml`, read and checked.

module = "pagedattn/paged.py"

[[task]]
id = "2.1"
title = "Hand out blocks"
symbols = ["BlockPool.get_new_blocks"]      whose bodies the student writes
points = 10
minutes = 30
tests = ["test_pool.py::test_order"]        they need no later task
hint = "take blocks from the head of the queue"

Where the stage is a package, `module` is its folder, "pagedattn/prefix", and each task says which
of its modules defines the symbols: `file = "pool.py"`.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedattn.course.chapters import chapter_folders, module_files, stage_path
from pagedattn.course.names import NamedTest, find_functions, parse_file

_UNFINISHED = re.compile(r"task \d+\.\d+\b")
_FIELDS: dict[str, type[Any]] = {
    "id": str,
    "title": str,
    "symbols": list,
    "points": int,
    "minutes": int,
    "tests": list,
    "hint": str,
}


@dataclass(frozen=True)
class Task:
    """What a student writes in one go: the bodies of `symbols` in `file`, checked by `tests`."""

    id: str
    title: str
    file: Path
    symbols: tuple[str, ...]
    points: int
    minutes: int
    tests: tuple[NamedTest, ...]
    hint: str

    @property
    def message(self) -> str:
        """What `NotImplementedError` says as long as the task is to do."""
        return f"task {self.id}: {self.hint}"


@dataclass(frozen=True)
class ChapterTasks:
    """The tasks of one chapter, in order, and its module: a file, or the folder of a package."""

    chapter: str
    folder: Path
    module: Path
    tasks: tuple[Task, ...]


def load_tasks(folder: Path) -> ChapterTasks:
    """Reads `folder/tasks.toml`, where `folder` is `chapters/NN` of a checkout.

    Raises ValueError, naming file and task, for a field that is missing, unknown or of the wrong
    type, an id of another chapter or used twice, a file that is not in the package, a symbol that
    the file does not define exactly once or that two tasks share, and a test that does not exist.
    """
    path, chapter = folder / "tasks.toml", folder.name
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return _read(data, folder.resolve(), chapter)
    except FileNotFoundError:
        raise ValueError(f"there is no {path}") from None
    except ValueError as error:
        raise ValueError(f"chapters/{chapter}/tasks.toml: {error}") from error


def _read(data: dict[str, Any], folder: Path, chapter: str) -> ChapterTasks:
    if unknown := data.keys() - {"module", "task"}:
        raise ValueError(f"unknown {', '.join(sorted(unknown))}")
    root = folder.parents[1]
    module = stage_path(chapter, root)
    expected = module.relative_to(root).as_posix()
    if data.get("module") != expected:
        raise ValueError(f"module is {data.get('module')!r}, the chapter's is {expected!r}")
    if not module.exists():
        raise ValueError(f"there is no file {expected}")
    tasks = tuple(_read_task(fields, folder, module) for fields in data.get("task", []))
    if not tasks:
        raise ValueError("there is no [[task]]")
    trees = {file: parse_file(file) for file in module_files(module)}
    owners: dict[tuple[Path, str], str] = {}
    for number, task in enumerate(tasks, start=1):
        if task.id != f"{int(chapter)}.{number}":
            raise ValueError(f"task {number} has id {task.id!r}, not {int(chapter)}.{number}")
        for symbol in task.symbols:
            if owner := owners.get((task.file, symbol)):
                raise ValueError(f"task {task.id}: {symbol} belongs to task {owner}, too")
            owners[task.file, symbol] = task.id
            if (found := len(find_functions(trees[task.file], symbol))) != 1:
                file = task.file.relative_to(root).as_posix()
                raise ValueError(f"task {task.id}: {file} defines {symbol} {found} times")
    return ChapterTasks(chapter, folder, module, tasks)


def _read_task(fields: dict[str, Any], folder: Path, module: Path) -> Task:
    label = f"task {fields.get('id', 'without an id')}"
    kinds = _FIELDS | {"file": str} if module.is_dir() else _FIELDS
    if wrong := fields.keys() ^ kinds.keys():
        name = min(wrong)
        raise ValueError(f"{label}: {name} is {'unknown' if name in fields else 'missing'}")
    for name, kind in kinds.items():
        value = fields[name]
        if type(value) is not kind or not value:
            raise ValueError(f"{label}: {name} is {value!r}, not a {kind.__name__} with content")
        if kind is list and not all(isinstance(entry, str) for entry in value):
            raise ValueError(f"{label}: {name} is {value!r}, not a list of strings")
    if min(fields["points"], fields["minutes"]) < 0:
        raise ValueError(f"{label}: points and minutes are positive")
    if "\n" in fields["hint"]:
        raise ValueError(f"{label}: the hint is one line")
    file = module / fields["file"] if module.is_dir() else module
    if file not in module_files(module):
        raise ValueError(f"{label}: {module.name} has no module {fields['file']}")
    tests = []
    for entry in fields["tests"]:
        test = NamedTest.parse(entry, folder)
        if not test.exists():
            raise ValueError(f"{label}: there is no test {entry}")
        tests.append(test)
    given = {"file": file, "symbols": tuple(fields["symbols"]), "tests": tuple(tests)}
    return Task(**{**fields, **given})


def load_all_tasks(root: Path) -> list[ChapterTasks]:
    """The tasks of every chapter of a checkout that has a `tasks.toml`."""
    folders = chapter_folders(root).values()
    return [load_tasks(folder) for folder in folders if (folder / "tasks.toml").is_file()]


class ToDo(BaseException):
    """`NotImplementedError` as a student's file sees it while its tests run.

    No `Exception`, so that no test takes it for what it expects, and so that Hypothesis ends at
    once instead of looking for the smallest example of code that is not there.
    """


def unfinished_task(error: BaseException) -> str | None:
    """The message of the task, `task 2.3: …`, if it is what the error comes from; else None.

    Looked for in what the error was raised from, in what it replaced, and in groups.
    """
    messages = map(_not_implemented, _origins(error, set()))
    return next((text for text in messages if text and _UNFINISHED.match(text)), None)


def _not_implemented(error: BaseException) -> str | None:
    """What is not implemented, if the error says so.

    The body of a kernel is compiled before it could run, and Triton knows no ``raise``: its error
    holds the statement as ``node``.
    """
    if isinstance(error, NotImplementedError | ToDo):
        return str(error)
    match getattr(error, "node", None):
        case ast.Raise(
            exc=ast.Call(func=ast.Name(id="NotImplementedError"), args=[ast.Constant(str(message))])
        ):
            return message
    return None


def _origins(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _origins(inner, seen)
    yield from _origins(error.__cause__, seen)
    yield from _origins(error.__context__, seen)
