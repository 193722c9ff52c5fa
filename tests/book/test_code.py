"""Code shown in a chapter is its symbol's source."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pagedattn.book import code

Render = Callable[[str], str]
Problems = Callable[[str], list[str]]


SHOWN = """\
<!-- code: lib/pool.py Pool.free -->
```python
@property
def free(self) -> int:
    # How many are left.
    return self.size
```
"""


@pytest.mark.parametrize(
    ("symbol", "source"),
    [
        ("LIMIT", "LIMIT: int = 3"),
        ("Pool.size", "size = 2"),
        (
            "Pool.free",
            "@property\ndef free(self) -> int:\n    # How many are left.\n    return self.size",
        ),
        ("Pool.take.inner", "def inner():\n    return 1"),
        ("twice_as_much", "def twice_as_much(x):\n    return 2 * x"),
    ],
)
def test_symbol_source(root: Path, symbol: str, source: str) -> None:
    assert code.symbol_source(root / "lib/pool.py", symbol) == source


@pytest.mark.parametrize(
    ("file", "symbol", "why"),
    [
        ("lib/gone.py", "Pool", "there is no file .*gone.py"),
        ("lib/pool.py", "Pond", "does not define 'Pond' of 'Pond'"),
        ("lib/pool.py", "Pool.give", "does not define 'give' of 'Pool.give'"),
        ("lib/pool.py", "twice", "defines 2 times 'twice'"),
        ("chapters/SUMMARY.md", "x", "not valid Python"),
    ],
)
def test_unknown_symbol_is_refused(root: Path, file: str, symbol: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        code.symbol_source(root / file, symbol)


def test_shown_code_stands_under_its_name(render: Render) -> None:
    result = render(SHOWN)
    assert result == SHOWN.replace(
        "<!-- code: lib/pool.py Pool.free -->",
        '<div class="source">lib/pool.py <b>Pool.free</b></div>\n',
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (SHOWN.replace("self.size", "self.sizes"), "the fence differs from the source"),
        (SHOWN.replace("    # How many are left.\n", ""), "the fence differs from the source"),
        (SHOWN.replace("Pool.free", "Pool.freed"), "does not define 'freed'"),
        (SHOWN.replace("lib/pool.py", "lib/pond.py"), "there is no file"),
        (SHOWN.replace("```python", "text"), "no closed ```python fence follows"),
        (SHOWN.replace("-->\n", "-->\n\n"), "no closed ```python fence follows"),
        (SHOWN.replace(" Pool.free", ""), "should read <!-- code: FILE SYMBOL -->"),
    ],
)
def test_drift_names_file_symbol_and_line(
    root: Path, problems: Problems, text: str, why: str
) -> None:
    path = root / "chapters/01/README.md"
    path.write_text(f"# 01\n\n{text}")
    (problem,) = code.check([path], root)
    assert problem.startswith("chapters/01/README.md:3: ") and why in problem
    if "FILE SYMBOL" not in why:
        file, symbol = text.split()[2:4]
        assert f"code {file} {symbol}: " in problem
    assert problem in problems(path.read_text())


def test_refresh_follows_the_source(root: Path) -> None:
    path, library = root / "chapters/01/README.md", root / "lib/pool.py"
    before = path.read_text()
    assert code.refresh([path], root) == []
    assert path.read_text() == before
    library.write_text(library.read_text().replace("How many", "So many"))
    assert code.refresh([path], root) == [path]
    assert path.read_text() == before.replace("How many", "So many")
    assert code.check([path], root) == []


def test_refresh_writes_a_fence_that_is_missing(root: Path) -> None:
    path = root / "chapters/01/README.md"
    path.write_text("a\n\n<!-- code: lib/pool.py LIMIT -->\n\nb\n")
    code.refresh([path], root)
    assert path.read_text() == (
        "a\n\n<!-- code: lib/pool.py LIMIT -->\n```python\nLIMIT: int = 3\n```\n\nb\n"
    )


def test_refresh_of_an_unknown_symbol_writes_nothing(root: Path) -> None:
    path = root / "chapters/01/README.md"
    text = SHOWN.replace("How", "So") + SHOWN.replace("Pool.free", "Pool.gone")
    path.write_text(text)
    with pytest.raises(ValueError, match="does not define 'gone'"):
        code.refresh([path], root)
    assert path.read_text() == text
