"""Facts of a model file by key, each of the type that is asked for."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class ModelFileError(ValueError):
    """A model file that cannot be used; the message names the file, and the tensor or key."""


class Metadata(ABC):
    """A file whose facts are looked up by key: ``value``, ``values``, ``has``, ``require``.

    All of them raise ModelFileError, naming file and key, for what is missing or of another type.
    """

    path: Path

    @abstractmethod
    def get(self, key: str) -> Any:
        """What stands under ``key``; None where there is nothing."""

    def error(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {message}")

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def value(self, key: str, kind: Callable[..., T] | type[T], default: T | None = None) -> T:
        """The fact under ``key``, of type ``kind``; ``default`` where the file has none.

        A whole number will do for a float.
        """
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.error(f"{key} is missing")
            return default
        wanted = (int, float) if kind is float else kind
        if not isinstance(value, wanted) or (kind is not bool and isinstance(value, bool)):  # type: ignore[arg-type]
            raise self.error(f"{key} is {value!r:.80}, expected {kind.__name__}")
        if kind is float and isinstance(value, int):
            value = float(value) if abs(value) < sys.float_info.max else math.inf
        return value

    def values(self, key: str, kind: type[T], default: list[T] | None = None) -> list[T]:
        """The list under ``key``, every entry of type ``kind``."""
        values = self.value(key, list, default)
        for value in values:
            if type(value) is not kind:
                raise self.error(f"{key} holds {value!r:.80}, expected {kind.__name__}")
        return values

    def require(self, key: str, only: Any) -> None:
        """Raise unless the file says ``only`` under ``key``, or nothing.

        For what would change the model's results in a way that the decoder does not follow.
        """
        value = self.get(key)
        if value is not None and value != only:
            raise self.error(f"{key} = {value!r:.80} is not supported by this decoder, only {only}")
