"""Which tests run, on which stages.

A chapter is requested when its folder, or one above it, is an argument of pytest. Then its own
tests run on its stage. Where the stage is a cache (`chapters.is_cache`), so do the tests marked
`contract` of every chapter below it, whose folders are added to what pytest collects. A file or a
test that is named by itself runs on its own chapter's stage only; a name with brackets,
`test_x[paged]`, is one case as a report printed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from pagedattn.course.chapters import chapter_folders, is_cache, stage_name
from pagedattn.course.implementations import Bug, ImplementationError, load_bugs
from pagedattn.course.names import NamedTest
from pagedattn.course.tasks import Task, load_all_tasks


@dataclass(frozen=True)
class Case:
    """What one run of a test gets as its `stage`: a chapter's module, perhaps with a bug in it."""

    chapter: str
    bug: Bug | None = None

    @property
    def id(self) -> str:
        return f"bug-{self.bug.name}" if self.bug else stage_name(self.chapter)


@dataclass(frozen=True)
class Selection:
    """What the command line asked for."""

    folders: dict[str, Path]
    requested: frozenset[str]
    files: tuple[Path, ...]
    names: tuple[NamedTest, ...]
    bugs: tuple[Bug, ...]
    task: Task | None

    @property
    def chapters(self) -> list[str]:
        """The chapters whose own stage is under test."""
        files = [*self.files, *(name.file for name in self.names)]
        named = {self.chapter_of(file) for file in files}
        return [c for c in self.folders if c in self.requested or c in named]

    def chapter_of(self, file: Path) -> str | None:
        """The chapter that a test file belongs to."""
        for chapter, folder in self.folders.items():
            if file.is_relative_to(folder):
                return chapter
        return None

    def is_own(self, file: Path, function: str) -> bool:
        """Whether this test was asked for on its own chapter's stage."""
        return (
            self.chapter_of(file) in self.requested
            or file in self.files
            or any(name.names(file, function) for name in self.names)
        )

    def cases(self, file: Path, function: str, contract: bool) -> list[Case]:
        """The stages, and stages with a bug, that a test with the argument `stage` runs on."""
        own = self.chapter_of(file)
        if own is None:
            return []
        one_case = any(name.case and name.names(file, function) for name in self.names)
        is_own = self.is_own(file, function)
        stages = [
            chapter
            for chapter in self.folders
            if (chapter == own and is_own)
            or (
                chapter > own
                and contract
                and is_cache(chapter)
                and (one_case or chapter in self.requested)
            )
        ]
        bugs = [
            bug
            for bug in self.bugs
            if any(test.names(file, function) for test in bug.killed_by)
            and (one_case or bug.chapter in self.requested or (bug.chapter == own and is_own))
        ]
        return [
            *(Case(chapter) for chapter in stages),
            *(Case(b.chapter, b) for b in bugs),
        ]


def select(config: pytest.Config) -> Selection:
    """Reads the command line, and adds to `config.args` the folders whose contracts are wanted.

    Raises ValueError for an unknown task, a broken `tasks.toml` or a broken bug.
    """
    folders = {c: path.resolve() for c, path in chapter_folders(config.rootpath).items()}
    requested: set[str] = set()
    files, names = [], []
    for argument in config.args:
        file, colons, _ = argument.partition("::")
        path = (config.invocation_params.dir / file).resolve()
        if colons:
            names.append(NamedTest.parse(argument, config.invocation_params.dir))
        elif path.is_dir():
            requested |= {c for c, folder in folders.items() if folder.is_relative_to(path)}
        else:
            files.append(path)
    if task := _find_task(config, requested):
        config.args[:] = list(dict.fromkeys(str(test.file) for test in task.tests))
    elif caches := set(filter(is_cache, requested)):
        config.args += [
            str(folder)
            for chapter, folder in folders.items()
            if chapter < max(caches) and chapter not in requested
        ]
    library = not (config.option.student or config.option.impl or task)
    wanted = library and (requested or files or names)
    bugs = load_bugs(config.rootpath).values() if wanted else ()
    return Selection(folders, frozenset(requested), tuple(files), tuple(names), tuple(bugs), task)


def _find_task(config: pytest.Config, requested: set[str]) -> Task | None:
    wanted = config.option.task
    if wanted is None:
        return None
    tasks = {
        task.id: (chapter.chapter, task)
        for chapter in load_all_tasks(config.rootpath)
        for task in chapter.tasks
    }
    if wanted not in tasks:
        raise ImplementationError(f"unknown task {wanted}; known: {', '.join(tasks) or 'none'}")
    chapter, task = tasks[wanted]
    if chapter not in requested:
        raise ImplementationError(
            f"task {wanted} belongs to chapter {chapter}: pytest chapters/{chapter} --task {wanted}"
        )
    requested.intersection_update({chapter})
    return task
