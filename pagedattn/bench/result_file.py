"""The JSON file of a benchmark: the command that made it, then the result."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_result(
    path: Path | None, result: Mapping[str, Any], words: Sequence[str] | None = None
) -> None:
    """Write ``result`` to ``path``, if one is given, below the command that made it: ``words``
    after `pagedattn`, or those of this run. Raises OSError for a file that cannot be written."""
    if path is None:
        return
    command = " ".join(["pagedattn", *(sys.argv[1:] if words is None else words)])
    content = {"command": command, **result}
    path.write_text(json.dumps(content, indent=2) + "\n")
