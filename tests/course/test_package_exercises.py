"""The exercise of a stage that is a package: a folder with a file for each of its modules."""

import json
from argparse import Namespace

import pytest
import torch

from pagedattn.course import evidence, exercise
from pagedattn.course.check import run_check, run_exercises
from pagedattn.course.exercise import Written
from pagedattn.course.tasks import load_tasks

pytest_plugins = ["pytester"]

FILES = ["exercise/__init__.py", "exercise/boxes.py", "exercise/rooms.py"]


def test_every_module_has_its_exercise(archive):
    chapter = load_tasks(archive.root / "chapters/03")
    assert exercise.write(chapter) == dict.fromkeys(FILES, Written.NEW)
    package, boxes, rooms = ((chapter.folder / name).read_text() for name in FILES)
    for text, name in [(package, "__init__.py"), (boxes, "boxes.py"), (rooms, "rooms.py")]:
        assert f"archive/{name}" in text.splitlines()[0]
    assert package.endswith((archive.root / "archive/__init__.py").read_text()), "nothing to do"
    assert package.startswith("# Chapter 03, given: archive/__init__.py; ")
    assert boxes.startswith("# Chapter 03, yours to write: archive/boxes.py without ")
    assert boxes.endswith(
        'def label(title):\n    raise NotImplementedError("task 3.1: write what is inside")\n'
    )
    assert rooms.count('raise NotImplementedError("task 3.2: put boxes on the shelf")') == 2
    assert "--task 3.2 " in rooms and "--task 3.1 " in boxes
    assert not (chapter.folder / "exercise.py").exists()


def test_one_edited_file_is_kept_and_the_others_follow_the_library(archive):
    chapter = load_tasks(archive.root / "chapters/03")
    exercise.write(chapter)
    mine = chapter.folder / "exercise/boxes.py"
    mine.write_text(mine.read_text() + "# mine\n")
    for file in (archive.root / "archive").glob("*.py"):
        file.write_text(file.read_text() + "# new\n")
    written = {FILES[0]: Written.NEW, FILES[1]: Written.EDITED, FILES[2]: Written.NEW}
    assert exercise.write(chapter) == written
    assert mine.read_text().endswith("# mine\n")
    assert exercise.write(chapter, force=True) == {
        FILES[0]: Written.SAME,
        FILES[1]: Written.NEW,
        FILES[2]: Written.SAME,
    }
    assert "# mine" not in mine.read_text()


def test_the_commands(archive, capsys):
    assert run_exercises(Namespace(force=False)) == 0
    said = capsys.readouterr().out
    assert all(f"chapters/03/{name}: written" in said for name in FILES)
    archive.write("chapters/03/README.md", "<!-- code: archive/rooms.py Shelf.labels -->\n")
    assert run_exercises(Namespace(force=False)) == 0
    assert "for box in self.books" in (archive.root / "chapters/03/README.md").read_text()
    assert run_check(Namespace()) == 0

    folder = archive.root / "chapters/03/exercise"
    archive.write("chapters/03/exercise/boxes.py", "")
    (folder / "rooms.py").unlink()
    archive.write("chapters/03/exercise/cellar.py", "")
    archive.write("chapters/03/exercise.py", "")
    archive.write("chapters/03/exercise/__pycache__/boxes.cpython-311.pyc", "")
    capsys.readouterr()
    assert run_check(Namespace()) == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" (")[0] for line in said] == [
        "chapters/03/exercise/boxes.py differs from what is generated",
        "chapters/03/exercise/rooms.py is missing",
        "chapters/03/exercise/cellar.py: the stage has no such module",
        "chapters/03/exercise.py: the stage has no such module",
    ]


def test_evidence_speaks_of_every_module(archive, monkeypatch):
    monkeypatch.setattr(evidence, "_SHARED", ())
    monkeypatch.setattr(evidence, "_run_tests", lambda folder: {"passed": 1, "failed": 0})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    assert evidence.run_evidence(Namespace()) == 0
    written = (archive.root / "chapters/03/evidence/gpu_tests.json").read_text()
    assert {source for source in json.loads(written)["sources"] if "chapters" not in source} == {
        *("shelf.py", "catalogue.py"),
        *("archive/__init__.py", "archive/boxes.py", "archive/rooms.py"),
    }
    assert evidence.check(archive.root) == []
    archive.write("archive/boxes.py", "")
    (problem,) = evidence.check(archive.root)
    assert "chapters/03/evidence/gpu_tests.json: archive/boxes.py has changed since" in problem


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"archive"', '"archive.py"', "module is 'archive.py', the chapter's is 'archive'"),
        ('file = "boxes.py"\n', "", "task 3.1: file is missing"),
        ('"boxes.py"', '"cellar.py"', "task 3.1: archive has no module cellar.py"),
        ('"boxes.py"', '"../shelf.py"', "task 3.1: archive has no module ../shelf.py"),
        ('"boxes.py"', "3", "task 3.1: file is 3, not a str"),
        ('"boxes.py"', '"rooms.py"', "task 3.1: archive/rooms.py defines label 0 times"),
        ('["label"]', '["label", "label"]', "task 3.1: label belongs to task 3.1, too"),
    ],
)
def test_mistakes_in_tasks(archive, old, new, why):
    path = archive.root / "chapters/03/tasks.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError) as error:
        load_tasks(path.parent)
    assert why in str(error.value)


def test_two_modules_may_define_one_name(archive):
    path = archive.root / "archive/rooms.py"
    path.write_text(
        path.read_text().replace("def labels(", "def label(") + "\n\ndef label(x):\n    return 1\n"
    )
    tasks = archive.root / "chapters/03/tasks.toml"
    tasks.write_text(tasks.read_text().replace('"Shelf.labels"', '"label"'))
    assert [task.symbols[-1] for task in load_tasks(tasks.parent).tasks] == ["label", "label"]
