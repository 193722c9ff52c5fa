"""A stage that is a package: its copies share nothing, and a student's folder is one."""

import pickle
import sys
from argparse import Namespace

import pytest

from pagedattn.course.check import run_exercises
from pagedattn.course.implementations import (
    ImplementationError,
    load_fresh,
    load_path,
    resolve_stage,
)

pytest_plugins = ["pytester"]


def loaded(stage):
    """What `sys.modules` holds of a package."""
    return [name for name in sys.modules if f"{name}.".startswith(f"{stage.__name__}.")]


def test_copies_share_nothing(archive):
    import archive as library  # type: ignore[import-not-found]

    one, two = load_fresh("archive"), load_path(archive.root / "archive")
    shelves = [stage.Shelf(1) for stage in (library, one, two)]
    for shelf in shelves:
        shelf.put("maps")
    assert len({type(shelf) for shelf in shelves}) == 3
    assert len({type(shelf.books[0]) for shelf in shelves}) == 3
    one.boxes.Box.title = one.Shelf.take = one.boxes.label = one.rooms.label = None
    for stage in (library, two):
        shelf = stage.Shelf(1)
        shelf.put("maps")
        assert shelf.labels() == ["a box of maps"]
        assert shelf.books == [stage.Box("maps")], "dataclasses compare"
        assert shelf.take() == "maps"
    for stage in (one, two):
        assert stage.Shelf.__module__ == f"{stage.__name__}.rooms"
        assert sorted(loaded(stage)) == [
            stage.__name__,
            f"{stage.__name__}.boxes",
            f"{stage.__name__}.rooms",
        ]


@pytest.mark.parametrize("load", [load_fresh, lambda name: resolve_stage(impl=name)])
def test_objects_of_a_copy_can_be_pickled(archive, load):
    first, second = load("archive"), load("archive")
    for stage in (first, second):
        shelf = stage.Shelf(1)
        shelf.put("maps")
        again = pickle.loads(pickle.dumps(shelf))
        assert type(again) is stage.Shelf
        assert again.books == [stage.Box("maps")]


def test_submodules_are_read_again_at_once(archive, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    boxes, folder = archive.root / "archive/boxes.py", archive.root / "archive"
    text = boxes.read_text()
    for word in ("box", "bag", "can"):  # same size, same second
        boxes.write_text(text.replace("a box of", f"a {word} of"))
        assert load_path(folder).label("maps") == f"a {word} of maps"
    assert sorted(path.name for path in folder.iterdir()) == [
        "__init__.py",
        "boxes.py",
        "rooms.py",
    ], "no __pycache__"


def test_a_submodule_may_be_imported_late_and_reach_up(archive):
    archive.write("mine/late.py", "from ..course.chapters import STAGES\nfrom . import boxes\n")
    archive.write("mine/boxes.py", "import sys\nNAME = WHOSE\n")
    archive.write("mine/__init__.py", "def reach():\n    from . import late\n    return late\n")
    stage = load_path(archive.root / "mine", WHOSE="mine")
    assert loaded(stage) == [stage.__name__]
    assert "01" in stage.reach().STAGES
    assert stage.reach().boxes.NAME == "mine", "submodules find the given names defined"
    assert stage.reach().__name__ == f"{stage.__name__}.late"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1\ndef broken(:\n", r"mine/boxes\.py, line 2, cannot be imported: SyntaxError: "),
        ("x = 1\n\n1 / 0\n", r"mine/boxes\.py, line 3, cannot be imported: ZeroDivisionError"),
        ("from . import cellar\n", r"mine/boxes\.py, line 1, .*: ImportError: cannot import name"),
        ("import pagedattn.cellar\n", r"mine/boxes\.py, line 1, .*: ModuleNotFoundError: No mod"),
        (
            "def f():\n    raise NotImplementedError('task 3.1: go')\n\nf()\n",
            r"mine/boxes\.py, line 2, cannot be imported: to do: task 3\.1: go",
        ),
    ],
)
def test_what_cannot_be_imported(archive, text, why):
    archive.write("mine/boxes.py", text)
    archive.write("mine/first.py", "import shelf\n")
    path = archive.write("mine/__init__.py", "from . import first\n\n\nfrom . import boxes\n")
    before = set(sys.modules)
    with pytest.raises(ImplementationError, match=f"^{why}"):
        resolve_stage(impl="mine")
    assert set(sys.modules) - before <= {"shelf"}, "nothing half imported stays"
    path.unlink()
    with pytest.raises(ImplementationError, match=r"there is no file mine/__init__\.py"):
        resolve_stage(impl="mine")


UNFINISHED = "def label(title):\n    raise NotImplementedError('task 3.1: write what is inside')\n"


def test_the_library_and_its_bugs(archive, words):
    archive.write(
        "chapters/03/bugs/writes_nothing.py",
        """
        '''Its story.'''

        SYMPTOM = "empty labels"
        KILLED_BY = ("test_archive.py::test_labels",)


        def apply(stage):
            stage.rooms.label = lambda title: ""
        """,
    )
    # what a student has begun concerns nobody here
    archive.write("chapters/03/exercise/__init__.py", "1 / 0\n")
    result = archive.run("chapters/03")
    assert words(result) == {
        "test_shelf.py::test_put[archive]": "PASSED",
        "test_shelf.py::test_full[archive-1]": "PASSED",
        "test_shelf.py::test_full[archive-2]": "PASSED",
        "test_archive.py::test_labels[archive]": "PASSED",
        "test_archive.py::test_labels[bug-writes_nothing]": "PASSED",
        "test_archive.py::test_label[archive]": "PASSED",
    }
    assert result.ret == 0


def test_the_students_folder(archive, words):
    run_exercises(Namespace(force=False))
    archive.write("chapters/03/exercise/rooms.py", (archive.root / "archive/rooms.py").read_text())
    result = archive.run("chapters/03", "--student")
    result.stdout.fnmatch_lines(["code under test: chapters/03/exercise"])
    result.stdout.fnmatch_lines(["to do: task 3.1 (2 tests)"])
    said = words(result)
    assert said["test_shelf.py::test_full[archive-2]"] == "PASSED", "a contract from below"
    assert said["test_archive.py::test_labels[archive]"] == "TO DO"
    task = archive.run("chapters/03", "--student", "--task", "3.1")
    assert words(task) == {"test_archive.py::test_label[archive]": "TO DO"}


def test_to_do_inside_a_submodule_is_no_exception(archive, words):
    """A test that expects any exception is not satisfied by code that is not written."""
    run_exercises(Namespace(force=False))
    archive.write(
        "chapters/03/test_raises.py",
        """
        import pytest

        def test_it(stage):
            with pytest.raises(Exception):
                stage.label("maps")
        """,
    )
    said = words(archive.run("chapters/03/test_raises.py", "--student"))
    assert said == {"test_raises.py::test_it[archive]": "TO DO"}


def test_another_folder_or_file(archive, words):
    for name in ("__init__.py", "boxes.py", "rooms.py"):
        archive.write(f"mine/{name}", (archive.root / "archive" / name).read_text())
    archive.write(
        "mine/boxes.py",
        "class Box:\n    def __init__(self, title): self.title = title\n" + UNFINISHED,
    )
    result = archive.run("chapters/03/test_archive.py", "--impl", "mine")
    result.stdout.fnmatch_lines(["code under test: mine", "to do: task 3.1 (2 tests)"])
    archive.write("mine.py", "def label(title):\n    return f'a box of {title}'\n")
    said = words(archive.run("chapters/03/test_archive.py::test_label", "--impl", "mine.py"))
    assert said == {"test_archive.py::test_label[archive]": "PASSED"}


def test_the_students_folder_is_missing_or_broken(archive):
    result = archive.run("chapters/03", "--student")
    result.stderr.fnmatch_lines(["*there is no file *chapters/03/exercise"])
    run_exercises(Namespace(force=False))
    archive.write("chapters/03/exercise/boxes.py", "x = 1\n\nlabel = 1 / 0\n")
    result = archive.run("chapters/03", "--student")
    result.stderr.fnmatch_lines(["*chapters/03/exercise/boxes.py, line 3, cannot be imported: Z*"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
