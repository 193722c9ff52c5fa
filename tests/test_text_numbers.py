"""The small computations in the texts: what stands under `>>>` is what comes out."""

import doctest
import re
from pathlib import Path

import pytest

CHAPTERS = Path(__file__).parents[1] / "chapters"


@pytest.mark.parametrize("path", sorted(CHAPTERS.glob("*/README.md")), ids=lambda p: p.parent.name)
def test_examples_in_the_text(path: Path) -> None:
    # A fence would count as output of the example above it.
    text = re.sub(r"^`{3}.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(text, {}, path.parent.name, str(path), 0)
    report: list[str] = []
    failed, _ = doctest.DocTestRunner().run(examples, out=report.append)
    assert failed == 0, "".join(report)
