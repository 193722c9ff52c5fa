"""Quantised tensors, number by number, by the published formats in plain arithmetic.

Formats: github.com/ggml-org/ggml, src/ggml-common.h (the blocks) and src/ggml-quants.c (what they
stand for).
"""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from pagedattn.model.gguf_file import GGUFFile


def half(block: bytes, place: int) -> float:
    number: float = struct.unpack_from("<e", block, place)[0]
    return number


def f32(block: bytes, i: int) -> float:
    number: float = struct.unpack("<f", block)[0]
    return number


def f16(block: bytes, i: int) -> float:
    return half(block, 0)


def bf16(block: bytes, i: int) -> float:
    """The upper half of a float32."""
    return f32(bytes(2) + block, i)


def q8_0(block: bytes, i: int) -> float:
    """A scale, then 32 signed bytes."""
    number: int = struct.unpack_from("<b", block, 2 + i)[0]
    return half(block, 0) * number


def nibble(packed: bytes, i: int, width: int) -> int:
    """Number i of 2 * width numbers: the low halves of ``width`` bytes, then the high halves."""
    return packed[i % width] >> 4 * (i // width) & 15


def q4_0(block: bytes, i: int) -> float:
    """A scale, then 32 numbers of 4 bits, 8 standing for 0."""
    return half(block, 0) * (nibble(block[2:], i, 16) - 8)


def q4_1(block: bytes, i: int) -> float:
    """A scale and the least number, then 32 numbers of 4 bits."""
    return half(block, 0) * nibble(block[4:], i, 16) + half(block, 2)


def q4_k(block: bytes, i: int) -> float:
    """8 groups of 32 numbers of 4 bits; each group has a scale and a minimum of 6 bits."""
    group = i // 32
    packed = block[4:16]
    if group < 4:
        scale, minimum = packed[group] & 63, packed[group + 4] & 63
    else:  # the low 4 bits in the last four bytes, the high 2 bits left over in the first eight
        scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
        minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4
    number = nibble(block[16 + 32 * (group // 2) :], i % 64, 32)
    return half(block, 0) * scale * number - half(block, 2) * minimum


def q6_k(block: bytes, i: int) -> float:
    """16 groups of 16 numbers of 6 bits, 32 standing for 0; each group has a signed scale."""
    side, within = divmod(i, 128)  # either half of the block has its own bytes
    low = nibble(block[64 * side :], within, 64)
    high = block[128 + 32 * side + within % 32] >> 2 * (within // 32) & 3
    scale: int = struct.unpack_from("<b", block, 192 + i // 16)[0]
    return half(block, 208) * scale * ((low | high << 4) - 32)


# Type: numbers of a block, its bytes, where its float16 scales stand, what number i is.
FORMATS: dict[Type, tuple[int, int, tuple[int, ...], Callable[[bytes, int], float]]] = {
    Type.F32: (1, 4, (), f32),
    Type.F16: (1, 2, (0,), f16),
    Type.BF16: (1, 2, (), bf16),
    Type.Q8_0: (32, 34, (0,), q8_0),
    Type.Q4_0: (32, 18, (0,), q4_0),
    Type.Q4_1: (32, 20, (0, 2), q4_1),
    Type.Q4_K: (256, 144, (0, 2), q4_k),
    Type.Q6_K: (256, 210, (208,), q6_k),
}


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_every_number_of_random_blocks(kind: Type, tmp_path: Path) -> None:
    """3 rows of 512 numbers: all bits random, but for scales that are ordinary numbers."""
    numbers, num_bytes, scales, value = FORMATS[kind]
    rng = np.random.default_rng(0)
    raw = rng.integers(256, size=(3 * 512 // numbers, num_bytes), dtype=np.uint8)
    if kind == Type.F32:
        raw = rng.normal(size=(3 * 512, 1)).astype(np.float32).view(np.uint8)
    if kind == Type.BF16:
        raw = rng.normal(size=(3 * 512, 1)).astype(np.float32).view(np.uint8)[:, 2:]
    for place in scales:
        drawn = rng.normal(size=(len(raw), 1)).astype(np.float16)
        raw[:, place : place + 2] = drawn.view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "blocks.gguf", "none")
    writer.add_tensor("blocks", np.ascontiguousarray(raw).reshape(3, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GGUFFile(tmp_path / "blocks.gguf")
    assert file.shapes["blocks"] == (3, 512)
    expected = np.array([value(block.tobytes(), i) for block in raw for i in range(numbers)])
    assert expected.std() > 0.5
    found = file.tensor("blocks").flatten().numpy()
    # The last bits of a float32 product and sum.
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
