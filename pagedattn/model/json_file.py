"""A JSON file of a model folder, looked up by key."""

import json
from pathlib import Path
from typing import Any

from pagedattn.model.metadata import Metadata
from pagedattn.model.valid_text import check_text


class JsonFile(Metadata):
    """An opened JSON file. The key ``"a.b"`` is what stands under "b" in the object under "a".

    An ``optional`` file that does not exist says nothing. Raises ModelFileError when the file is
    missing, or no JSON object, and on looking up a string that is no valid text.
    """

    def __init__(self, path: Path, *, optional: bool = False) -> None:
        self.path = path
        self._object: dict[str, Any] = {}
        if optional and not path.exists():
            return
        if not path.is_file():
            raise self.error("not a file" if path.exists() else "no such file")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as reason:
            raise self.error(f"cannot be read as JSON: {reason}") from reason
        if not isinstance(found, dict):
            raise self.error(f"holds a {type(found).__name__}, expected an object")
        self._object = found

    def get(self, key: str) -> Any:
        found: Any = self._object
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        try:
            return check_text(found, key) if isinstance(found, str) else found
        except ValueError as reason:
            raise self.error(str(reason)) from reason
