"""What `pagedattn bench kernels` measures: each row's shape, and the least work that it takes.

The least work is what any program must do: read each input once, write each output once, and the
floating-point operations. Over the rates of the machine it gives a time that no program beats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
BF16_BYTES = 2


class Ceilings(NamedTuple):
    """What the machine can do, measured: bytes and operations a microsecond; microseconds."""

    read: float
    read_through_table: float
    copy: float  # bytes read and bytes written together
    matmul: float
    node: float  # of a graph, that does nothing


class Work(NamedTuple):
    """Bytes read, bytes written, floating-point operations."""

    read: int
    written: int
    flops: int = 0

    def floor(self, ceilings: Ceilings) -> tuple[float, str]:
        """The least microseconds, and what sets them: memory, matmul or launch.

        A byte that is written goes beside one that is read, at the rate of a copy; what else is
        read goes at the rate of reading.
        """
        pairs = min(self.read, self.written)
        alone = abs(self.read - self.written)
        limits = {
            "memory": 2 * pairs / ceilings.copy + alone / ceilings.read,
            "matmul": self.flops / ceilings.matmul,
            "launch": ceilings.node,
        }
        limit = max(limits, key=lambda name: limits[name])
        return limits[limit], limit


@dataclass(frozen=True)
class AttentionRow:
    """One layer's attention of one batch. The first ``shared`` tokens of all sequences lie in the
    same blocks; with ``share`` our plan looks for that, or else it may be ``batch_invariant``."""

    name: str
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_heads: int = NUM_HEADS
    num_kv_heads: int = NUM_KV_HEADS
    head_dim: int = HEAD_DIM
    block_size: int = BLOCK_SIZE
    fp8: bool = False
    shared: int = 0
    share: bool = False
    batch_invariant: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each sequence."""
        return tuple(-(-seq_len // self.block_size) for seq_len in self.seq_lens)

    @property
    def has_prefill(self) -> bool:
        return max(self.query_lens) > 1

    @property
    def work(self) -> Work:
        """K and V of every key, queries, outputs and block ids once; two operations for each
        number of K and of V that a query head meets."""
        keys = sum(self.seq_lens) - self.shared * (len(self.seq_lens) - 1)
        token_bytes = 2 * self.num_kv_heads * self.head_dim * (1 if self.fp8 else BF16_BYTES)
        q_bytes = self.num_tokens * self.num_heads * self.head_dim * BF16_BYTES
        pairs = sum(
            queries * (seq_len - queries) + queries * (queries + 1) // 2
            for seq_len, queries in zip(self.seq_lens, self.query_lens, strict=True)
        )
        return Work(
            keys * token_bytes + q_bytes + 4 * sum(self.num_blocks),
            q_bytes,
            4 * self.num_heads * self.head_dim * pairs,
        )


def decode(name: str, *seq_lens: int, **shape: Any) -> AttentionRow:
    """A row in which every sequence has one new token."""
    return AttentionRow(f"decode {name}", seq_lens, (1,) * len(seq_lens), **shape)


@dataclass(frozen=True)
class SmallRow:
    """A kernel beside attention, at the one size it is measured at."""

    name: str
    work: Work
    attention: AttentionRow | None = field(default=None)  # whose plan it makes


def _mixed_lengths() -> tuple[int, ...]:
    """128 lengths, log-uniform from 64 to 16384."""
    random = Random(1)
    low, high = math.log(64), math.log(16384)
    return tuple(int(math.exp(random.uniform(low, high))) for _ in range(128))


MIXED = decode("mixed", *_mixed_lengths())
MIXED_STEP = AttentionRow("mixed step", (2560,) * 8 + (4096,) * 120, (512,) * 8 + (1,) * 120)
LONG = (8192,) * 64
SHARED = decode("64x8448 shared 8192", *(8448,) * 64, shared=8192, share=True)
SEARCHED = decode("64x2048 searched", *(2048,) * 64, share=True)
BEAMS = decode("4x2304 shared 2048", *(2304,) * 4, shared=2048, share=True)

ATTENTION_ROWS = (
    *(
        decode(f"{rows}x{seq_len}", *(seq_len,) * rows)
        for rows, seq_len in (
            (1, 512), (8, 512), (32, 512), (1, 8192), (8, 8192), (64, 2048), (64, 8192),
            (256, 1024), (256, 4096), (1, 131072),
        )
    ),
    MIXED,
    decode("MHA 64x2048", *(2048,) * 64, num_kv_heads=NUM_HEADS),
    *(decode(f"64x8192 block {size}", *LONG, block_size=size) for size in (32, 64, 128)),
    decode("64x8192 head_dim 64", *LONG, head_dim=64),
    decode("64x8192 fp8 cache", *LONG, fp8=True),
    SHARED,
    replace(SHARED, name=f"{SHARED.name}, plain plan", share=False),
    BEAMS,
    replace(BEAMS, name=f"{BEAMS.name}, plain plan", share=False),
    SEARCHED,
    decode("64x2048 batch-invariant", *(2048,) * 64, batch_invariant=True),
    replace(MIXED, name=f"{MIXED.name} batch-invariant", batch_invariant=True),
    AttentionRow("prefill 1x8192", (8192,), (8192,)),
    AttentionRow("prefill 4x4096", (4096,) * 4, (4096,) * 4),
    AttentionRow("prefill 16x1024", (1024,) * 16, (1024,) * 16),
    AttentionRow("prefill chunk", (16896,), (512,)),
    MIXED_STEP,
)  # fmt: skip

TOKENS = 8192  # of a write, a merge, a slot mapping
COPIES = 1024
_KV = NUM_KV_HEADS * HEAD_DIM * BF16_BYTES  # bytes of one token's K, or of its V
_OUT = TOKENS * NUM_HEADS * (HEAD_DIM * BF16_BYTES + 4)  # an output and its log-sum-exp

SMALL_ROWS = (
    SmallRow("write 8192 tokens", Work(TOKENS * (2 * _KV + 8), TOKENS * 2 * _KV)),
    SmallRow(
        "copy 1024 blocks",
        Work(COPIES * (2 * BLOCK_SIZE * _KV + 16), COPIES * 2 * BLOCK_SIZE * _KV),
    ),
    SmallRow("merge 8192 tokens", Work(2 * _OUT, _OUT)),
    # Of each token its position and its block's id; of each of 128 sequences where it begins.
    SmallRow("slots 8192 tokens", Work(TOKENS * (8 + 4) + 129 * 4, TOKENS * 8)),
    # Of each sequence its length and where it begins; what is written depends on the cut.
    SmallRow("plan mixed", Work(2 * 128 * 4, 0), MIXED),
    SmallRow("plan mixed step", Work(2 * 128 * 4, 0), MIXED_STEP),
    # And of each sequence its first block, or the blocks that it has in common with others.
    SmallRow("plan 64x2048 searched", Work((2 + 1) * 64 * 4, 0), SEARCHED),
    SmallRow("plan 64x8448 shared 8192", Work((2 + 8192 // BLOCK_SIZE) * 64 * 4, 0), SHARED),
)

CLIMB = ("decode 64x2048", "decode 1x8192", "decode mixed")
FLEX = ("decode 64x8192", "prefill 1x8192", "prefill 16x1024", "prefill chunk")
HOST = ("decode 1x512", "plan mixed", "plan 64x2048 searched")  # whose calls the CPU's clock times
QUICK = ("decode 64x2048", "decode mixed", "prefill 1x8192", "write 8192 tokens")
