"""The promises that every chapter's own tasks, exercise and questions keep."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from pagedattn.course import exercise
from pagedattn.course.chapters import chapter_folders, exercise_path, find_root
from pagedattn.course.implementations import load_path
from pagedattn.course.predict import read_questions
from pagedattn.course.tasks import ChapterTasks, Task, load_all_tasks

pytest_plugins = ["pytester"]

ROOT = find_root()
TASKS = [(chapter, task) for chapter in load_all_tasks(ROOT) for task in chapter.tasks]
each_task = pytest.mark.parametrize(("chapter", "task"), TASKS, ids=[t.id for _, t in TASKS])


def write(folder: Path, chapter: ChapterTasks, tasks: Sequence[Task]) -> Path:
    """Writes the chapter's exercise with these tasks to do; returns its path."""
    for name, text in exercise.generate(chapter, tasks).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder / exercise_path(chapter.folder).name


def run(
    pytester: pytest.Pytester, chapter: ChapterTasks, task: Task, unfinished: list[Task]
) -> dict[str, list[str]]:
    """The task's tests on the library's module without some bodies: their names by outcome."""
    impl = write(pytester.path, chapter, unfinished)
    config = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider")
    result = pytester.inline_run(
        *config, str(chapter.folder), "--impl", str(impl), "--task", task.id
    )
    passed, _, failed = result.listoutcomes()
    return {
        "passed": [report.nodeid for report in passed],
        "to do": [r.nodeid for r in failed if dict(r.user_properties).get("to do")],
        "failed": [r.nodeid for r in failed if not dict(r.user_properties).get("to do")],
    }


@each_task
def test_a_tasks_tests_need_no_later_task(pytester, chapter, task):
    later = list(chapter.tasks[chapter.tasks.index(task) + 1 :])
    if not later:
        pytest.skip("the last task")
    outcomes = run(pytester, chapter, task, later)
    assert outcomes["to do"] == outcomes["failed"] == []
    assert outcomes["passed"]


@each_task
def test_a_tasks_tests_need_the_task(pytester, chapter, task):
    outcomes = run(pytester, chapter, task, [task])
    assert outcomes["passed"] == outcomes["failed"] == []
    assert outcomes["to do"]


@pytest.mark.parametrize("chapter", load_all_tasks(ROOT), ids=lambda chapter: chapter.chapter)
def test_an_exercise_can_be_imported(chapter, tmp_path):
    assert load_path(write(tmp_path, chapter, chapter.tasks)).build_cache


@pytest.mark.parametrize("folder", chapter_folders(ROOT).values(), ids=lambda folder: folder.name)
def test_the_questions_can_be_read(folder):
    assert len(read_questions((folder / "predict.toml").read_text(encoding="utf-8"))) >= 4
