"""The notebooks run from top to bottom. (`pagedattn check` looks at what is committed of them.)"""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_the_tour_comes_first_then_one_notebook_a_chapter() -> None:
    chapters = [path.name for path in sorted(NOTEBOOKS[0].parents[1].glob("chapters/[0-9][0-9]"))]
    assert [path.stem[:2] for path in NOTEBOOKS] == ["00", *chapters]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_runs_from_top_to_bottom(path: Path) -> None:
    """A fresh run raises nothing, warns of nothing and draws its pictures."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(path.parent)}}
    client = nbclient.NotebookClient(notebook, timeout=600, resources=resources)
    client.execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert sum("image/png" in out.get("data", {}) for out in outputs) >= 3
    assert not [out.text for out in outputs if out.get("name") == "stderr"]
