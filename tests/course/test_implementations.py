"""`--stage`, `--impl`, `--bug` of the command line: which module runs."""

import sys

import pytest

from pagedattn.course.implementations import ImplementationError, resolve_stage

pytest_plugins = ["pytester"]


@pytest.fixture
def checkout(mini, monkeypatch):
    monkeypatch.chdir(mini.root)
    mini.bug("forgets", '("test_shelf.py::test_put",)', "return 7")
    mini.bug("loses", '("test_catalogue.py::test_find",)', "return 8", "02")
    return mini


def test_a_stage(checkout):
    assert resolve_stage().__name__ == "catalogue", "the last one unless said otherwise"
    assert resolve_stage(stage="01").__name__ == "shelf"
    assert resolve_stage(stage="01") is sys.modules["shelf"]


def test_a_file(checkout):
    path = checkout.write("mine.py", "WHOSE = 'mine'\n")
    assert resolve_stage(impl=path).WHOSE == "mine"
    assert resolve_stage(impl="mine.py").WHOSE == "mine"


def test_a_bug_is_in_a_copy(checkout):
    assert resolve_stage(bug="forgets").Shelf(1).put("a") == 7
    assert resolve_stage(bug="loses").Shelf(1).put("a") == 8
    assert resolve_stage(bug="loses").Shelf(1).find("a") is False
    assert resolve_stage(stage="01").Shelf(1).put("a") == 1


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"stage": "01", "bug": "forgets"}, "--stage and --bug cannot go together"),
        ({"impl": "mine.py", "bug": "forgets"}, "--impl and --bug cannot go together"),
        ({"bug": "eats"}, "unknown bug eats; known: forgets, loses"),
        ({"stage": "2"}, "unknown stage 2; known: 01, 02"),
        ({"impl": "none.py"}, "there is no file none.py"),
    ],
)
def test_mistakes(checkout, given, why):
    with pytest.raises(ImplementationError, match=why):
        resolve_stage(**given)


def test_two_bugs_of_one_name(checkout):
    checkout.bug("forgets", '("test_catalogue.py::test_find",)', "return 8", "02")
    with pytest.raises(ImplementationError, match="two bugs are called forgets: chapters/01/"):
        resolve_stage(bug="forgets")
