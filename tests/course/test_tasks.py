"""tasks.toml: what it must say, and what is wrong with it otherwise."""

import ast

import pytest

from pagedattn.course.tasks import load_tasks, unfinished_task

pytest_plugins = ["pytester"]


def test_read(mini):
    mini.tasks()
    chapter = load_tasks(mini.root / "chapters/01")
    (task,) = chapter.tasks
    assert chapter.module == task.file == mini.root / "shelf.py"
    assert (task.id, task.symbols, task.points, task.minutes) == ("1.1", ("Shelf.put",), 5, 10)
    assert str(task.tests[0]) == "test_shelf.py::test_full[2]"
    assert task.message == "task 1.1: append the book, unless the shelf is full"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("Shelf.put", "Shelf.putt", "task 1.1: shelf.py defines Shelf.putt 0 times"),
        ("::test_full[2]", "::test_empty", "task 1.1: there is no test test_shelf.py::test_empty"),
        ("test_shelf.py", "test_none.py", "there is no test test_none.py::test_full"),
        ("::test_full[2]", "", "'test_shelf.py' should read"),
        ('"1.1"', '"2.1"', "task 1 has id '2.1', not 1.1"),
        ("shelf.py", "catalogue.py", "module is 'catalogue.py', the chapter's is 'shelf.py'"),
        ("points = 5\n", "", "task 1.1: points is missing"),
        ("points = 5", 'points = "5"', "task 1.1: points is '5', not a int"),
        ("points = 5", "points = -5", "task 1.1: points and minutes are positive"),
        ("points = 5", "points = 5\nstars = 5", "task 1.1: stars is unknown"),
        ("points = 5", 'points = 5\nfile = "shelf.py"', "task 1.1: file is unknown"),
        ('"Shelf.put"', '"Shelf.put", "Shelf.put"', "Shelf.put belongs to task 1.1, too"),
        ('["Shelf.put"]', "[1]", "symbols is [1], not a list of strings"),
        ('"Put"', '""', "title is ''"),
        ("append the book", "append\\nthe book", "the hint is one line"),
        ("[[task]]", "[[job]]", "unknown job"),
        ("[[task]]", "[[task]", "toml"),
    ],
)
def test_mistakes(mini, old, new, why):
    mini.tasks()
    path = mini.root / "chapters/01/tasks.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError) as error:
        load_tasks(path.parent)
    assert why in str(error.value)
    assert "chapters/01/tasks.toml" in str(error.value)


def test_an_id_used_twice(mini):
    mini.tasks()
    path = mini.root / "chapters/01/tasks.toml"
    text = path.read_text()
    path.write_text(text + text[text.index("[[task]]") :].replace("Shelf.put", "Shelf.take"))
    with pytest.raises(ValueError, match=r"task 2 has id '1\.1', not 1\.2"):
        load_tasks(path.parent)


def test_unfinished():
    todo = NotImplementedError("task 2.3: go")
    assert unfinished_task(todo) == "task 2.3: go"
    assert unfinished_task(ExceptionGroup("g", [ValueError(), todo])) == "task 2.3: go"
    assert unfinished_task(NotImplementedError("later")) is None
    assert unfinished_task(ValueError("task 2.3: go")) is None
    circle = ValueError()
    circle.__cause__ = circle
    assert unfinished_task(circle) is None


def test_unfinished_kernels():
    """Triton compiles the body instead of running it, and shows the statement that it cannot."""

    class CompilationError(Exception):
        def __init__(self, statement):
            self.node = ast.parse(statement).body[0]

    inner = CompilationError('raise NotImplementedError(\n    "task 5.2: walk "\n    "the keys"\n)')
    assert unfinished_task(inner) == "task 5.2: walk the keys"
    outer = CompilationError("x = f(y)")
    outer.__cause__ = inner
    assert unfinished_task(outer) == "task 5.2: walk the keys"
    for statement in (
        'raise NotImplementedError("later")',
        'raise ValueError("task 5.2: walk the keys")',
        "raise NotImplementedError",
        "raise",
        "1 / 0",
    ):
        assert unfinished_task(CompilationError(statement)) is None
