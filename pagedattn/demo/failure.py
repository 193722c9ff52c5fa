"""What to say when somebody's cache raises an error: what, and in which line of which file."""

import traceback
from pathlib import Path

import torch

from pagedattn.course.chapters import shown

TORCH = Path(torch.__file__).parent


def where_it_failed(error: BaseException) -> str:
    """The error in one line, after the line of code that it came from: the last one outside
    torch."""
    error = _first(error)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if TORCH not in Path(frame.filename).parents]
    words = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if not ours:
        return words
    return f"{shown(Path(ours[-1].filename))}, line {ours[-1].lineno}, in {ours[-1].name}: {words}"


def _first(error: BaseException) -> BaseException:
    """The error that happened first: what follows while cleaning up comes from it."""
    while error.__context__ and not error.__suppress_context__:
        error = error.__context__
    return error
