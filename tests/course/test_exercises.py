"""exercise.py: the module without some bodies, and a student's work is never lost."""

import ast
from argparse import Namespace
from pathlib import Path

import pytest

from pagedattn.course import exercise
from pagedattn.course.check import run_exercises
from pagedattn.course.exercise import Written
from pagedattn.course.implementations import load_path
from pagedattn.course.names import find_functions
from pagedattn.course.tasks import Task, load_tasks

pytest_plugins = ["pytester"]


def task(*symbols: str, hint: str = "go") -> Task:
    return Task("1.1", "t", Path("mine.py"), symbols, 1, 1, (), hint)


def test_only_the_body_changes(mini):
    mini.tasks()
    (text,) = exercise.generate(load_tasks(mini.root / "chapters/01")).values()
    header, _, body = text.partition("\n\n")
    assert all(line.startswith("#") for line in header.splitlines())
    assert "pytest chapters/01 --student" in header
    expected = (mini.root / "shelf.py").read_text()
    start = expected.index("        # There may be none left.")
    end = expected.index("\n    # Between the two.")
    todo = (
        '        raise NotImplementedError("task 1.1: append the book, unless the shelf is full")\n'
    )
    assert body == expected[:start] + todo + expected[end:]


SOURCE = '''"""A module."""
@decorated(
    "x"
)
def long(
    a: int,  # first: (
    b: str = "):",
) -> dict[str, int]:
    # why
    x = {
        "a": a,
    }
    return x


async def wait():
    r"""A docstring
    of two lines."""

    async with a: pass
    # at the end

# about the next
class Outer:
    class Inner:
        def f(self):
            """f"""; pass
            return 1
    def g(self):
        return """
# not a comment
"""

    g2 = 3
'''


@pytest.mark.parametrize("symbol", ["long", "wait", "Outer.g"])
def test_awkward_bodies(symbol):
    new = exercise.leave_out(SOURCE, [task(symbol)])
    (function,) = find_functions(ast.parse(new), symbol)
    (old,) = find_functions(ast.parse(SOURCE), symbol)
    assert ast.get_docstring(function) == ast.get_docstring(old)
    *_, todo = function.body
    assert ast.unparse(todo) == "raise NotImplementedError('task 1.1: go')"
    assert len(function.body) == 1 + bool(ast.get_docstring(old))
    todo_line = new.splitlines()[todo.lineno - 1]
    kept = [line for line in new.splitlines() if line != todo_line]
    it = iter(SOURCE.splitlines())
    assert all(line in it for line in kept), "what is left stands in the source, in this order"
    assert ast.unparse(function.args) == ast.unparse(old.args)
    others = {"# why", "# at the end", "# about the next", "g2 = 3", "# first: ("}
    gone = {"long": {"# why"}, "wait": {"# at the end"}, "Outer.g": set()}[symbol]
    assert {text for text in others if text in new} == others - gone


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def f(): return 1\n", "the body of f must stand on lines of its own"),
        ('def f():\n    """Only words."""\n', "f has no body to leave out"),
    ],
)
def test_bodies_that_cannot_be_left_out(source, why):
    with pytest.raises(ValueError, match=why):
        exercise.leave_out(source, [task("f")])


def test_a_long_hint_is_wrapped_and_quotes_survive():
    hint = 'say "a" and "b" ' + "x" * 60 + " and then say it again until it is said"
    new = exercise.leave_out("def f():\n    return 1\n", [task("f", hint=hint)])
    assert max(map(len, new.splitlines())) <= 100
    scope: dict[str, object] = {}
    exec(new, scope)
    with pytest.raises(NotImplementedError) as error:
        scope["f"]()  # type: ignore[operator]
    assert str(error.value) == f"task 1.1: {hint}"


def test_a_students_work_is_kept(mini):
    mini.tasks()
    chapter = load_tasks(mini.root / "chapters/01")
    path = chapter.folder / "exercise.py"
    assert exercise.write(chapter) == {"exercise.py": Written.NEW}
    assert exercise.write(chapter) == {"exercise.py": Written.SAME}

    module = chapter.module.read_text()
    chapter.module.write_text(module.replace("A shelf.", "A long shelf."))
    assert exercise.write(chapter) == {"exercise.py": Written.NEW}, (
        "nobody touched it: the new text replaces it"
    )
    assert "A long shelf." in path.read_text()

    work = path.read_text().replace("raise NotImplementedError(", "return len(")
    path.write_text(work)
    assert exercise.write(chapter) == {"exercise.py": Written.EDITED}
    assert path.read_text() == work
    chapter.module.write_text(module)
    assert exercise.write(chapter) == {"exercise.py": Written.EDITED}
    assert path.read_text() == work
    assert exercise.write(chapter, force=True) == {"exercise.py": Written.NEW}
    assert "return len(" not in path.read_text()

    path.write_text("my_own = 1\n")
    assert exercise.write(chapter) == {"exercise.py": Written.EDITED}, (
        "a file without the header is somebody's"
    )


def test_the_command(mini, capsys, monkeypatch):
    monkeypatch.chdir(mini.root)
    mini.tasks()
    assert run_exercises(Namespace(force=False)) == 0
    assert "chapters/01/exercise.py: written" in capsys.readouterr().out
    assert exercise.check([load_tasks(mini.root / "chapters/01")]) == []
    stage = load_path(mini.root / "chapters/01/exercise.py")
    with pytest.raises(NotImplementedError, match=r"task 1\.1: append"):
        stage.Shelf(1).put("a")

    path = mini.root / "chapters/02/exercise.py"
    path.write_text(path.read_text() + "# mine\n")
    assert run_exercises(Namespace(force=False)) == 1
    said = capsys.readouterr().out
    assert "chapters/01/exercise.py: unchanged" in said
    assert "chapters/02/exercise.py: kept" in said
    assert "--force" in said
    tasks = [load_tasks(mini.root / "chapters" / chapter) for chapter in ("01", "02")]
    assert exercise.check(tasks) == [
        "chapters/02/exercise.py differs from what is generated (edited? make exercises keeps it, "
        "pagedattn exercises --force writes it anew)"
    ]
