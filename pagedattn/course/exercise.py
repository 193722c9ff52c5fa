"""The student's files: each module of a chapter's stage with the bodies of its tasks left out.

    # Chapter 02, yours to write: …
    # made from sha256 5b1f…

Below that header stands the module's own text, byte for byte but for those bodies. The checksum is
that of the text below it, so a file that a student has touched is known as such and is kept.

A stage of one module makes `exercise.py`, a package makes a folder `exercise` with all its modules.
"""

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Collection, Iterator
from enum import Enum
from hashlib import sha256
from pathlib import Path

from pagedattn.course.chapters import exercise_path, module_files
from pagedattn.course.names import find_functions
from pagedattn.course.tasks import ChapterTasks, Task

LINE_LENGTH = 100
_CHECKSUM = re.compile(r"\A(?:#[^\n]*\n)*# made from sha256 ([0-9a-f]{64})\n\n")


class Written(Enum):
    """What became of one file of an exercise."""

    NEW = "written"
    SAME = "unchanged"
    EDITED = "kept"


def generate(chapter: ChapterTasks, tasks: Collection[Task] | None = None) -> dict[str, str]:
    """The texts of the exercise by file, seen from the chapter's folder: `exercise.py`.

    With `tasks`, the bodies of those only are left out. Raises ValueError for a symbol whose body
    does not stand on lines of its own or is missing.
    """
    path = exercise_path(chapter.folder)
    texts = {}
    for file in module_files(chapter.module):
        mine = path / file.name if chapter.module.is_dir() else path
        left_out = [t for t in (chapter.tasks if tasks is None else tasks) if t.file == file]
        body = leave_out(file.read_text(encoding="utf-8"), left_out)
        header = _header(chapter, file) + f"# made from sha256 {_checksum(body)}\n\n"
        texts[mine.relative_to(chapter.folder).as_posix()] = header + body
    return texts


def _header(chapter: ChapterTasks, file: Path) -> str:
    folder, root = f"chapters/{chapter.chapter}", chapter.folder.parents[1]
    module = file.relative_to(root).as_posix()
    its_tasks = [task for task in chapter.tasks if task.file == file]
    what = (
        f"yours to write: {module} without the bodies of its tasks"
        if its_tasks
        else f"given: {module}; the tasks stand in the files beside it"
    )
    first = (its_tasks or chapter.tasks)[0].id
    whole = "folder" if chapter.module.is_dir() else "file"
    return (
        f"# Chapter {chapter.chapter}, {what}.\n"
        f"#   pytest {folder} --student                all its tests on this {whole}\n"
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


def write(chapter: ChapterTasks, force: bool = False) -> dict[str, Written]:
    """Writes the exercise, but keeps each file that a student has edited, unless forced."""
    return {
        name: _write(chapter.folder / name, text, force) for name, text in generate(chapter).items()
    }


def _write(path: Path, new: str, force: bool) -> Written:
    old = path.read_text(encoding="utf-8") if path.is_file() else None
    if old == new:
        return Written.SAME
    if old is not None and is_edited(old) and not force:
        return Written.EDITED
    path.parent.mkdir(exist_ok=True)
    path.write_text(new, encoding="utf-8")
    return Written.NEW


def check(chapters: list[ChapterTasks]) -> list[str]:
    """The exercises that differ from what would be generated, one line each."""
    return [
        f"chapters/{chapter.chapter}/{problem}"
        for chapter in chapters
        for problem in _problems(chapter)
    ]


def _problems(chapter: ChapterTasks) -> Iterator[str]:
    generated = generate(chapter)
    for name, text in generated.items():
        path = chapter.folder / name
        if not path.is_file():
            yield f"{name} is missing (make exercises writes it)"
        elif path.read_text(encoding="utf-8") != text:
            yield (
                f"{name} differs from what is generated (edited? "
                "make exercises keeps it, pagedattn exercises --force writes it anew)"
            )
    for path in sorted([*chapter.folder.glob("exercise.py"), *chapter.folder.glob("exercise/*")]):
        name = path.relative_to(chapter.folder).as_posix()
        if name not in generated and path.name != "__pycache__":
            yield f"{name}: the stage has no such module (delete it)"
