"""Links from a chapter into the book, and the crawl over a built site."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pagedattn.book.links import crawl

Render = Callable[[str], str]
Problems = Callable[[str], list[str]]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("[a](../02/README.md)", "[a](../02/index.md)"),
        ("[a](../02/README.md#b)", "[a](../02/index.md#b)"),
        ('[a](../README.md "t")', '[a](../index.md "t")'),
        ("[a](#b) [c](https://d.org/e)", "[a](#b) [c](https://d.org/e)"),
        ("![f](../../figures/pool.svg)", "![f](../figures/pool.svg)"),
        ('<img src="../../figures/pool.svg">', '<img src="../figures/pool.svg">'),
        (
            "[![f](../../figures/pool.svg)](../02/README.md)",
            "[![f](../figures/pool.svg)](../02/index.md)",
        ),
        ("[pool.py](../../lib/pool.py)", "`lib/pool.py`"),
        ("[`lib/pool.py`](../../lib/pool.py)", "`lib/pool.py`"),
        ("[the pool](../../lib/pool.py#L3)", "the pool (`lib/pool.py`)"),
        ("[`exercise.py`](exercise.py)", "`chapters/01/exercise.py`"),
        ("[bugs](bugs)", "`chapters/01/bugs/`"),
        ("[six of them](bugs)", "six of them (`chapters/01/bugs/`)"),
    ],
)
def test_links_are_those_of_the_book(render: Render, text: str, result: str) -> None:
    assert render(text) == result


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[a](../../lib/gone.py)", "link to ../../lib/gone.py: there is no lib/gone.py"),
        ("[a](../03/README.md)", "there is no chapters/03/README.md"),
        ("![a](../../figures/gone.svg)", "there is no figures/gone.svg"),
        ("[a](../../../x)", "it leaves the repository"),
        ("![a](../../lib/pool.py)", "must lie in figures/ or beside the chapter"),
        ("[a](../SUMMARY.md)", "not a chapter in SUMMARY.md"),
    ],
)
def test_dead_link_names_file_line_and_target(
    root: Path, problems: Problems, text: str, why: str
) -> None:
    (problem,) = problems(f"# 01\n\n{text}\n")
    assert problem.startswith("chapters/01/README.md:3: ")
    assert why in problem


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"a.html": '<a href="b.html">'}, "a.html: b.html: there is no such page"),
        ({"a.html": '<a href="../b.html">'}, "leads out of the book"),
        ({"a.html": '<a href="/a.html">'}, "starts at a server's root"),
        ({"a.html": '<a href="#x">'}, "a.html has no heading or anchor named 'x'"),
        ({"a.html": '<a href="b/c.html#x">', "b/c.html": '<p id="y">'}, "b/c.html has no heading"),
        ({"a.html": '<img src="b.svg">'}, "there is no such page"),
        ({"a.html": '<script src="b.js"></script>'}, "there is no such page"),
        ({"a.html": '<link rel="stylesheet" href="b.css">'}, "there is no such page"),
        ({"a.html": '<script src="https://c.org/m.js"></script>'}, "from the network"),
        ({"a.html": '<link href="//c.org/m.css">'}, "from the network"),
        ({"a.html": '<img src="http://c.org/m.png">'}, "from the network"),
        ({"a.css": "p { background: url('https://c.org/m.png') }"}, "from the network"),
        ({"a.css": '@import "https://c.org/m.css";'}, "from the network"),
        ({"a.css": "@font-face { src: url(gone.woff2) }"}, "there is no such page"),
        ({"a.svg": '<svg><image xlink:href="https://c.org/m.png"/></svg>'}, "from the network"),
        ({"a#b.txt": ""}, "no link can name a file with '#'"),
    ],
)
def test_crawl_tells_what_is_broken(tmp_path: Path, files: dict[str, str], why: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (problem,) = crawl(tmp_path).problems
    assert why in problem


def test_crawl_accepts_what_works(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.html").write_text(
        '<a href="../a.html#%C3%A9t%C3%A9"><a href="#"><a href="https://c.org">'
    )
    (tmp_path / "a.html").write_text(
        '<h1 id="été"><a href="b/c.html"><img src="data:image/png;base64,AA"><img src="p.svg">'
    )
    (tmp_path / "p.svg").write_text('<svg><path id="m"/><use xlink:href="#m"/></svg>')
    found = crawl(tmp_path)
    assert found.problems == []
    assert found.used == {"a.html", "b/c.html", "p.svg"}
