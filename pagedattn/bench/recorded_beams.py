"""Which beams live on, recorded from real searches of SmolLM2: see pagedattn/data/beams."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache
from importlib import resources
from random import Random

FILE = "smollm2_parents.json.gz"
Parents = tuple[int, ...]


@cache
def recorded_searches() -> dict[int, list[list[Parents]]]:
    """The recorded searches by width: of each, for every step but the first, which beam of the step
    before each new beam continues, as an index."""
    content = json.loads(
        gzip.decompress((resources.files("pagedattn.data") / "beams" / FILE).read_bytes())
    )
    return {
        int(width): [[tuple(map(int, step)) for step in search.split()] for search in searches]
        for width, searches in content["parents"].items()
    }


def endless_parents(width: int, seed: int) -> Iterator[Parents]:
    """The steps of a recorded search, and when it ends those of another, for as long as it takes.

    Which ones is drawn with ``seed``. Raises ValueError for a width that was not recorded.
    """
    searches = recorded_searches().get(width)
    if searches is None:
        known = ", ".join(map(str, recorded_searches()))
        raise ValueError(f"no searches of width {width} were recorded; known: {known}")
    random = Random(seed)
    while True:
        yield from random.choice(searches)
