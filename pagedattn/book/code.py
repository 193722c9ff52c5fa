"""Code shown in a chapter is the library's code, and stays so.

In a chapter, the line

    <!-- code: pagedattn/paged.py BlockPool.free_blocks -->

says that the fence below it shows that symbol. `check` reports every fence that differs from its
symbol, `refresh` rewrites it. Files are named from the repository's root.
"""

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MARKER = re.compile(r"^<!-- *code: *(?P<file>\S+) +(?P<symbol>\S+) *-->[ \t]*\n", re.MULTILINE)
_FENCE = re.compile(r"(?P<ticks>`{3,})python\n(?P<body>.*?)^(?P=ticks)[ \t]*(?:\n|\Z)", re.M | re.S)
_ANY_MARKER = re.compile(r"^ {0,3}<!--\s*code\b.*", re.MULTILINE)


def symbol_source(path: Path, symbol: str) -> str:
    """The source of one symbol of a Python file, dedented, decorators included, without newline.

    `symbol` is a function, a class or a constant of the module, or one inside another, joined by
    dots: `BlockPool.free_blocks`, `outer.inner`.

    Raises ValueError when there is no such file, when it is not Python, or when the symbol is
    missing or defined more than once.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    source = path.read_text(encoding="utf-8")
    try:
        scope: ast.Module | ast.stmt = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"{path} is not valid Python: {error}") from error
    for name in symbol.split("."):
        found = [node for node in _definitions(scope) if name in _names(node)]
        if len(found) != 1:
            how = "does not define" if not found else f"defines {len(found)} times"
            raise ValueError(f"{path} {how} {name!r} of {symbol!r}")
        scope = found[0]
    assert isinstance(scope, ast.stmt)
    first = min(node.lineno for node in [scope, *getattr(scope, "decorator_list", [])])
    lines = source.split("\n")[first - 1 : scope.end_lineno]
    return textwrap.dedent("\n".join(lines))


def _definitions(scope: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a scope, those under `if` and `try` included, not those of inner scopes."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _definitions(node)


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def check(paths: Iterable[Path], root: Path = ROOT) -> list[str]:
    """What is wrong with the code shown in these Markdown files, one line each."""
    return [
        f"{_shown(path, root)}:{line}: {problem}"
        for path in paths
        for line, problem in check_text(path.read_text(encoding="utf-8"), root)
    ]


def check_text(text: str, root: Path) -> list[tuple[int, str]]:
    """The same for one Markdown text: (line, problem) pairs."""
    problems = []
    for found in _ANY_MARKER.finditer(text):
        marker = MARKER.match(text, found.start())
        problem = (
            _problem(text, marker, root)
            if marker
            else f"{found[0].strip()!r} should read <!-- code: FILE SYMBOL -->"
        )
        if problem:
            problems.append((text.count("\n", 0, found.start()) + 1, problem))
    return problems


def _problem(text: str, marker: re.Match[str], root: Path) -> str | None:
    file, symbol = marker["file"], marker["symbol"]
    try:
        source = symbol_source(root / file, symbol)
    except ValueError as error:
        return f"code {file} {symbol}: {error}"
    fence = _FENCE.match(text, marker.end())
    if fence is None:
        return f"code {file} {symbol}: no closed ```python fence follows"
    if fence["body"] != source + "\n":
        return f"code {file} {symbol}: the fence differs from the source (try make exercises)"
    return None


def refresh(paths: Iterable[Path], root: Path = ROOT) -> list[Path]:
    """Rewrites the fence under every marker, or adds it; returns the files that changed.

    Raises ValueError for an unknown file or symbol, before the Markdown file is written.
    """
    changed = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        fresh = _refreshed(text, root)
        if fresh != text:
            path.write_text(fresh, encoding="utf-8")
            changed.append(path)
    return changed


def _refreshed(text: str, root: Path) -> str:
    parts, end = [], 0
    for marker in MARKER.finditer(text):
        source = symbol_source(root / marker["file"], marker["symbol"])
        ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", source)), default=0))
        fence = _FENCE.match(text, marker.end())
        parts += [text[end : marker.end()], f"{ticks}python\n{source}\n{ticks}\n"]
        end = fence.end() if fence else marker.end()
    return "".join([*parts, text[end:]])


def _shown(path: Path, root: Path) -> str:
    absolute = path.resolve()
    return str(absolute.relative_to(root)) if absolute.is_relative_to(root) else str(path)
