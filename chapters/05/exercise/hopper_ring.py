# Chapter 05, given: pagedattn/kernels/hopper_ring.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 4de40bc08712db8f753d9dfb7e82834fde4b1d8eba2e2358207fdf3d2cb66d87

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

import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BOX_BYTES = 128  # the most that shared memory is swizzled by, and so the most a box is wide
LEAST_PIECE = 8  # slots: the swizzle repeats after so many rows


def piece_of(block_size: int, keys: int) -> int:
    """Slots that one box fetches: those of a piece lie in one block, and a tile is whole pieces."""
    return min(block_size & -block_size, keys)


def describe(cache: Tensor, keys: int) -> TensorDescriptor:
    """What the copy engine must know of ``cache``, [num_blocks, block_size, num_kv_heads, head_dim]
    with strides of whole 16 bytes, to fetch tiles of ``keys`` keys."""
    chunk = min(cache.shape[3], BOX_BYTES // cache.element_size())
    box = [1, piece_of(cache.shape[1], keys), 1, chunk]
    layout = gl.NVMMASharedLayout(chunk * cache.element_size(), cache.element_size() * 8, 4)
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), box, layout)


@gluon.jit
def new_ring(
    dtype: gl.constexpr,
    STAGES: gl.constexpr,
    KEYS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WRITERS: gl.constexpr,
    READERS: gl.constexpr,
):
    """Tiles, and their barriers: a tile is ready after ``WRITERS`` arrivals, free after
    ``READERS``."""
    BITS: gl.constexpr = dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMASharedLayout(min(128, HEAD_DIM * BITS // 8), BITS, 2)
    tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=WRITERS)
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
):
    """Fetch the tiles of some items into the ring, in order: for one warp, which has no other work.

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
        blocks = _find(table, begin, end, BLOCK_SIZE, PIECE, PIECES)
        for start in range(begin, gl.maximum(end, begin + 1), KEYS):
            # The next tile's blocks are asked for before this one's place is waited for.
            following = _find(table, start + KEYS, end, BLOCK_SIZE, PIECE, PIECES)
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(stage), TILE_BYTES)
            for piece in gl.static_range(PIECES):
                position = start + piece * PIECE
                keys = gl.minimum(gl.maximum(end - position, 0), PIECE)
                slot = gl.where(keys == 0, BLOCK_SIZE, position % BLOCK_SIZE + keys - PIECE)
                for chunk in gl.static_range(CHUNKS):
                    tma.async_copy_global_to_shared(
                        desc, [blocks[piece], slot, kv_head, chunk * CHUNK], ready.index(stage),
                        boxes.index((stage * CHUNKS + chunk) * PIECES + piece),
                    )  # fmt: skip
            blocks = following
            count += 1


@gluon.jit
def _find(table, start, end, BLOCK_SIZE: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr):
    """The blocks of a tile's pieces. Columns behind the last key's are not read."""
    blocks = ()
    for piece in gl.static_range(PIECES):
        last_key = gl.maximum(end - 1, 0)
        column = gl.minimum(start + piece * PIECE, last_key) // BLOCK_SIZE
        blocks = blocks + (gl.load(table + column),)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


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


@gluon.jit
def widen(narrow_ring, ring, items, first, last, step, num_kv_heads, PIECE: gl.constexpr):
    """Make float16 of the tiles of an fp8 cache, which it holds exactly: for warps of their own.
    Items are decode items."""
    narrow, narrow_ready, narrow_free = narrow_ring
    tiles, ready, free = ring
    KEYS: gl.constexpr = tiles.shape[1]
    HEAD_DIM: gl.constexpr = tiles.shape[2]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 16], [512 // HEAD_DIM, HEAD_DIM // 16], [gl.num_warps(), 1], [1, 0]
    )
    count = 0
    for number in range(first, last, step):
        item = items + number // num_kv_heads * 8
        begin = gl.load(item + 4) // PIECE * PIECE
        end = gl.load(item + 5)
        for _ in range(begin, gl.maximum(end, begin + 1), KEYS):
            there = count % narrow.shape[0]
            here = count % tiles.shape[0]
            mbarrier.wait(narrow_ready.index(there), count // narrow.shape[0] & 1)
            numbers = narrow.index(there).load(layout).to(tiles.dtype)
            fence_async_shared()  # until they are read, the copy engine may not write there
            mbarrier.arrive(narrow_free.index(there))
            mbarrier.wait(free.index(here), (count // tiles.shape[0] & 1) ^ 1)
            tiles.index(here).store(numbers)
            fence_async_shared()
            mbarrier.arrive(ready.index(here))
            count += 1
