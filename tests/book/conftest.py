"""A small repository with a book in it, and mdBook's side of the preprocessor's protocol."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedattn.book.preprocess import preprocess

ROOT = Path(__file__).resolve().parents[2]

POOL = '''\
"""A pool."""

LIMIT: int = 3


class Pool:
    """Holds blocks."""

    size = 2

    @property
    def free(self) -> int:
        # How many are left.
        return self.size

    def take(self):
        def inner():
            return 1

        return inner()


def twice_as_much(x):
    return 2 * x


def twice(): ...


def twice(): ...
'''

PICTURE = '<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"><rect id="a"/></svg>'

SHOWN = """\
<!-- code: lib/pool.py Pool.free -->
```python
@property
def free(self) -> int:
    # How many are left.
    return self.size
```
"""

CHAPTER = f"""\
# 01 First

A sequence needs $\\lceil (p+1)/B \\rceil$ blocks, for $5 and $10.

$$
a_1 * b_1
$$

![blocks](../../figures/pool.svg)
*Figure 1.1. Blocks.*

See [the second](../02/README.md#the-problem), [the start](../README.md), [here](#predict),
[`pool.py`](../../lib/pool.py), [outside](https://example.org/a) and a note.[^1]

{SHOWN}
## Predict

<details><summary>Which slot?</summary>

29.

</details>

[^1]: A footnote.
"""

SUMMARY = """\
# Summary

[Start](README.md)

# Part

- [01 First](01/README.md)
- [02 Second](02/README.md)
- [03 Draft]()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small repository with the real book.toml and style, two chapters and one draft."""
    shutil.copy(ROOT / "book.toml", tmp_path)
    shutil.copytree(ROOT / "chapters" / "theme", tmp_path / "chapters" / "theme")
    for name, text in {
        "lib/pool.py": POOL,
        "figures/pool.svg": PICTURE,
        "figures/pool.py": "",
        "figures/unused.svg": PICTURE,
        "chapters/SUMMARY.md": SUMMARY,
        "chapters/README.md": "# Start\n\n[First](01/README.md#predict)\n",
        "chapters/01/README.md": CHAPTER,
        "chapters/01/exercise.py": "",
        "chapters/01/tasks.toml": "",
        "chapters/01/notes.ipynb": "{}",
        "chapters/01/bugs/leaks.py": "",
        "chapters/01/__pycache__/x.pyc": "",
        "chapters/02/README.md": "# 02 Second\n\n## The problem\n\n## Predict\n\n[up](#predict)\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


Message = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture
def message(root: Path) -> Callable[[str], Message]:
    """What mdBook 0.5 sends when chapters/01/README.md holds a given text."""

    def make(text: str) -> Message:
        items = [
            _chapter("README.md", "# Start\n"),
            _chapter("01/README.md", text),
            {"PartTitle": "Part"},
            "Separator",
            _chapter(None, "", _chapter("02/README.md", "# 02\n\n$x$\n")),
        ]
        return {"root": str(root), "config": {"book": {"src": "chapters"}}}, {"items": items}

    return make


def _chapter(source: str | None, content: str, *sub_items: Any) -> dict[str, Any]:
    chapter = {
        "name": "x",
        "content": content,
        "sub_items": list(sub_items),
        "path": source and source.replace("README", "index"),
        "source_path": source,
    }
    return {"Chapter": chapter}


@pytest.fixture
def render(message: Callable[[str], Message]) -> Callable[[str], str]:
    """What the preprocessor makes of a text standing in chapters/01/README.md."""

    def run(text: str) -> str:
        context, book = message(text)
        assert preprocess(context, book) == []
        return str(book["items"][1]["Chapter"]["content"])

    return run


@pytest.fixture
def problems(message: Callable[[str], Message]) -> Callable[[str], list[str]]:
    """What the preprocessor finds wrong with that text."""
    return lambda text: preprocess(*message(text))
