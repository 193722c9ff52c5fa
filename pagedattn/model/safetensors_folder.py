"""A folder of safetensors files, opened and checked: tensors by name.

The tensors lie in one file, ``model.safetensors``, or in several, called shards, and then
``model.safetensors.index.json`` says which tensor lies in which shard. A safetensors file is a
header (name, type, shape and place of every tensor) followed by the tensors' bytes, and holds no
program. The headers give away a shard that is missing, cut off or another model's, so they are
looked at here, before anybody reads a weight. Format: github.com/huggingface/safetensors.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagedattn.model.json_file import JsonFile
from pagedattn.model.metadata import ModelFileError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")
PICKLES = ("*.bin", "*.pt", "*.pth")


class SafetensorsFolder:
    """The weights in a folder: ``shapes[name]`` and ``tensor(name)``.

    Other files in the folder are no concern of it. Raises ModelFileError when there are no weights
    or only pickled ones, when a shard is missing or cut off, when index and shards do not agree
    about a tensor, and for a tensor of a type other than float32, float16 and bfloat16.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._shards: dict[str, Any] = {}  # file name -> the opened file
        self._shard_of: dict[str, str] = {}  # tensor -> file name
        self.shapes: dict[str, tuple[int, ...]] = {}
        index = self._read_index()
        for shard in [SINGLE] if index is None else sorted(set(index.values())):
            self._open(shard, index)
        for name, shard in (index or {}).items():
            if self._shard_of.get(name) != shard:
                raise self._error(shard, f"tensor {name} is missing, but {INDEX} says it is here")

    def tensor(self, name: str) -> Tensor:
        """A tensor, as float32."""
        tensor: Tensor = self._shards[self._shard_of[name]].get_tensor(name)
        return tensor.to(torch.float32)

    def error(self, message: str, name: str | None = None) -> ModelFileError:
        """The error that names the folder, or the file in it where the tensor ``name`` lies."""
        if name is None:
            return ModelFileError(f"{self.path}: {message}")
        return self._error(self._shard_of[name], message)

    def _error(self, file_name: str, message: str) -> ModelFileError:
        return ModelFileError(f"{self.path / file_name}: {message}")

    def _read_index(self) -> dict[str, str] | None:
        """Tensor -> name of its shard; None when a single file holds all."""
        if (self.path / SINGLE).exists():
            return None
        if not (self.path / INDEX).exists():
            pickles = sorted(file.name for kind in PICKLES for file in self.path.glob(kind))
            if pickles:
                raise self.error(
                    f"its weights are pickled ({pickles[0]}), and to unpickle a file is to run "
                    f"whatever program it holds; convert them to {SINGLE}"
                )
            raise self.error(f"holds neither {SINGLE} nor {INDEX}")
        file = JsonFile(self.path / INDEX)
        index = file.value("weight_map", dict)
        for name, shard in index.items():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise file.error(f"tensor {name} is in {shard!r:.80}, expected a file name")
        if not index:
            raise file.error("weight_map is empty")
        return index

    def _open(self, shard: str, index: dict[str, str] | None) -> None:
        path = self.path / shard
        if not path.is_file():
            raise self._error(shard, "not a file" if path.exists() else "no such file")
        try:
            opened = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as reason:
            raise self._error(shard, f"damaged or cut off: {reason}") from reason
        self._shards[shard] = opened
        for name in opened.keys():  # noqa: SIM118 - no mapping
            if index is not None and index.get(name) != shard:
                raise self._error(shard, f"unexpected tensor {name}: {INDEX} does not say so")
            header = opened.get_slice(name)
            if header.get_dtype() not in DTYPES:
                raise self._error(
                    shard,
                    f"tensor {name} is of type {header.get_dtype()}, not of {', '.join(DTYPES)}",
                )
            self._shard_of[name] = shard
            self.shapes[name] = tuple(header.get_shape())
