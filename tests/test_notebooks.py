"""The notebooks: they run from top to bottom, and what is committed is a whole run of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


@pytest.fixture(params=NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def committed(request: pytest.FixtureRequest) -> Any:
    return nbformat.read(request.param, as_version=4)


def code_cells(notebook: Any) -> Iterator[Any]:
    return (cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip())


def outputs(notebook: Any, kind: str) -> list[Any]:
    return [out for cell in code_cells(notebook) for out in cell.outputs if kind in out.output_type]


def pictures(notebook: Any) -> int:
    return sum("image/png" in out.get("data", {}) for out in outputs(notebook, ""))


def test_every_chapter_has_its_notebook() -> None:
    chapters = [path.name for path in sorted(NOTEBOOKS[0].parents[1].glob("chapters/[0-9][0-9]"))]
    assert [path.name[:2] for path in NOTEBOOKS] == chapters


def test_committed_as_run(committed: Any) -> None:
    """Valid, run once from top to bottom, without errors or warnings, and with its pictures."""
    nbformat.validate(committed)
    counts = [cell.execution_count for cell in code_cells(committed)]
    assert counts == list(range(1, len(counts) + 1)), "not one run from top to bottom"
    assert not outputs(committed, "error")
    warnings = [out.text for out in outputs(committed, "stream") if out.name == "stderr"]
    assert not warnings
    assert pictures(committed) >= 3


@notebooks
def test_runs_from_top_to_bottom(path: Path) -> None:
    """A fresh run raises nothing and draws as many pictures as the committed one."""
    notebook = nbformat.read(path, as_version=4)
    drawn = pictures(notebook)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    assert pictures(notebook) == drawn
