"""The student's file: a chapter's module with the bodies of its tasks left out.

    # Chapter 02, yours to write: …
    # made from sha256 5b1f…

Below that header stands the module's own text, byte for byte but for those bodies. The checksum is
that of the text below it, so a file that a student has touched is known as such and is kept.
"""

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Collection
from enum import Enum
from hashlib import sha256

from pagedattn.course.names import find_functions
from pagedattn.course.tasks import ChapterTasks, Task

LINE_LENGTH = 100
_CHECKSUM = re.compile(r"\A(?:#[^\n]*\n)*# made from sha256 ([0-9a-f]{64})\n\n")


class Written(Enum):
    """What became of one exercise."""

    NEW = "written"
    SAME = "unchanged"
    EDITED = "kept"


def generate(chapter: ChapterTasks, tasks: Collection[Task] | None = None) -> str:
    """The text of `exercise.py`. With `tasks`, the bodies of those only are left out.

    Raises ValueError for a symbol whose body does not stand on lines of its own or is missing.
    """
    source = chapter.module.read_text(encoding="utf-8")
    body = leave_out(source, chapter.tasks if tasks is None else tasks)
    return _header(chapter) + f"# made from sha256 {_checksum(body)}\n\n{body}"


def _header(chapter: ChapterTasks) -> str:
    folder, first = f"chapters/{chapter.chapter}", chapter.tasks[0].id
    module = "/".join(chapter.module.parts[-2:])
    return (
        f"# Chapter {chapter.chapter}, yours to write: {module} without the bodies of its tasks.\n"
        f"#   pytest {folder} --student                all its tests on this file\n"
        f"#   pytest {folder} --student --task {first}     those of one task\n"
        "# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.\n"
    )


def _checksum(body: str) -> str:
    return sha256(body.encode()).hexdigest()


def leave_out(source: str, tasks: Collection[Task]) -> str:
    """The source with every body of these tasks replaced by what is to do; docstrings stay."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    cuts = []
    for task in tasks:
        for symbol in task.symbols:
            (function,) = find_functions(tree, symbol)
            start, end = _body(lines, function, symbol)
            cuts.append((start, end, _raise(task, " " * function.body[0].col_offset)))
    for start, end, text in sorted(cuts, reverse=True):
        lines[start:end] = [text]
    return "".join(lines)


def _body(
    lines: list[str], function: ast.FunctionDef | ast.AsyncFunctionDef, symbol: str
) -> tuple[int, int]:
    """Where a function's body stands, without its docstring: lines[start:end].

    Comments of the body count as body, before its first statement and after its last one.
    """
    statements = function.body
    start = _end_of_signature(lines, function)
    if statements[0].lineno <= start:
        raise ValueError(f"the body of {symbol} must stand on lines of its own")
    if ast.get_docstring(function) is not None:
        start = statements[0].end_lineno or start
        statements = statements[1:]
    if not statements:
        raise ValueError(f"{symbol} has no body to leave out")
    end = statements[-1].end_lineno or start
    for number in range(end, len(lines)):
        text = lines[number].strip()
        indent = len(lines[number]) - len(lines[number].lstrip())
        if text.startswith("#") and indent > function.col_offset:
            end = number + 1
        elif text:
            break
    return start, end


def _end_of_signature(lines: list[str], function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of the last line of `def …:`."""
    text = io.StringIO("".join(lines[function.lineno - 1 :]))
    for token in tokenize.generate_tokens(text.readline):
        if token.type == tokenize.NEWLINE:
            return function.lineno - 1 + token.end[0]
    raise ValueError(f"{function.name} has no end")


def _raise(task: Task, indent: str) -> str:
    line = f"{indent}raise NotImplementedError({_quoted(task.message)})\n"
    if len(line) <= LINE_LENGTH + 1:
        return line
    # Two quotes, a space at the end, and a backslash for every quote inside.
    room = LINE_LENGTH - len(indent) - 7 - task.message.count('"') - task.message.count("\\")
    *firsts, last = textwrap.wrap(task.message, room, break_long_words=False)
    parts = "".join(f"{indent}    {_quoted(part)}\n" for part in [*(f + " " for f in firsts), last])
    return f"{indent}raise NotImplementedError(\n{parts}{indent})\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def is_edited(text: str) -> bool:
    """Whether a student has touched this exercise since it was generated."""
    found = _CHECKSUM.match(text)
    return found is None or _checksum(text[found.end() :]) != found[1]


def write(chapter: ChapterTasks, force: bool = False) -> Written:
    """Writes `exercise.py`, but keeps one that a student has edited, unless forced."""
    path, new = chapter.folder / "exercise.py", generate(chapter)
    old = path.read_text(encoding="utf-8") if path.is_file() else None
    if old == new:
        return Written.SAME
    if old is not None and is_edited(old) and not force:
        return Written.EDITED
    path.write_text(new, encoding="utf-8")
    return Written.NEW


def check(chapters: list[ChapterTasks]) -> list[str]:
    """The exercises that differ from what would be generated, one line each."""
    problems = []
    for chapter in chapters:
        path, name = chapter.folder / "exercise.py", f"chapters/{chapter.chapter}/exercise.py"
        if not path.is_file():
            problems.append(f"{name} is missing (make exercises writes it)")
        elif path.read_text(encoding="utf-8") != generate(chapter):
            problems.append(
                f"{name} differs from what is generated (edited? "
                "make exercises keeps it, pagedattn exercises --force writes it anew)"
            )
    return problems
