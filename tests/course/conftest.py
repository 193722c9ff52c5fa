"""A throw-away course of two chapters, and a third whose stage is a package, so that these tests
stand on no real chapter."""

import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

from pagedattn.course.chapters import STAGES

# What `pytester` imports it forgets after a run, and triton cannot be imported twice.
if find_spec("triton"):
    import pagedattn.kernels  # noqa: F401

CHAPTERS = Path(__file__).parents[2] / "chapters"

SHELF = '''
"""A shelf."""

from dataclasses import dataclass


@dataclass
class Book:
    title: str


class Shelf:
    def __init__(self, size):
        self.size = size
        self.books = []

    def put(self, title):
        """Put a book on the shelf.

        Raises ValueError when it is full.
        """
        # There may be none left.
        if len(self.books) == self.size:
            raise ValueError(f"the shelf is full: {self.size}")
        self.books.append(Book(title))
        return len(self.books)
        # Nothing more.

    # Between the two.
    def take(self):
        return self.books.pop().title
'''

TEST_SHELF = """
import pytest


@pytest.mark.contract
def test_put(stage):
    assert stage.Shelf(2).put("a") == 1, "one book stands on the shelf"


@pytest.mark.contract
@pytest.mark.parametrize("size", [1, 2])
def test_full(stage, size):
    shelf = stage.Shelf(size)
    for _ in range(size):
        shelf.put("a")
    with pytest.raises(ValueError):
        shelf.put("b")


def test_take(stage):
    shelf = stage.Shelf(1)
    shelf.put("a")
    assert shelf.take() == "a"


def test_arithmetic():
    assert 1 + 1 == 2
"""

TEST_CATALOGUE = """
from hypothesis import given, strategies as st


@given(titles=st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_find(stage, titles):
    shelf = stage.Shelf(5)
    for title in titles:
        shelf.put(title)
    assert shelf.find(titles[-1]), "the book that was put last is there"
"""

TASKS = """
module = "{module}.py"

[[task]]
id = "{chapter}.1"
title = "Put"
symbols = ["Shelf.put"]
points = 5
minutes = 10
tests = ["{file}::{test}"]
hint = "append the book, unless the shelf is full"
"""


class Mini:
    """The course's folder, and pytest run in it."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.root = pytester.path
        self.write(
            "pytest.ini", "[pytest]\naddopts = -p pagedattn.course.plugin -p no:cacheprovider"
        )
        self.write("shelf.py", SHELF)
        self.write("catalogue.py", SHELF.replace("A shelf", "A catalogue") + CATALOGUE)
        self.write("chapters/conftest.py", (CHAPTERS / "conftest.py").read_text())
        self.write("chapters/01/test_shelf.py", TEST_SHELF)
        self.write("chapters/02/test_catalogue.py", TEST_CATALOGUE)

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"))
        return path

    def bug(self, name: str, killed_by: str, body: str, chapter: str = "01") -> Path:
        """A bug that replaces `Shelf.put` by a function with this body."""
        text = (
            f'"""{name}: its story."""\n\nSYMPTOM = "wrong"\nKILLED_BY = {killed_by}\n\n\n'
            f"def apply(stage):\n    def put(self, title):\n        {body}\n\n"
            "    stage.Shelf.put = put\n"
        )
        return self.write(f"chapters/{chapter}/bugs/{name}.py", text)

    def student(self, text: str, chapter: str = "01") -> Path:
        return self.write(f"chapters/{chapter}/exercise.py", text)

    def tasks(self) -> None:
        self.write(
            "chapters/01/tasks.toml",
            TASKS.format(module="shelf", chapter=1, file="test_shelf.py", test="test_full[2]"),
        )
        self.write(
            "chapters/02/tasks.toml",
            TASKS.format(module="catalogue", chapter=2, file="test_catalogue.py", test="test_find"),
        )

    def run(self, *arguments: str) -> pytest.RunResult:
        return self.pytester.runpytest_inprocess("-v", *arguments)


CATALOGUE = '''
    def find(self, title):
        """Whether the shelf holds a title."""
        return Book(title) in self.books
'''


@pytest.fixture
def mini(pytester: pytest.Pytester) -> Iterator[Mini]:
    library = dict(STAGES)
    STAGES.clear()
    STAGES.update({"01": "shelf", "02": "catalogue"})
    pytester.syspathinsert()
    yield Mini(pytester)
    STAGES.clear()
    STAGES.update(library)


PACKAGE = {
    "__init__.py": """
        '''An archive.'''

        from .boxes import label
        from .rooms import Box, Shelf

        __all__ = ["Box", "Shelf", "label"]
        """,
    "boxes.py": """
        from dataclasses import dataclass


        @dataclass
        class Box:
            title: str


        def label(title):
            return f"a box of {title}"
        """,
    "rooms.py": """
        import shelf

        from .boxes import Box, label


        class Shelf(shelf.Shelf):
            def put(self, title):
                number = super().put(title)
                self.books[-1] = Box(title)
                return number

            def labels(self):
                '''What is written on the boxes.'''
                return [label(box.title) for box in self.books]
        """,
}
TEST_ARCHIVE = """
def test_labels(stage):
    shelf = stage.Shelf(2)
    shelf.put("maps")
    assert shelf.labels() == ["a box of maps"], "the label says what is inside"


def test_label(stage):
    assert stage.label("maps") == "a box of maps"
"""
ARCHIVE_TASKS = """
module = "archive"

[[task]]
id = "3.1"
title = "Labels"
file = "boxes.py"
symbols = ["label"]
points = 5
minutes = 10
tests = ["test_archive.py::test_label"]
hint = "write what is inside"

[[task]]
id = "3.2"
title = "Shelves"
file = "rooms.py"
symbols = ["Shelf.put", "Shelf.labels"]
points = 5
minutes = 10
tests = ["test_archive.py::test_labels"]
hint = "put boxes on the shelf"
"""


@pytest.fixture
def archive(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> Mini:
    """The course with a chapter 03, whose stage is the package `archive`, and with all tasks."""
    STAGES["03"] = "archive"
    for name, text in PACKAGE.items():
        mini.write(f"archive/{name}", text)
    mini.write("chapters/03/test_archive.py", TEST_ARCHIVE)
    mini.write("chapters/03/tasks.toml", ARCHIVE_TASKS)
    mini.tasks()
    monkeypatch.chdir(mini.root)
    return mini


@pytest.fixture
def words() -> Callable[[pytest.RunResult], dict[str, str]]:
    """What `pytest -v` said of each test, by its id without the folders."""

    def read(result: pytest.RunResult) -> dict[str, str]:
        line = re.compile(r"(?:\S*/)?(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|TO DO)\b")
        found = [line.match(text) for text in result.outlines]
        return {match[1]: match[2] for match in found if match}

    return read
