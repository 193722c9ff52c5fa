"""Bugs: the tests that they name must fail on them by assertion."""

import sys

import pytest

from pagedattn.course.implementations import ImplementationError, load_bug, load_fresh, load_path

pytest_plugins = ["pytester"]

KEEPS_ONE = "self.books = [stage.Book(title)]\n        return 7"
CRASHES = "return [][0]"
GOOD = (
    "if len(self.books) == self.size:\n            raise ValueError\n"
    "        self.books.append(stage.Book(title))\n        return len(self.books)"
)


def test_a_bug_that_is_caught_passes(mini, words):
    mini.bug("keeps_one", '("test_shelf.py::test_put", "test_shelf.py::test_full[2]")', KEEPS_ONE)
    result = mini.run("chapters/01")
    said = words(result)
    assert said["test_shelf.py::test_put[bug-keeps_one]"] == "PASSED"
    # `pytest.raises` that sees nothing raised is an assertion; the other case is not named
    assert said["test_shelf.py::test_full[bug-keeps_one-2]"] == "PASSED"
    assert "test_shelf.py::test_full[bug-keeps_one-1]" not in said
    assert said["test_shelf.py::test_put[shelf]"] == "PASSED", "the library has no bug"
    assert result.ret == 0
    again = "chapters/01/test_shelf.py::test_full[bug-keeps_one-2]"
    assert words(mini.run(again)) == {"test_shelf.py::test_full[bug-keeps_one-2]": "PASSED"}


def test_a_bug_that_lives_fails(mini, words):
    mini.bug("harmless", '("test_shelf.py::test_put",)', GOOD)
    result = mini.run("chapters/01")
    assert words(result)["test_shelf.py::test_put[bug-harmless]"] == "FAILED"
    result.stdout.fnmatch_lines(
        [
            "the bug harmless lives: test_put[[]bug-harmless[]] passes on it.",
            "Its symptom should be: wrong",
        ]
    )


def test_a_bug_that_crashes_fails(mini, words):
    mini.bug("crashes", '("test_shelf.py::test_put",)', CRASHES)
    result = mini.run("chapters/01")
    assert words(result)["test_shelf.py::test_put[bug-crashes]"] == "FAILED"
    result.stdout.fnmatch_lines(["*bug crashes makes test_put* crash with IndexError: list index*"])


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("pass", "PASSED"),
        (CRASHES, "FAILED"),
        # Two failures of one test, which Hypothesis reports as a group.
        ("assert title < 'b', 'b'\n        assert title != '0', '0'", "PASSED"),
        ("assert title < 'b', 'b'\n        return {'0': 1}[title]", "FAILED"),
        # Fails once and never again.
        ("n = len(stage.seen)\n        stage.seen.append(1)\n        assert n, 'first'", "PASSED"),
    ],
    ids=["assertion", "crash", "two assertions", "assertion and crash", "flaky"],
)
def test_hypothesis(mini, words, body, verdict):
    path = mini.bug("strange", '("test_catalogue.py::test_find",)', body, "02")
    path.write_text(path.read_text() + "    stage.seen = []\n")
    catalogue = mini.root / "chapters/02/test_catalogue.py"
    catalogue.write_text(
        "from hypothesis import given, strategies as st\n\n\n"
        "@given(title=st.sampled_from('0abc'))\n"
        "def test_find(stage, title):\n"
        "    shelf = stage.Shelf(5)\n    shelf.put(title)\n"
        + ("    assert shelf.find(title)\n" if body in ("pass", CRASHES) else "")
    )
    said = words(mini.run("chapters/02/test_catalogue.py"))
    assert said["test_catalogue.py::test_find[bug-strange]"] == verdict


def test_a_bug_may_be_caught_by_a_contract_below(mini, words):
    mini.bug("above", '("../01/test_shelf.py::test_put",)', KEEPS_ONE, "02")
    assert words(mini.run("chapters/02"))["test_shelf.py::test_put[bug-above]"] == "PASSED"
    assert "test_shelf.py::test_put[bug-above]" not in words(mini.run("chapters/01"))


def test_bugs_are_the_librarys_affair(mini, words):
    mini.tasks()
    mini.bug("keeps_one", '("test_shelf.py::test_full[2]",)', KEEPS_ONE)
    mini.student((mini.root / "shelf.py").read_text())
    for arguments in (["--student"], ["--impl", "shelf.py"], ["--task", "1.1"]):
        said = words(mini.run("chapters/01", *arguments))
        assert not [name for name in said if "bug" in name]
        assert said["test_shelf.py::test_full[shelf-2]"] == "PASSED"


@pytest.mark.parametrize(
    ("killed_by", "why"),
    [
        ('("test_shelf.py::test_putt",)', "*bug b names test_shelf.py::test_putt: there is no*"),
        ('("test_shelf.py::test_full[3]",)', "*bug b names test_shelf.py::test_full[[]3[]]: *"),
        ('("test_nothing.py::test_put",)', "*bug b names test_nothing.py::test_put: there*"),
        ('("test_shelf.py::test_arithmetic",)', "*test_arithmetic: * that takes `stage`*"),
        ('("test_shelf.py",)', "*'test_shelf.py' should read test_file.py::test_name*"),
        ("()", "*the bug chapters/01/bugs/b.py lacks KILLED_BY*"),
        ('"test_shelf.py::test_put"', "*KILLED_BY is 'test_shelf.py::test_put', no tuple*"),
    ],
)
def test_a_bug_that_names_no_test(mini, killed_by, why):
    mini.bug("b", killed_by, KEEPS_ONE)
    result = mini.run("chapters/01")
    result.stderr.fnmatch_lines([why])
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_a_bug_file_is_complete(tmp_path):
    path = tmp_path / "half.py"
    path.write_text('SYMPTOM = "wrong"\n')
    with pytest.raises(ImplementationError, match=r"lacks a docstring.*, KILLED_BY, a function"):
        load_bug(path)


def test_a_fresh_copy_has_classes_of_its_own(mini):
    first, second, original = load_fresh("shelf"), load_fresh("shelf"), load_fresh("shelf")
    first.Shelf.put = None
    assert second.Shelf.put is not None
    shelf = second.Shelf(1)
    shelf.put("a")
    assert isinstance(shelf.books[0], second.Book)
    assert shelf.books == [second.Book("a")], "dataclasses compare"
    assert not isinstance(shelf.books[0], original.Book)
    assert sys.modules[second.__name__] is second


def test_a_file_is_read_again_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "mine.py"
    for value in (1, 2, 3):  # same size, same second
        path.write_text(f"VALUE = {value}\n")
        assert value == load_path(path).VALUE
    assert [p.name for p in tmp_path.iterdir()] == ["mine.py"], "no __pycache__"


def test_a_file_may_import_as_the_library_does(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from .course.chapters import STAGES\nfrom pagedattn.course import names\n")
    assert "01" in load_path(path).STAGES
