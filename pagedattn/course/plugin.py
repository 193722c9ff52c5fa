"""pytest for chapters: whose code is under test, which tests run on it, and what a failure means.

    pytest chapters/02                 the library's stage 02; and each bug, on the tests it names
    pytest chapters/02 --student       chapters/02/exercise.py, or the folder exercise, instead
    pytest chapters/02 --impl PATH     any other module, or a package's folder, instead
    pytest chapters/02 --task 2.1      only that task's tests; goes with the two above

A test that meets an unfinished task is reported as to do, not as failed. The exit code is 0 only
when nothing failed and nothing is to do.
"""

import os
from collections import Counter
from collections.abc import Generator
from functools import cache
from importlib import metadata, util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from _pytest.outcomes import OutcomeException

# Triton asks for this when it is imported, which must come after.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from pagedattn.course.chapters import exercise_path, missing_for, shown
from pagedattn.course.implementations import Bug, load_path, load_stage
from pagedattn.course.names import NamedTest
from pagedattn.course.selection import Case, Selection, select
from pagedattn.course.tasks import ToDo, unfinished_task
from pagedattn.course.verdict import judge

_TO_DO = "to do"


class Unfinished(ToDo, OutcomeException):
    """`ToDo` as pytest knows it: a fixture that ends so is finished like one that failed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Whose code is tested, which task, and whether slow tests run."""
    group = parser.getgroup("pagedattn", "pagedattn: whose code the chapters' tests run on")
    whose = group.addoption
    whose("--student", action="store_true", help="the student's chapters/NN/exercise")
    whose("--impl", metavar="PATH", help="the module in this file, or the package in this folder")
    whose("--task", metavar="ID", help="only the tests of this task, for example 2.1")
    whose("--slow", action="store_true", help="run the tests marked slow, too")


class Course:
    """What the hooks share during one run: the selection, and the modules under test."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.selection: Selection = select(config)
        self.student: bool = config.option.student
        self.impl: str | None = config.option.impl
        self._load_path = cache(load_path)
        self._check()

    def _check(self) -> None:
        chapters = self.selection.chapters
        if self.student and self.impl:
            raise ValueError("--student and --impl cannot go together; give one")
        if self.impl and len(chapters) != 1:
            found = ", ".join(chapters) or "none"
            raise ValueError(f"--impl stands for one chapter, name it as in chapters/02 ({found})")
        for chapter in chapters if self.student or self.impl else []:
            if missing := missing_for(chapter):
                raise ValueError(missing)
            self.module(Case(chapter))

    def _path(self, chapter: str) -> Path:
        if self.impl:
            return (self.config.invocation_params.dir / self.impl).resolve()
        return exercise_path(self.selection.folders[chapter])

    def module(self, case: Case) -> ModuleType:
        """The module that a test gets as `stage`."""
        if case.bug:
            return case.bug.stage()
        if self.student or self.impl:
            return self._load_path(self._path(case.chapter), NotImplementedError=Unfinished)
        return load_stage(case.chapter)

    def whose(self) -> str:
        """Whose code is under test, in words."""
        if not (self.student or self.impl):
            return "the library"
        paths = [self._path(chapter) for chapter in self.selection.chapters]
        return ", ".join(shown(path, self.config.rootpath) for path in paths)


COURSE = pytest.StashKey[Course]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Makes the selection. Raises UsageError for options that fit no chapter, task or file."""
    config.addinivalue_line("markers", "contract: later stages must pass this test, too")
    config.addinivalue_line("markers", "slow: only run with --slow")
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
    if util.find_spec("hypothesis"):
        _load_hypothesis_profile()
    try:
        config.stash[COURSE] = Course(config)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def _load_hypothesis_profile() -> None:
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.internal.conjecture import engine

    # Five minutes by default: a mistake that leads into slow runs would leave a student waiting.
    engine.MAX_SHRINKING_SECONDS = 20
    settings.register_profile(
        "pagedattn",
        deadline=None,
        phases=[phase for phase in Phase if phase is not Phase.explain],
        derandomize=True,
        # A stage is a module: it does not change from one example to the next.
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("pagedattn")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Says on which device and on whose code the tests run."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    triton = metadata.version("triton") if util.find_spec("triton") else None
    if triton is None:
        kernels = "no triton"
    elif os.environ.get("TRITON_INTERPRET") == "1":
        kernels = "Triton interpreter"
    else:
        kernels = f"compiled on {gpu}"
    course = config.stash[COURSE]
    task = f", task {course.selection.task.id}" if course.selection.task else ""
    return [
        f"device: {gpu or 'CPU'}; torch {torch.__version__}, triton {triton}; kernels: {kernels}",
        f"code under test: {course.whose()}{task}",
    ]


# First, so that the stage stands first in a test's id.
@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `stage` runs once on each module that the selection has for it."""
    if "stage" not in metafunc.fixturenames:
        return
    selection = metafunc.config.stash[COURSE].selection
    definition = metafunc.definition
    is_contract = definition.get_closest_marker("contract") is not None
    cases = selection.cases(definition.path.resolve(), _function(definition), is_contract)
    if cases:
        metafunc.parametrize("stage", cases, ids=[case.id for case in cases], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves the selected tests, and skips those that are slow or lack what they need here."""
    course = config.stash[COURSE]
    kept = [item for item in items if _is_wanted(item, course)]
    if dropped := [item for item in items if item not in set(kept)]:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
    if session.testsfailed == 0:
        _demand_named_tests(course.selection, kept)
    for item in items:
        case = _case(item)
        if item.get_closest_marker("slow") and not config.option.slow:
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        elif case and (missing := missing_for(case.chapter)):
            item.add_marker(pytest.mark.skip(reason=missing))


def _is_wanted(item: pytest.Item, course: Course) -> bool:
    selection, case = course.selection, _case(item)
    file, function, _ = place = _place(item)
    if selection.chapter_of(file) is None:
        return True
    if selection.task:
        return any(test.covers(*place) for test in selection.task.tests)
    if case is None:
        return selection.is_own(file, function) and not (course.student or course.impl)
    return case.bug is None or any(test.covers(*place) for test in case.bug.killed_by)


def _demand_named_tests(selection: Selection, items: list[pytest.Item]) -> None:
    """Every test that the task, or a bug of a requested chapter, names has been collected."""
    places = [(case.bug, _place(item)) for item in items if (case := _case(item))]
    named: list[tuple[str, Bug | None, NamedTest]] = [
        (f"bug {bug.name}", bug, test)
        for bug in selection.bugs
        for test in bug.killed_by
        if bug.chapter in selection.requested
    ]
    if task := selection.task:
        named += [(f"task {task.id}", None, test) for test in task.tests]
    missing = [
        f"{who} names {test}: there is no such test that takes `stage`"
        for who, bug, test in named
        if not any(bug is its_bug and test.covers(*place) for its_bug, place in places)
    ]
    if missing:
        raise pytest.UsageError("\n".join(missing))


def _place(item: pytest.Item) -> tuple[Path, str, str]:
    """A test's file, its name, and the id of its case without the stage: `3` of `[paged-3]`."""
    callspec, case = getattr(item, "callspec", None), _case(item)
    full = callspec.id if callspec else ""
    return (
        item.path.resolve(),
        _function(item),
        full.removeprefix(case.id).removeprefix("-") if case else full,
    )


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[2].partition("[")[0]


def _case(item: pytest.Item) -> Case | None:
    callspec = getattr(item, "callspec", None)
    case = callspec.params.get("stage") if callspec else None
    return case if isinstance(case, Case) else None


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """On a bug a test passes that fails by an assertion: it has killed the bug."""
    case = _case(pyfuncitem)
    if case is None or case.bug is None:
        return (yield)
    try:
        yield
    except BaseException as error:
        judge(case.bug, pyfuncitem.name, error)
    else:
        judge(case.bug, pyfuncitem.name, None)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Notes the task whose code is still to be written, where that is why a test failed."""
    report = yield
    course = item.config.stash[COURSE]
    if report.failed and call.excinfo and (course.student or course.impl):
        message = unfinished_task(call.excinfo.value)
        if message:
            report.user_properties.append((_TO_DO, message.partition(":")[0]))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: Any) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    """Such a failure is reported as to do."""
    if report.failed and _task_to_do(report):
        return _TO_DO, "t", ("TO DO", {"yellow": True})
    return None


def _task_to_do(report: Any) -> str | None:
    return dict(getattr(report, "user_properties", ())).get(_TO_DO)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Lists the tasks to do, and counts the tests that pass."""
    stats = terminalreporter.stats
    tasks = {report.nodeid: _task_to_do(report) for report in stats.get(_TO_DO, ())}
    if not tasks:
        return
    counts = sorted(Counter(tasks.values()).items())
    passed = len(stats.get("passed", ()))
    failed = len(stats.get("failed", ())) + len(stats.get("error", ()))
    terminalreporter.section("to do", yellow=True)
    listed = ", ".join(f"{task} ({n} test{'s' * (n > 1)})" for task, n in counts)
    terminalreporter.line(f"to do: {listed}")
    terminalreporter.line(
        f"done: {passed} of {passed + failed + len(tasks)} tests pass, "
        f"{len(tasks)} wait for code to be written, {failed or 'none'} failed"
    )
