"""A committed notebook is one whole run, with its pictures, and gives no answer away."""

from pathlib import Path


def check(root: Path) -> list[str]:
    """What is wrong with the committed notebooks, one line each."""
    problems = []
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        problems += [f"notebooks/{path.name}: {problem}" for problem in _problems(path)]
    return problems


def _problems(path: Path) -> list[str]:
    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except (nbformat.ValidationError, nbformat.reader.NotJSONError) as error:
        return [f"not a valid notebook: {str(error).splitlines()[0]}"]
    cells = [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]
    problems = []
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        problems.append("not one run from top to bottom")
    outputs = [output for cell in cells for output in cell.outputs]
    if any(output.output_type == "error" for output in outputs):
        problems.append("holds an error")
    if any(output.get("name") == "stderr" for output in outputs):
        problems.append("holds a warning")
    if not any("image/png" in output.get("data", {}) for output in outputs):
        problems.append("holds no picture")
    if any(cell.outputs for cell in cells if cell.source.startswith("predict")):
        problems.append("shows the answer to a question before the reader has guessed")
    return problems
