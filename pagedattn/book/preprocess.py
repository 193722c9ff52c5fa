"""mdBook preprocessor: formulas to MathML, links that hold in the book, code held to its source.

`python -m pagedattn.book.preprocess` speaks mdBook's protocol: [context, book] as JSON on standard
input, the book on standard output. Every problem of every chapter is listed on standard error, one
a line, and then the exit status is 1.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from . import code
from .mathml import mathml

PICTURES = frozenset({".svg", ".png"})

# What a chapter is made of, in order of precedence: first what is left alone, then what is changed.
# Dollar signs are mathematics by pandoc's rule: no space after the opening one, none before the
# closing one, no digit after it. So "$5 and $10" stays an amount of money.
_TOKEN = re.compile(
    r"""
    (?P<fence> ^[ \t>]*(?:(?:[-*+]|\d+[.)])[ \t]+)?(?P<ticks>`{3,}|~{3,})[^\n]*\n
               (?:.*?\n)??[ \t>]*(?P=ticks)[`~]*[ \t]*$ )
  | (?P<span> (?<!`)(?P<run>`+)(?!`)(?:(?!\n[ \t]*\n).)+?(?<!`)(?P=run)(?!`) )
  | (?P<comment> <!--.*?--> )
  | (?P<escape> \\. | `+ )
  | (?P<display> \$\$(?P<block>(?:(?!\n[ \t]*\n|\$\$).)*)(?P<close>\$\$)? )
  | (?P<inline> (?<![\w$])\$(?=\S)(?P<formula>(?:\\.|(?!\n[ \t]*\n)[^$\\`])+?)(?<=\S)\$(?!\d) )
  | (?P<link> !?\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]
              \(\s*<?(?P<target>[^()\s<>]+)>?(?P<title>\s+"[^"]*")?\s*\) )
  | (?P<image> <img\s[^>]*?src="(?P<src>[^"]*)" )
  | (?P<include> \{\{\s*\# )
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)


@dataclass
class Chapter:
    """One Markdown file on its way into the book."""

    path: Path  # of the file, absolute
    source: Path  # the book's folder of chapters
    root: Path  # the repository
    known: frozenset[Path]  # every chapter named in SUMMARY.md
    problems: list[str] = field(default_factory=list)

    def render(self, text: str) -> str:
        """The chapter as mdBook should read it; what is wrong goes into `problems`."""
        for line, problem in code.check_text(text, self.root):
            self._report(line, problem)
        return self._transform(text, 1)

    def _transform(self, text: str, first_line: int) -> str:
        def replace(found: re.Match[str]) -> str:
            line = first_line + text.count("\n", 0, found.start())
            try:
                return self._token(found, line)
            except ValueError as error:
                self._report(line, str(error))
                return found[0]

        return _TOKEN.sub(replace, text)

    def _token(self, found: re.Match[str], line: int) -> str:
        match found.lastgroup:
            case "comment":
                return _caption(found[0])
            case "display":
                if found["close"] is None:
                    raise ValueError("'$$' opens a formula that does not close in this paragraph")
                return _formula(found["block"], display=True)
            case "inline":
                return _formula(found["formula"], display=False)
            case "link":
                return self._link(found, line)
            case "image":
                start, end = (edge - found.start() for edge in found.span("src"))
                return found[0][:start] + self._address(found["src"]) + found[0][end:]
            case "include":
                raise ValueError("{{#…}} is not used here: show code under <!-- code: … -->")
        return found[0]

    def _link(self, found: re.Match[str], line: int) -> str:
        bang = "!" if found[0].startswith("!") else ""
        text = found["text"] if bang else self._transform(found["text"], line)
        if not bang and (path := self._outside_the_book(found["target"])):
            return _named(text, path)
        return f"{bang}[{text}]({self._address(found['target'])}{found['title'] or ''})"

    def _address(self, target: str) -> str:
        """A link's target, as the page in the book must name it."""
        path, fragment = self._resolve(target)
        if path is None:
            return target
        if path.suffix == ".md":
            if path not in self.known:
                raise ValueError(f"link to {target}: not a chapter in SUMMARY.md")
            target = os.path.relpath(path.with_name(_page_name(path.name)), self.path.parent)
        elif path.is_relative_to(self.root / "figures"):
            place = self.source / path.relative_to(self.root)
            target = os.path.relpath(place, self.path.parent)
        elif not path.is_relative_to(self.source):
            raise ValueError(f"picture {target}: it must lie in figures/ or beside the chapter")
        return Path(target).as_posix() + fragment

    def _outside_the_book(self, target: str) -> str | None:
        """The repository path of a file that has no page in the book, None for anything else."""
        path, _ = self._resolve(target)
        if path is None or path.suffix in PICTURES:
            return None
        if path.suffix == ".md" and path.is_relative_to(self.source):
            return None
        return path.relative_to(self.root).as_posix() + ("/" if path.is_dir() else "")

    def _resolve(self, target: str) -> tuple[Path | None, str]:
        """(file, fragment) of a relative link; (None, "") for a link within the page or outside.

        Raises ValueError when there is no such file in the repository.
        """
        if re.match(r"[a-z][a-z0-9+.-]*:|#", target, re.IGNORECASE):
            return None, ""
        address, hash_sign, fragment = target.partition("#")
        path = Path(os.path.normpath(self.path.parent / unquote(address)))
        if not path.is_relative_to(self.root):
            raise ValueError(f"link to {target}: it leaves the repository")
        if not path.exists():
            raise ValueError(f"link to {target}: there is no {path.relative_to(self.root)}")
        return path, hash_sign + fragment

    def _report(self, line: int, problem: str) -> None:
        self.problems.append(f"{self.path.relative_to(self.root)}:{line}: {problem}")


def _formula(latex: str, *, display: bool) -> str:
    latex = re.sub(r"\n[ \t>]*", "\n", latex).strip()  # inside a quotation each line starts with >
    try:
        return mathml(latex, display=display)
    except ValueError as error:
        raise ValueError(f"formula {latex!r}: {error}") from error


def _caption(comment: str) -> str:
    """The line over shown code that tells the reader where it lives; other comments stay."""
    marker = code.MARKER.match(comment + "\n")
    if marker is None:
        return comment
    return f'<div class="source">{marker["file"]} <b>{marker["symbol"]}</b></div>\n'


def _named(text: str, path: str) -> str:
    """A file that a reader of the book finds in the repository, as text: no dead link."""
    if text.strip("`") in (path, path.rstrip("/"), Path(path).name):
        return f"`{path}`"
    return f"{text} (`{path}`)"


def _page_name(name: str) -> str:
    return "index.md" if name.lower() == "readme.md" else name


def _chapters(items: list[Any]) -> Iterator[dict[str, Any]]:
    """All chapters that have a text, drafts left out, in reading order."""
    for item in items:
        if isinstance(item, dict) and "Chapter" in item:
            chapter = item["Chapter"]
            if chapter["source_path"] is not None:
                yield chapter
            yield from _chapters(chapter["sub_items"])


def preprocess(context: dict[str, Any], book: dict[str, Any]) -> list[str]:
    """Rewrites the chapters of mdBook's `book` in place; returns what is wrong, a line each."""
    root = Path(context["root"]).resolve()
    source = root / context["config"]["book"]["src"]
    chapters = list(_chapters(book["items"]))
    known = frozenset(source / chapter["source_path"] for chapter in chapters)
    problems: list[str] = []
    for chapter in chapters:
        page = Chapter(source / chapter["source_path"], source, root, known, problems)
        chapter["content"] = page.render(chapter["content"])
    return problems


def main(args: list[str]) -> int:
    """What mdBook runs: `supports RENDERER` asks; else a book comes in as JSON and goes out so.

    Returns 1, with one line a problem on stderr, when the book must not be built.
    """
    if args[:1] == ["supports"]:
        return 0 if args[1:] == ["html"] else 1
    context, book = json.load(sys.stdin)
    problems = preprocess(context, book)
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    json.dump(book, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
