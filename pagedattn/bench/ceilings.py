"""What the machine can do, measured beside the kernels: the rates that no kernel exceeds.

Reading and copying are Triton kernels with nothing else in them, the best of a few tiles; the
matrix product is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedattn.bench.kernel_inputs import Pool, Trial
from pagedattn.bench.kernel_rows import AttentionRow, Ceilings

STREAM_TILES = ((4096, 4), (8192, 8), (16384, 8))  # numbers a program, warps
TABLE_TILES = ((64, 2), (64, 4), (128, 8))  # keys a program, warps
MATMUL_SIZE = 8192
NODES = 256
Measure = Callable[[Trial], float]


def measure_ceilings(pool: Pool, measure: Measure) -> Ceilings:
    """``measure`` gives the microseconds of a trial's calls."""
    num_bytes = pool.k.numel() * pool.k.element_size()
    return Ceilings(
        read=num_bytes / min(map(measure, read_trials(pool))),
        read_through_table=2 * num_bytes / min(map(measure, read_through_table_trials(pool))),
        copy=num_bytes / min(map(measure, copy_trials(pool))),
        matmul=2 * MATMUL_SIZE**3 / measure(matmul_trial(pool)),
        node=measure(node_trial(pool)),
    )


def read_trials(pool: Pool) -> Iterator[Trial]:
    """All of the pool's K, summed up tile by tile."""
    for tile, num_warps in STREAM_TILES:
        sums = torch.empty(pool.k.numel() // tile, dtype=torch.float32, device=pool.k.device)

        def read(sums: Tensor = sums, tile: int = tile, num_warps: int = num_warps) -> Tensor:
            _read_kernel[(len(sums),)](pool.k, sums, TILE=tile, num_warps=num_warps)
            return sums

        def error(sums: Tensor, tile: int = tile) -> float:
            return _difference(sums, pool.k.view(-1, tile).sum(1, dtype=torch.float32))

        yield Trial([read], error)


def read_through_table_trials(pool: Pool) -> Iterator[Trial]:
    """All of the pool's K and V through a table of its blocks in any order, as a decode reads it: a
    program has the keys of one tile, and one KV head."""
    k, v = pool.cache(AttentionRow("", (), ()))
    num_blocks, block_size, num_heads, head_dim = k.shape
    table = torch.randperm(num_blocks, device=k.device).int()
    for keys, num_warps in TABLE_TILES:
        tiles = num_blocks * block_size // keys
        sums = torch.empty(tiles, num_heads, dtype=torch.float32, device=k.device)

        def read(sums: Tensor = sums, keys: int = keys, num_warps: int = num_warps) -> Tensor:
            _read_through_table_kernel[(num_heads, len(sums))](
                k, v, table, sums, k.stride(),
                BLOCK_SIZE=block_size, HEAD_DIM=head_dim, KEYS=keys, num_warps=num_warps,
            )  # fmt: skip
            return sums

        def error(sums: Tensor, keys: int = keys) -> float:
            blocks = table[: 1024 * keys // block_size].long()
            shape = -1, keys, num_heads, head_dim
            found = (cache[blocks].view(shape).sum((1, 3), dtype=torch.float32) for cache in (k, v))
            return _difference(sums[:1024], sum(found, torch.zeros_like(sums[:1024])))

        yield Trial([read], error)


def copy_trials(pool: Pool) -> Iterator[Trial]:
    """Half of the pool's K, to another place."""
    source = pool.k[: pool.k.numel() // 2]
    destination = torch.empty_like(source)
    for tile, num_warps in STREAM_TILES:

        def copy(tile: int = tile, num_warps: int = num_warps) -> Tensor:
            grid = (source.numel() // tile,)
            _copy_kernel[grid](source, destination, TILE=tile, num_warps=num_warps)
            return destination

        yield Trial([copy], lambda out: _difference(out, source))


def matmul_trial(pool: Pool) -> Trial:
    """torch's product of two square matrices."""
    shape = MATMUL_SIZE, MATMUL_SIZE
    a, b = (numbers[: MATMUL_SIZE**2].view(shape) for numbers in (pool.k, pool.v))
    out = torch.empty_like(a)

    def error(out: Tensor) -> float:
        return _difference(out[:4].float(), a[:4].float() @ b.float())

    return Trial([lambda: torch.matmul(a, b, out=out)], error)


def node_trial(pool: Pool) -> Trial:
    """A kernel that does nothing, many times: what a launch in a graph takes."""

    def nothing() -> None:
        _empty_kernel[(1,)](pool.k, num_warps=1)

    return Trial([nothing] * NODES, lambda _: 0.0)


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@triton.jit
def _read_kernel(numbers, sums, TILE: tl.constexpr):
    program = tl.program_id(0)
    lanes = program.to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(sums + program, tl.sum(tl.load(numbers + lanes).to(tl.float32)))


@triton.jit
def _read_through_table_kernel(
    k_cache,
    v_cache,
    table,
    sums,
    strides,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.program_id(1)
    keys = tile * KEYS + tl.arange(0, KEYS)
    blocks = tl.load(table + keys // BLOCK_SIZE).to(tl.int64)
    rows = blocks * strides[0] + keys % BLOCK_SIZE * strides[1] + head * strides[2]
    at = rows[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    k = tl.load(k_cache + at).to(tl.float32)
    v = tl.load(v_cache + at).to(tl.float32)
    tl.store(sums + tile * tl.num_programs(0) + head, tl.sum(tl.sum(k + v, 1), 0))


@triton.jit
def _copy_kernel(source, destination, TILE: tl.constexpr):
    lanes = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(destination + lanes, tl.load(source + lanes))


@triton.jit
def _empty_kernel(numbers):
    pass
