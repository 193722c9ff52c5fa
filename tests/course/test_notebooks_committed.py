"""What `pagedattn check` finds wrong with a notebook that is to be committed."""

from pathlib import Path
from typing import Any

import pytest
from nbformat import v4, write

from pagedattn.course.notebook import check

PICTURE = v4.new_output("display_data", data={"image/png": "aGVsbG8="})


def problems(root: Path, *cells: Any) -> list[str]:
    (root / "notebooks").mkdir()
    notebook = v4.new_notebook(cells=list(cells))
    write(notebook, root / "notebooks" / "01.ipynb")
    return [problem.removeprefix("notebooks/01.ipynb: ") for problem in check(root)]


def cell(number: int | None, source: str, *outputs: Any) -> Any:
    return v4.new_code_cell(source, execution_count=number, outputs=list(outputs))


def test_a_good_one(tmp_path: Path) -> None:
    asked, drawn = cell(1, 'predict("slot", 3)'), cell(2, "draw()", PICTURE)
    assert problems(tmp_path, asked, v4.new_markdown_cell("Now look."), drawn) == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (cell(None, "x = 1"), "not one run from top to bottom"),
        (cell(3, "x = 1"), "not one run from top to bottom"),
        (cell(2, "1 / 0", v4.new_output("error", ename="ZeroDivisionError")), "holds an error"),
        (cell(2, "f()", v4.new_output("stream", name="stderr", text="old")), "holds a warning"),
        (
            cell(2, 'predict("slot", 3)', v4.new_output("stream", text="29")),
            "shows the answer to a question before the reader has guessed",
        ),
    ],
)
def test_a_bad_one(tmp_path: Path, bad: Any, words: str) -> None:
    assert problems(tmp_path, cell(1, "draw()", PICTURE), bad) == [words]


def test_no_picture(tmp_path: Path) -> None:
    assert problems(tmp_path, cell(1, "x = 1")) == ["holds no picture"]


def test_no_notebook(tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01.ipynb").write_text("not json")
    (problem,) = check(tmp_path)
    assert problem.startswith("notebooks/01.ipynb: not a valid notebook")
