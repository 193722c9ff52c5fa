"""The page of the book that is about ``transformers``: its examples give what stands there."""

import doctest
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "chapters" / "05" / "transformers.md"


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_examples_on_the_page() -> None:
    pytest.importorskip("triton")
    # A fence would count as output of the example above it.
    text = re.sub(r"^`{3}.*$", "", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    assert len(examples.examples) > 20
    report: list[str] = []
    failed, _ = doctest.DocTestRunner().run(examples, out=report.append)
    assert failed == 0, "".join(report)
