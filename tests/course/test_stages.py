"""Which tests run on which stage."""

import pytest

from pagedattn.course.chapters import STAGES

pytest_plugins = ["pytester"]

CONTRACT_ON_PAGES = {
    "test_shelf.py::test_put[catalogue]": "PASSED",
    "test_shelf.py::test_full[catalogue-1]": "PASSED",
    "test_shelf.py::test_full[catalogue-2]": "PASSED",
}
OWN_OF_01 = {
    "test_shelf.py::test_put[shelf]": "PASSED",
    "test_shelf.py::test_full[shelf-1]": "PASSED",
    "test_shelf.py::test_full[shelf-2]": "PASSED",
    "test_shelf.py::test_take[shelf]": "PASSED",
    "test_shelf.py::test_arithmetic": "PASSED",
}
OWN_OF_02 = {"test_catalogue.py::test_find[catalogue]": "PASSED"}
OWN_OF_06 = {"test_desk.py::test_own[desk]": "PASSED"}
TEST_DESK = """
def test_own(stage):
    assert stage.Shelf is None
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["chapters/01"], OWN_OF_01),
        (["chapters/02"], CONTRACT_ON_PAGES | OWN_OF_02),
        (["chapters/01", "chapters/02"], OWN_OF_01 | CONTRACT_ON_PAGES | OWN_OF_02),
        (["chapters"], OWN_OF_01 | CONTRACT_ON_PAGES | OWN_OF_02),
        ([], OWN_OF_01 | CONTRACT_ON_PAGES | OWN_OF_02),
        (["chapters/02/test_catalogue.py"], OWN_OF_02),
        (["chapters/01/test_shelf.py"], OWN_OF_01),
        (
            ["chapters/01/test_shelf.py::test_put"],
            {"test_shelf.py::test_put[shelf]": "PASSED"},
        ),
        (  # as a report printed it
            ["chapters/01/test_shelf.py::test_full[catalogue-2]"],
            {"test_shelf.py::test_full[catalogue-2]": "PASSED"},
        ),
    ],
)
def test_a_stage_passes_the_contracts_below_it(mini, words, arguments, expected):
    result = mini.run(*arguments)
    assert words(result) == expected
    assert result.ret == 0


def test_a_contract_broken_by_a_later_stage_is_seen(mini, words):
    path = mini.root / "catalogue.py"
    path.write_text(path.read_text().replace("== self.size", "== self.size + 1"))
    result = mini.run("chapters/02")
    assert words(result) == OWN_OF_02 | CONTRACT_ON_PAGES | {
        "test_shelf.py::test_full[catalogue-1]": "FAILED",
        "test_shelf.py::test_full[catalogue-2]": "FAILED",
    }
    assert result.ret == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["chapters/06"], OWN_OF_06),
        (["chapters"], OWN_OF_01 | CONTRACT_ON_PAGES | OWN_OF_02 | OWN_OF_06),
        (["chapters/02", "chapters/06"], CONTRACT_ON_PAGES | OWN_OF_02 | OWN_OF_06),
        (["chapters/01/test_shelf.py::test_put[desk]"], {}),
    ],
)
def test_contracts_end_with_the_last_cache(mini, words, arguments, expected):
    """The stage of chapter 06 has promises of its own; those of chapter 01 would fail on it."""
    STAGES["06"] = "desk"
    mini.write("desk.py", "Shelf = None\n")
    mini.write("chapters/06/test_desk.py", TEST_DESK)
    assert words(mini.run(*arguments)) == expected


def test_from_inside_a_chapter(mini, words, monkeypatch):
    monkeypatch.chdir(mini.root / "chapters" / "02")
    assert words(mini.run()) == CONTRACT_ON_PAGES | OWN_OF_02


def test_tests_outside_of_chapters_run_as_ever(mini, words):
    mini.write("tests/test_other.py", "def test_it(): pass")
    assert words(mini.run("tests")) == {"test_other.py::test_it": "PASSED"}


def test_workers_are_like_one_process(mini, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    mini.write(
        "mini_stages.py",
        """
        from pagedattn.course.chapters import STAGES

        STAGES.clear()
        STAGES.update({"01": "shelf", "02": "catalogue"})
        """,
    )
    mini.write(
        "chapters/02/test_worker.py",
        """
        import os
        import torch

        def test_one_thread():
            assert torch.get_num_threads() == 1

        def test_triton_interprets_without_a_gpu():
            assert torch.cuda.is_available() or os.environ["TRITON_INTERPRET"] == "1"
        """,
    )
    mini.student(SHELF_TO_DO, "02")
    mini.bug("lives", '("test_catalogue.py::test_find",)', PUT_TWICE, "02")
    arguments = ("-p", "mini_stages", "-n", "1", "chapters/02")
    result = mini.pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(passed=6, failed=1)
    result.stdout.fnmatch_lines(["the bug lives lives: test_find* passes on it.*"])
    result = mini.pytester.runpytest_subprocess(*arguments, "--student")
    result.stdout.fnmatch_lines(["to do: task 2.1 (4 tests)"])
    assert result.ret == 1


PUT_TWICE = "self.books += 2 * [stage.Book(title)]"
SHELF_TO_DO = """
class Shelf:
    def __init__(self, size):
        self.size = size

    def put(self, title):
        raise NotImplementedError("task 2.1: put it")
"""


def test_slow_tests_are_skipped_unless_asked_for(mini, words):
    mini.write(
        "tests/test_slow.py", "import pytest\n\n\n@pytest.mark.slow\ndef test_it():\n    pass\n"
    )
    assert words(mini.run("tests")) == {"test_slow.py::test_it": "SKIPPED"}
    assert words(mini.run("tests", "--slow")) == {"test_slow.py::test_it": "PASSED"}


def test_the_header_says_what_runs(mini):
    lines = mini.run("chapters/01").outlines
    header = [line for line in lines if line.startswith(("device: ", "code under test: "))]
    assert "torch 2." in header[0]
    assert "kernels: " in header[0]
    assert header[1] == "code under test: the library"
    mini.student("class Shelf: pass")
    result = mini.run("chapters/01", "--student")
    result.stdout.fnmatch_lines(["code under test: chapters/01/exercise.py"])
