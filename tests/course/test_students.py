"""The tests on a student's code: --student, --impl, --task; to do is not failed."""

import pytest

pytest_plugins = ["pytester"]

UNFINISHED = """
class Shelf:
    def __init__(self, size):
        self.size = size

    def put(self, title):
        raise NotImplementedError("task 1.1: append the book")
"""
FINISHED_BUT_WRONG = """
class Shelf:
    def __init__(self, size):
        self.books = []

    def put(self, title):
        self.books.append(title)
        return len(self.books)

    def take(self):
        return self.books.pop()

    def find(self, title):
        return title in self.books
"""


def test_unfinished_work_is_to_do(mini, words):
    mini.student(UNFINISHED)
    result = mini.run("chapters/01", "--student")
    assert words(result) == {
        "test_shelf.py::test_put[shelf]": "TO DO",
        "test_shelf.py::test_full[shelf-1]": "TO DO",
        "test_shelf.py::test_full[shelf-2]": "TO DO",
        "test_shelf.py::test_take[shelf]": "TO DO",
    }
    result.stdout.fnmatch_lines(
        [
            "to do: task 1.1 (4 tests)",
            "done: 0 of 4 tests pass, 4 wait for code to be written, none failed",
            "*4 to do*",
        ]
    )
    result.stdout.no_fnmatch_line("*Error*")
    assert result.ret == 1


def test_the_contracts_below_run_on_the_students_file(mini, words):
    mini.student(FINISHED_BUT_WRONG, "02")
    result = mini.run("chapters/02", "--student")
    assert words(result) == {
        "test_shelf.py::test_put[catalogue]": "PASSED",
        "test_shelf.py::test_full[catalogue-1]": "FAILED",
        "test_shelf.py::test_full[catalogue-2]": "FAILED",
        "test_catalogue.py::test_find[catalogue]": "PASSED",
    }


def test_another_file(mini, words):
    mini.write("mine/try.py", FINISHED_BUT_WRONG)
    result = mini.run("chapters/01", "--impl", "mine/try.py")
    result.stdout.fnmatch_lines(["code under test: mine/try.py"])
    said = words(result)
    assert said["test_shelf.py::test_take[shelf]"] == "PASSED"
    assert said["test_shelf.py::test_full[shelf-1]"] == "FAILED"


@pytest.mark.parametrize(
    "where",
    [
        "with ThreadPoolExecutor(1) as pool:\n"
        "        pool.submit(stage.Shelf(1).put, 'a').result()",
        "try:\n        stage.Shelf(1).put('a')\n    except BaseException as e:\n"
        "        one = BaseExceptionGroup('one', [e])\n"
        "        raise BaseExceptionGroup('two', [ValueError('x'), one])",
        "try:\n        stage.Shelf(1).put('a')\n    except BaseException as e:\n"
        "        raise ValueError('wrapped') from e",
        "with pytest.raises(BaseException, match='no such words'):\n"
        "        stage.Shelf(1).put('a')",
        "with pytest.raises(Exception):\n        stage.Shelf(1).put('a')",
    ],
    ids=["thread", "group", "cause", "match", "raises"],
)
def test_to_do_is_found_in_wrappings(mini, where):
    mini.student(UNFINISHED)
    mini.write(
        "chapters/01/test_wrapped.py",
        f"""import pytest
from concurrent.futures import ThreadPoolExecutor


def test_it(stage):
    {where}
""",
    )
    result = mini.run("chapters/01/test_wrapped.py", "--student")
    result.stdout.fnmatch_lines(["to do: task 1.1 (1 test)"])


def test_to_do_in_hypothesis_and_in_fixtures(mini, words):
    mini.student(UNFINISHED, "02")
    mini.write(
        "chapters/02/test_fixture.py",
        """
        import pytest

        @pytest.fixture
        def full(stage):
            return stage.Shelf(1).put("a")

        @pytest.fixture
        def fuller(full):
            return full + 1

        @pytest.mark.parametrize("number", [1, 2])
        def test_it(fuller, number):
            assert fuller == 2
        """,
    )
    mini.write(
        "chapters/02/test_once.py",
        """
        from hypothesis import given, strategies as st

        @given(title=st.text())
        def test_it(stage, title):
            print("tried")
            stage.Shelf(5).put(title)
        """,
    )
    result = mini.run("chapters/02", "--student", "-s")
    said = [line for line in result.outlines if "TO DO" in line]
    assert len(said) == 7
    tried = [line for line in result.outlines if line.endswith("tried")]
    assert len(tried) == 1, "Hypothesis looks for no smaller example of what is not there"


@pytest.mark.parametrize("message", ["not now", "task of tomorrow", ""])
def test_an_error_of_the_students_own_is_a_failure(mini, words, message):
    mini.student(UNFINISHED.replace("task 1.1: append the book", message))
    said = words(mini.run("chapters/01/test_shelf.py::test_put", "--student"))
    assert said == {"test_shelf.py::test_put[shelf]": "FAILED"}


def test_the_library_has_nothing_to_do(mini, words):
    path = mini.root / "shelf.py"
    path.write_text(UNFINISHED)
    assert words(mini.run("chapters/01/test_shelf.py::test_put")) == {
        "test_shelf.py::test_put[shelf]": "FAILED"
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1\ndef broken(:\n", "*chapters/01/exercise.py, line 2, cannot be imported: SyntaxE*"),
        ("x = 1\n\n1 / 0\n", "*chapters/01/exercise.py, line 3, *: ZeroDivisionError: division*"),
        (
            "def f():\n    raise NotImplementedError('task 1.2: go')\nf()\n",
            "*exercise.py, line 2, cannot be imported: to do: task 1.2: go*",
        ),
        (None, "*there is no file *chapters/01/exercise.py*"),
    ],
)
def test_a_file_that_cannot_be_imported(mini, text, why):
    if text is not None:
        mini.student(text)
    result = mini.run("chapters/01", "--student")
    result.stderr.fnmatch_lines([why])
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_one_tasks_tests(mini, words):
    mini.tasks()
    mini.student(UNFINISHED)
    only = "test_shelf.py::test_full[shelf-2]"
    assert words(mini.run("chapters/01", "--task", "1.1")) == {only: "PASSED"}
    assert words(mini.run("--task", "1.1")) == {only: "PASSED"}
    assert words(mini.run("chapters/01", "--student", "--task", "1.1")) == {only: "TO DO"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["chapters/01", "--task", "1.7"], "*unknown task 1.7; known: 1.1, 2.1"),
        (["chapters/01", "--task", "2.1"], "*task 2.1 belongs to chapter 02: *"),
        (["chapters", "--impl", "shelf.py"], "*--impl stands for one chapter*"),
        (["chapters/01", "--student", "--impl", "shelf.py"], "*cannot go together*"),
    ],
)
def test_usage_errors(mini, arguments, why):
    mini.tasks()
    result = mini.run(*arguments)
    result.stderr.fnmatch_lines([why])
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_a_task_whose_case_does_not_exist(mini):
    mini.tasks()
    path = mini.root / "chapters/01/tasks.toml"
    path.write_text(path.read_text().replace("test_full[2]", "test_full[3]"))
    result = mini.run("chapters/01", "--task", "1.1")
    result.stderr.fnmatch_lines(["*task 1.1 names test_shelf.py::test_full[[]3[]]: there is no*"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
