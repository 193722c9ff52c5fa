"""What `pagedattn check` looks at: figures and evidence here, exercises in test_exercises."""

import json
from argparse import Namespace

import pytest

from pagedattn.course import evidence
from pagedattn.course.chapters import find_root
from pagedattn.course.check import check_figures, run_check, run_exercises

pytest_plugins = ["pytester"]

DRAWS = """
import sys
from pathlib import Path

(Path(sys.argv[1]) / "one.svg").write_text("<svg>1</svg>")
"""


def test_figures(mini):
    mini.write("figures/one.py", DRAWS)
    figure = mini.write("figures/one.svg", "<svg>1</svg>")
    assert check_figures(mini.root) == []
    figure.write_text("<svg>2</svg>")
    mini.write("figures/old.svg", "<svg/>")
    mini.write("figures/broken.py", "raise SystemExit('no ink')")
    broken, old, one = check_figures(mini.root)
    assert broken == "figures/broken.py failed:\nno ink\n"
    assert old == "figures/old.svg: no script in figures/ draws it"
    assert one == "figures/one.svg differs from what is drawn (make figures)"
    figure.unlink()
    assert "figures/one.svg is missing (make figures draws it)" in check_figures(mini.root)
    assert figure.exists() is False, "checking draws elsewhere"


def test_evidence(mini):
    path = mini.root / "chapters/01/evidence/speed.json"
    evidence.record(path, "make speed", ["shelf.py"], {"books": 3}, mini.root)
    written = json.loads(path.read_text())
    assert written.keys() == {"command", "card", "versions", "date", "sources", "result"}
    assert (written["command"], written["result"]) == ("make speed", {"books": 3})
    assert len(written["sources"]["shelf.py"]) == 64
    assert evidence.check(mini.root) == []

    shelf = mini.root / "shelf.py"
    shelf.write_text(shelf.read_text() + "\n")
    (problem,) = evidence.check(mini.root)
    assert "chapters/01/evidence/speed.json: shelf.py has changed since" in problem
    assert "make speed" in problem
    shelf.unlink()
    assert "there is no source" in evidence.check(mini.root)[0]
    with pytest.raises(ValueError, match="there is no source"):
        evidence.record(path, "make speed", ["shelf.py"], {}, mini.root)

    for text, why in [
        ("{", "Expecting property name"),
        ("[]", "its fields are not"),
        ("{}", "its fields are not"),
        (json.dumps(written | {"sources": {}}), "it names no source"),
    ]:
        path.write_text(text)
        (problem,) = evidence.check(mini.root)
        assert why in problem


def test_the_evidence_of_the_book_is_current():
    assert evidence.check(find_root()) == []


def test_the_command(mini, monkeypatch, capsys):
    monkeypatch.chdir(mini.root)
    mini.tasks()
    run_exercises(Namespace(force=False))
    mini.write("chapters/01/README.md", "<!-- code: shelf.py Shelf.take -->\n")
    assert run_check(Namespace()) == 1
    assert "chapters/01/README.md:1" in capsys.readouterr().err
    assert run_exercises(Namespace(force=False)) == 0
    assert "return self.books.pop().title" in (mini.root / "chapters/01/README.md").read_text()
    assert run_check(Namespace()) == 0
    mini.write("chapters/02/exercise.py", "")
    assert run_check(Namespace()) == 1
    assert "chapters/02/exercise.py differs" in capsys.readouterr().err
