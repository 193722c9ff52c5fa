"""Whose code runs: a stage of the library, a student's file, or a stage with a bug in it."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from pagedattn.course.chapters import STAGES, chapter_folders, find_root, shown
from pagedattn.course.names import NamedTest
from pagedattn.course.tasks import ToDo, unfinished_task

_copies = count(1)


class ImplementationError(ValueError):
    """A file that cannot be imported or is not what it should be. The message says why."""


def load_stage(chapter: str) -> ModuleType:
    """The library's own module of a chapter."""
    return importlib.import_module(STAGES[chapter])


def load_fresh(module_name: str) -> ModuleType:
    """A second copy of a module, with classes of its own: to patch one leaves the other alone."""
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None:
        raise ImplementationError(f"there is no module {module_name}")
    return _execute(Path(spec.origin), f"{module_name}_copy{next(_copies)}", {})


def load_file(path: Path, **names: object) -> ModuleType:
    """The module in a file, fresh at each call. Its relative imports are those of `pagedattn`.

    `names` are globals that it finds defined. Raises ImplementationError when the file is missing
    or its import fails; then the message names the line, and the cause is the error itself.
    """
    if not path.is_file():
        raise ImplementationError(f"there is no file {path}")
    try:
        return _execute(path, f"pagedattn.{path.stem}_copy{next(_copies)}", names)
    except (Exception, ToDo) as error:
        todo = unfinished_task(error)
        why = f"to do: {todo}" if todo else f"{type(error).__name__}: {_one_line(error)}"
        raise ImplementationError(
            f"{shown(path)}, line {_line_in(path, error)}, cannot be imported: {why}"
        ) from error


def _execute(path: Path, name: str, names: Mapping[str, object]) -> ModuleType:
    """Runs a file as the module `name`.

    Compiled here, because cached bytecode is trusted by size and time in seconds, which an edit can
    keep. Registered before it runs, because dataclasses look their module up in `sys.modules`.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise ImplementationError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    vars(module).update(names)
    sys.modules[name] = module
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _one_line(error: BaseException) -> str:
    return error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())


def _line_in(path: Path, error: BaseException) -> int | None:
    """The last line of this file that the error passed through."""
    if isinstance(error, SyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename).resolve() == path.resolve()]
    return lines[-1] if lines else None


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
        """A fresh copy of the chapter's module with the bug in it."""
        stage = load_fresh(STAGES[self.chapter])
        self.apply(stage)
        return stage


def load_bug(path: Path) -> Bug:
    """Reads a bug file. Raises ImplementationError when a part of it is missing."""
    module = load_file(path)
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
    """The module that `--stage NN`, `--impl FILE` or `--bug NAME` asks for; the last stage if none.

    Raises ImplementationError (a ValueError) if two are given, for an unknown chapter or bug, and
    for a file that cannot be imported.
    """
    given = {"--stage": stage, "--impl": impl, "--bug": bug}
    options = [option for option, value in given.items() if value is not None]
    if len(options) > 1:
        raise ImplementationError(f"{' and '.join(options)} cannot go together; give one")
    if impl is not None:
        path = Path(impl)
        from_root = find_root() / path  # a notebook runs in a folder of its own
        return load_file(from_root if from_root.exists() and not path.exists() else path)
    if bug is not None:
        bugs = load_bugs(find_root())
        if bug not in bugs:
            raise ImplementationError(f"unknown bug {bug}; known: {', '.join(bugs) or 'none'}")
        return bugs[bug].stage()
    chapter = stage if stage is not None else list(STAGES)[-1]
    if chapter not in STAGES:
        raise ImplementationError(f"unknown stage {chapter}; known: {', '.join(STAGES)}")
    return load_stage(chapter)
