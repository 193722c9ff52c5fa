# Chapter 05, given: pagedattn/kernels/hopper_ring.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 638ae43bbe3ab048ba732fe8d5962b1cb1c08322278146598a0919fbcbd78409

"""A ring of tiles in shared memory: one warp fetches, others compute.

On a Hopper GPU a single thread can ask for a whole box of numbers; a copy engine (TMA) brings it to
shared memory and counts its bytes on a barrier. So the warps that compute hold no addresses and
never wait for their own loads: a warp of its own walks the block table and keeps the ring full. Two
barriers a tile pass it back and forth: ``ready``, when its bytes are there, and ``free``, when all
who compute are done with it.

A tile's keys lie in several blocks. It is put together from *pieces*, each one box of the cache:
``PIECE`` slots of one block, one head, ``CHUNK`` numbers wide, the most that a box may be.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BOX_BYTES = 128  # the most that shared memory is swizzled by, and so the most a box is wide


def piece_of(block_size: int, keys: int) -> int:
    """Slots that one box fetches: those of a piece lie in one block, and a tile is whole pieces."""
    return min(block_size & -block_size, keys)


def describe(cache: Tensor, keys: int) -> TensorDescriptor:
    """What the copy engine must know of ``cache``, [num_blocks, block_size, num_kv_heads, head_dim]
    with strides of whole 16 bytes, to fetch tiles of ``keys`` keys."""
    return _descriptor(_Place(cache.data_ptr(), cache.dtype), cache.shape, cache.stride(), keys)


class _Place(NamedTuple):
    """All that a descriptor asks of its tensor. So one that is remembered keeps no cache alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@functools.lru_cache(4096)  # K and V of many layers: making one takes a tenth of a launch
def _descriptor(
    place: _Place, shape: torch.Size, strides: tuple[int, ...], keys: int
) -> TensorDescriptor:
    chunk = min(shape[3], BOX_BYTES // place.dtype.itemsize)
    box = [1, piece_of(shape[1], keys), 1, chunk]
    layout = gl.NVMMASharedLayout(chunk * place.dtype.itemsize, place.dtype.itemsize * 8, 4)
    return TensorDescriptor(place, list(shape), list(strides), box, layout)


@gluon.jit
def new_ring(
    dtype: gl.constexpr,
    STAGES: gl.constexpr,
    KEYS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WRITERS: gl.constexpr,
    READERS: gl.constexpr,
    free=None,
):
    """Tiles, and their barriers: a tile is ready after ``WRITERS`` arrivals, free after
    ``READERS``. ``free`` is that of another ring if tiles of both are given back together."""
    BITS: gl.constexpr = dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMASharedLayout(min(128, HEAD_DIM * BITS // 8), BITS, 2)
    tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=WRITERS)
    if free is None:
        free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(free.index(stage), count=READERS)
    return tiles, ready, free


@gluon.jit
def wide(stride):
    """A stride as a number of 64 bits. None is negative, so that no sign has to be kept."""
    return gl.to_tensor(stride).to(gl.uint32).to(gl.int64)


@gluon.jit
def fetch(
    desc,
    ring,
    block_table,
    table_stride,
    items,
    first,
    last,
    step,
    num_kv_heads,
    ITEM: gl.constexpr,
    BEGIN: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TURN: gl.constexpr = 0,
    TURNS: gl.constexpr = 1,
):
    """Fetch the tiles of some items into the ring, in order: for one warp, which has no other work.
    ``TURNS`` warps, a power of 2, take turns; this one has each tile whose number is ``TURN`` more
    than a multiple of ``TURNS``.

    Number n is item n // num_kv_heads for KV head n % num_kv_heads. An item is ``ITEM`` numbers;
    the first is its row, that at ``BEGIN`` its first key, and the next the end of its keys. It has
    at least one tile. What lies behind the end comes as zeros: of the last block with keys the
    piece is taken from so far before the end that it ends there, and begins outside of the block.
    """
    tiles, ready, free = ring
    STAGES: gl.constexpr = tiles.shape[0]
    KEYS: gl.constexpr = tiles.shape[1]
    PIECE: gl.constexpr = desc.block_shape[1]
    CHUNK: gl.constexpr = desc.block_shape[3]
    PIECES: gl.constexpr = KEYS // PIECE
    CHUNKS: gl.constexpr = tiles.shape[2] // CHUNK
    TILE_BYTES: gl.constexpr = KEYS * CHUNKS * CHUNK * desc.dtype.primitive_bitwidth // 8
    shape: gl.constexpr = [STAGES * CHUNKS * PIECES, 1, PIECE, 1, CHUNK]
    boxes = tiles._reinterpret(desc.dtype, shape, desc.layout)
    count = 0
    for number in range(first, last, step):
        item = items + number // num_kv_heads * ITEM
        kv_head = number % num_kv_heads
        table = block_table + gl.load(item).to(gl.int64) * wide(table_stride)
        begin = gl.load(item + BEGIN) // PIECE * PIECE
        end = gl.load(item + BEGIN + 1)
        turn = (TURN - count) & (TURNS - 1)
        tile = count + turn
        blocks = _find(table, begin + turn * KEYS, end, BLOCK_SIZE, PIECE, PIECES)
        for start in range(begin + turn * KEYS, gl.maximum(end, begin + 1), TURNS * KEYS):
            # The next tile's blocks are asked for before this one's place is waited for.
            following = _find(table, start + TURNS * KEYS, end, BLOCK_SIZE, PIECE, PIECES)
            stage = tile % STAGES
            mbarrier.wait(free.index(stage), (tile // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(stage), TILE_BYTES)
            to = stage * CHUNKS * PIECES
            if start + KEYS <= end:
                _order(
                    desc, boxes, to, ready.index(stage), blocks, start, end, kv_head, BLOCK_SIZE,
                    PIECES, CHUNKS, True,
                )  # fmt: skip
            else:
                _order(
                    desc, boxes, to, ready.index(stage), blocks, start, end, kv_head, BLOCK_SIZE,
                    PIECES, CHUNKS, False,
                )  # fmt: skip
            blocks = following
            tile += TURNS
        count += gl.maximum(gl.cdiv(end - begin, KEYS), 1)


@gluon.jit
def _find(table, start, end, BLOCK_SIZE: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr):
    """The blocks of a tile's pieces. Columns behind the last key's are not read."""
    last_piece = gl.maximum(end - 1, 0) // PIECE
    blocks = ()
    for piece in gl.static_range(PIECES):
        number = gl.minimum(start // PIECE + piece, last_piece)
        block = gl.load(table + number // (BLOCK_SIZE // PIECE))
        blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@gluon.jit
def _order(
    desc,
    boxes,
    to,
    ready,
    blocks,
    start,
    end,
    kv_head,
    BLOCK_SIZE: gl.constexpr,
    PIECES: gl.constexpr,
    CHUNKS: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """Ask the copy engine for a tile's boxes. Of a ``WHOLE`` tile all keys lie before the end: one
    thread orders all boxes of a tile, and each instruction that it is spared counts."""
    PIECE: gl.constexpr = desc.block_shape[1]
    CHUNK: gl.constexpr = desc.block_shape[3]
    for piece in gl.static_range(PIECES):
        slot = (start // PIECE + piece) % (BLOCK_SIZE // PIECE) * PIECE
        if not WHOLE:
            keys = gl.minimum(gl.maximum(end - start - piece * PIECE, 0), PIECE)
            slot = gl.where(keys == 0, BLOCK_SIZE, slot + keys - PIECE)
        for chunk in gl.static_range(CHUNKS):
            tma.async_copy_global_to_shared(
                desc, [blocks[piece], slot, kv_head, chunk * CHUNK], ready,
                boxes.index(to + chunk * PIECES + piece),
            )  # fmt: skip


@gluon.jit
def key_positions(start, end, lanes, PIECE: gl.constexpr):
    """Where the keys of a tile stand: piece by piece in order, but that of the end, which begins
    with zeros. Those, and what lies behind the end, stand nowhere: behind every query."""
    NOWHERE: gl.constexpr = 2**31 - 1
    last_piece = gl.maximum(end - 1, 0) // PIECE * PIECE
    shift = last_piece + PIECE - end
    keys = start + lanes
    moved = gl.where(keys - shift >= last_piece, keys - shift, NOWHERE)
    moved = gl.where(keys < last_piece + PIECE, moved, NOWHERE)
    return gl.where(keys >= last_piece, moved, keys)
