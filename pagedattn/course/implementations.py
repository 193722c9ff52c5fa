"""Whose code runs: a stage of the library, a student's own, or a stage with a bug in it."""

import importlib
import importlib.util
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from pagedattn.course.chapters import (
    STAGES,
    chapter_folders,
    default_chapter,
    find_root,
    missing_for,
    module_files,
    shown,
)
from pagedattn.course.loading import execute
from pagedattn.course.names import NamedTest
from pagedattn.course.tasks import ToDo, unfinished_task

_copies = count(1)


class ImplementationError(ValueError):
    """A file or folder that cannot be imported or is not what it should be; it says why."""


def load_stage(chapter: str) -> ModuleType:
    """The library's own module or package of a chapter.

    Raises ImplementationError where it cannot run: kernels need triton.
    """
    if missing := missing_for(chapter):
        raise ImplementationError(missing)
    return importlib.import_module(STAGES[chapter])


def load_fresh(module_name: str) -> ModuleType:
    """A second copy of a module or package, with classes of its own: to patch one leaves the other
    alone."""
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None:
        raise ImplementationError(f"there is no module {module_name}")
    return execute(Path(spec.origin), f"{module_name}_copy{next(_copies)}", {})


def load_path(path: Path, **names: object) -> ModuleType:
    """The module in a file, or the package in a folder, fresh at each call.

    Relative imports of a file are those of `pagedattn`. `names` are globals that every module finds
    defined. Raises ImplementationError when the file is missing or its import fails; then the
    message names file and line, and the cause is the error itself.
    """
    file = path / "__init__.py" if path.is_dir() else path
    if not file.is_file():
        raise ImplementationError(f"there is no file {file}")
    try:
        return execute(file, f"pagedattn.{path.stem}_copy{next(_copies)}", names)
    except (Exception, ToDo) as error:
        todo = unfinished_task(error)
        why = f"to do: {todo}" if todo else f"{type(error).__name__}: {_one_line(error)}"
        raise ImplementationError(f"{_place(path, error)} cannot be imported: {why}") from error


def _one_line(error: BaseException) -> str:
    return error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())


def _place(path: Path, error: BaseException) -> str:
    """The last line of this file, or of the files of this folder, that the error passed through."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append((error.filename, error.lineno))
    files = {file.resolve(): file for file in module_files(path)}
    for name, line in reversed(lines):
        if file := files.get(Path(name).resolve()):
            return f"{shown(file)}, line {line},"
    return shown(path)


@dataclass(frozen=True)
class Bug:
    """One file of `chapters/NN/bugs/`.

    `story` says what goes wrong and where it did in the field, `symptom` says it in one line,
    `killed_by` are the tests that must fail on it.
    """

    name: str
    path: Path
    chapter: str
    story: str
    symptom: str
    killed_by: tuple[NamedTest, ...]
    apply: Callable[[ModuleType], None]

    def stage(self) -> ModuleType:
        """A fresh copy of the chapter's stage with the bug in it."""
        stage = load_fresh(STAGES[self.chapter])
        self.apply(stage)
        return stage


def load_bug(path: Path) -> Bug:
    """Reads a bug file. Raises ImplementationError when a part of it is missing."""
    module = load_path(path)
    parts: dict[str, Any] = {
        "a docstring that tells its story": module.__doc__,
        "SYMPTOM": getattr(module, "SYMPTOM", None),
        "KILLED_BY": getattr(module, "KILLED_BY", None),
        "a function apply(stage)": getattr(module, "apply", None),
    }
    if missing := [part for part, value in parts.items() if not value]:
        raise ImplementationError(f"the bug {shown(path)} lacks {', '.join(missing)}")
    story, symptom, killed_by, apply = parts.values()
    if not isinstance(symptom, str) or "\n" in symptom:
        raise ImplementationError(f"the bug {shown(path)}: SYMPTOM is {symptom!r}, not one line")
    if not isinstance(killed_by, tuple):
        raise ImplementationError(f"the bug {shown(path)}: KILLED_BY is {killed_by!r}, no tuple")
    folder = path.resolve().parents[1]
    tests = tuple(NamedTest.parse(entry, folder) for entry in killed_by)
    return Bug(path.stem, path, folder.name, story, symptom, tests, apply)


def load_bugs(root: Path) -> dict[str, Bug]:
    """All bugs of a checkout by name, in order. Raises ImplementationError if two share a name."""
    bugs: dict[str, Bug] = {}
    for folder in chapter_folders(root).values():
        for path in sorted(folder.glob("bugs/*.py")):
            bug = load_bug(path)
            if bug.name in bugs:
                raise ImplementationError(
                    f"two bugs are called {bug.name}: {shown(bugs[bug.name].path)}, {shown(path)}"
                )
            bugs[bug.name] = bug
    return bugs


def resolve_stage(
    stage: str | None = None, impl: str | Path | None = None, bug: str | None = None
) -> ModuleType:
    """What `--stage NN`, `--impl PATH` or `--bug NAME` asks for; else `default_chapter`.

    PATH is a file or the folder of a package. Raises ImplementationError (a ValueError) if two are
    given, for an unknown chapter or bug, and for what cannot be imported.
    """
    given = {"--stage": stage, "--impl": impl, "--bug": bug}
    options = [option for option, value in given.items() if value is not None]
    if len(options) > 1:
        raise ImplementationError(f"{' and '.join(options)} cannot go together; give one")
    if impl is not None:
        path = Path(impl)
        from_root = find_root() / path  # a notebook runs in a folder of its own
        return load_path(from_root if from_root.exists() and not path.exists() else path)
    if bug is not None:
        bugs = load_bugs(find_root())
        if bug not in bugs:
            raise ImplementationError(f"unknown bug {bug}; known: {', '.join(bugs) or 'none'}")
        return bugs[bug].stage()
    chapter = stage if stage is not None else default_chapter()
    if chapter not in STAGES:
        raise ImplementationError(f"unknown stage {chapter}; known: {', '.join(STAGES)}")
    return load_stage(chapter)
