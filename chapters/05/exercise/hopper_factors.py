# Chapter 05, given: pagedattn/kernels/hopper_factors.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 ab636766276baf61c814f05c2e3957280038b07cfe8135c30d46d92043c88757

"""Tiles of an fp8 cache as first factors of a warp group's matrix product, made in registers.

Which numbers a thread must have is laid down: of each row pairs, 8 apart. But a sum over head_dim
may be taken in any order, and rows of the output may stand in any order until they are stored. So a
thread loads numbers that lie side by side in shared memory, 16 bytes at once, and calls them what
it must have. Nothing moves: the new names are a matter of layouts.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

# Four numbers at once, which must first stand in pairs: of bytes that takes half as long as of
# what becomes of them.
_WIDEN = gl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@gluon.jit
def load_keys(tile, layout: gl.constexpr):
    """A tile of K as first factor of scores in ``layout``: float16 [keys, head_dim], and head_dim
    in the order of ``rename_dims``."""
    numbers = tile.load(_k_layout(tile.shape[0], tile.shape[1])).to(gl.float16)
    factor: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    return gl.convert_layout(rename_dims(numbers), factor, assert_trivial=True)


@gluon.jit
def rename_dims(numbers):
    """Of queries or keys [n, head_dim]: dims in the order in which they are multiplied. Thread,
    step, half and place of a pair become step, half, thread, place."""
    ROWS: gl.constexpr = numbers.shape[0]
    HEAD_DIM: gl.constexpr = numbers.shape[1]
    split = numbers.reshape([ROWS, 4, HEAD_DIM // 16, 2, 2])
    return split.permute((0, 2, 3, 1, 4)).reshape([ROWS, HEAD_DIM])


@gluon.constexpr_function
def _k_layout(keys, head_dim):
    """A thread's numbers of a key lie side by side, a quarter of head_dim."""
    quarter = head_dim // 4
    dims = [[0, 1 << bit] for bit in range(quarter.bit_length() - 1)]
    tiles = [[64 << bit, 0] for bit in range((keys // 64).bit_length() - 1)]
    lanes = [[0, quarter], [0, 2 * quarter], [1, 0], [2, 0], [4, 0]]
    warps = [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout([*dims, [8, 0], *tiles], lanes, warps, [], [keys, head_dim])


@gluon.jit
def load_values(tile, layout: gl.constexpr):
    """A tile of V as first factor of an output in ``layout``: float16 [head_dim, keys]; its rows
    stand as ``put_in_order`` expects them: warp, lane, tile and half become tile, warp, half,
    lane."""
    KEYS: gl.constexpr = tile.shape[0]
    HEAD_DIM: gl.constexpr = tile.shape[1]
    numbers = tile.load(_v_layout(KEYS, HEAD_DIM))
    split = numbers.reshape([KEYS, 4, 8, HEAD_DIM // 64, 2]).permute((3, 1, 4, 2, 0))
    factor: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    numbers = gl.convert_layout(split.reshape([HEAD_DIM, KEYS]), factor, assert_trivial=True)
    return gl.inline_asm_elementwise(_WIDEN, "=r,=r,r", [numbers], gl.float16, is_pure=True, pack=4)


@gluon.constexpr_function
def _v_layout(keys, head_dim):
    """A thread's numbers of a key lie side by side, head_dim / 32. It has pairs of keys."""
    part = head_dim // 32
    dims = [[0, 1 << bit] for bit in range(part.bit_length() - 1)]
    steps = [[16 << bit, 0] for bit in range((keys // 16).bit_length() - 1)]
    lanes = [[2, 0], [4, 0], [0, part], [0, 2 * part], [0, 4 * part]]
    warps = [[0, 8 * part], [0, 16 * part]]
    return gl.DistributedLinearLayout(
        [*dims, [1, 0], [8, 0], *steps], lanes, warps, [], [keys, head_dim]
    )


@gluon.jit
def put_in_order(acc, row_max, row_sum):
    """The output's rows by head_dim: only their layout changes, and that of the two others."""
    HEAD_DIM: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    split = acc.reshape([HEAD_DIM // 64, 4, 2, 8, ROWS]).permute((1, 3, 0, 2, 4))
    acc = split.reshape([HEAD_DIM, ROWS])
    columns: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    row_max = gl.convert_layout(row_max, columns, assert_trivial=True)
    return acc, row_max, gl.convert_layout(row_sum, columns, assert_trivial=True)
