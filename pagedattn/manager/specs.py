"""The kinds of layers: what a page of each holds, and how many pages a sequence can need.

Full attention keeps K and V of all tokens, a sliding window keeps those of the last ones, a Mamba
layer keeps a state whose size does not grow.

Source: ``vllm/v1/kv_cache_interface.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Literal, Self

import torch

from pagedattn.whole_number import at_least_1, whole_number

from .limits import Limits
from .page import KVCacheSpec, ceil_div

SCALE_BYTES = 4  # fp32
FP8_DS_MLA_TOKEN_BYTES = 656  # 512 fp8 values, 4 fp32 scales, 64 bf16 values of the rotary part


class KVQuantMode(Enum):
    """How K and V are quantised. Only the modes with a scale for each token and head need memory
    for scales in the pages."""

    NONE = "none"
    FP8_PER_TENSOR = "fp8_per_tensor"
    INT8_PER_TOKEN_HEAD = "int8_per_token_head"
    FP8_PER_TOKEN_HEAD = "fp8_per_token_head"

    @property
    def is_per_token_head(self) -> bool:
        """Whether each token has its own scale in each head, one for K and one for V."""
        return self in (KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.FP8_PER_TOKEN_HEAD)


@dataclass(frozen=True, kw_only=True)
class KeysAndValuesSpec(KVCacheSpec):
    """A layer that keeps K [block_size, num_kv_heads, head_size] and V [block_size, num_kv_heads,
    head_size_v] in each page. ``head_size_v`` is ``head_size`` if not given."""

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    head_size_v: int | None = None
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)
        for name in ("num_kv_heads", "head_size", "head_size_v"):
            at_least_1(getattr(self, name), name)
        _check_dtype(self.dtype)
        super().__post_init__()

    @property
    def content_bytes(self) -> int:
        assert self.head_size_v is not None
        per_head = (self.head_size + self.head_size_v) * self.dtype.itemsize
        if self.kv_quant_mode.is_per_token_head:
            per_head += 2 * SCALE_BYTES
        return self.block_size * self.num_kv_heads * per_head

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The same layer in blocks of ``block_size`` tokens; padding grows in proportion."""
        padded = self.page_size_padded
        if padded is not None:
            padded = padded * block_size // self.block_size
        return replace(self, block_size=block_size, page_size_padded=padded)


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(KeysAndValuesSpec):
    """Every token attends to all before it.

    A layer that attends to a window or a chunk may be kept in this way, too: its blocks then stay
    until the sequence ends, and ``sliding_window`` or ``attention_chunk_size`` (tokens) records
    what it attends to. Raises ValueError for both.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise ValueError(
                f"a window of {self.sliding_window} and a chunk of {self.attention_chunk_size} "
                "tokens are recorded; one layer attends to one of them"
            )

    @property
    def kind(self) -> tuple[object, ...]:
        return ("full",)

    def max_num_pages(self, limits: Limits) -> int:
        return ceil_div(limits.max_model_len, limits.context_parallel_size * self.block_size)


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Multi-head latent attention: one vector a token and head, no separate V.

    ``compress_ratio`` tokens are kept as one vector. ``cache_dtype_str`` "fp8_ds_mla" is a packed
    format of 656 bytes a token instead. Raises ValueError for a ratio that does not divide the
    block size, another format, or scales for each token and head.
    """

    compress_ratio: int = 1
    cache_dtype_str: Literal["fp8_ds_mla"] | None = None

    def __post_init__(self) -> None:
        at_least_1(self.compress_ratio, "compress_ratio")
        if self.block_size % self.compress_ratio:
            raise ValueError(
                f"compress_ratio {self.compress_ratio} does not divide block_size {self.block_size}"
            )
        if self.cache_dtype_str not in (None, "fp8_ds_mla"):
            raise ValueError(f"cache_dtype_str is {self.cache_dtype_str!r}, not 'fp8_ds_mla'")
        if self.kv_quant_mode.is_per_token_head:
            raise ValueError(f"{self.kv_quant_mode} has scales of K and V; MLA keeps neither")
        super().__post_init__()

    @property
    def content_bytes(self) -> int:
        if self.cache_dtype_str == "fp8_ds_mla":
            return self.block_size * FP8_DS_MLA_TOKEN_BYTES
        per_vector = self.num_kv_heads * self.head_size * self.dtype.itemsize
        return self.block_size // self.compress_ratio * per_vector


@dataclass(frozen=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention that also sees ``sink_len`` tokens which belong to no sequence; their blocks
    are set aside once. Raises ValueError unless they fill whole blocks."""

    sink_len: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if at_least_1(self.sink_len, "sink_len") % self.block_size:
            raise ValueError(
                f"sink_len {self.sink_len} is no multiple of block_size {self.block_size}"
            )

    @property
    def kind(self) -> tuple[object, ...]:
        return ("sink", self.sink_len)


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(KeysAndValuesSpec):
    """A token attends to itself and the ``sliding_window`` - 1 tokens before it."""

    sliding_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_1(self.sliding_window, "sliding_window")

    @property
    def kind(self) -> tuple[object, ...]:
        return ("sliding", self.sliding_window)

    def max_num_pages(self, limits: Limits) -> int:
        """Pages of the last window - 1 tokens and those of one step. One page more, since the
        window may begin inside a block. Raises ValueError under context parallelism."""
        limits.check_no_context_parallelism("a sliding window")
        num_tokens = self.sliding_window - 1 + limits.max_tokens_a_step
        return ceil_div(min(num_tokens, limits.max_model_len), self.block_size) + 1


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(KeysAndValuesSpec):
    """A token attends to its own chunk of ``attention_chunk_size`` tokens, up to itself."""

    attention_chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_1(self.attention_chunk_size, "attention_chunk_size")

    @property
    def kind(self) -> tuple[object, ...]:
        return ("chunked", self.attention_chunk_size)

    def max_num_pages(self, limits: Limits) -> int:
        """Pages of one chunk and of the tokens of one step. Raises ValueError under context
        parallelism."""
        limits.check_no_context_parallelism("chunked local attention")
        num_tokens = self.attention_chunk_size + limits.max_tokens_a_step
        return ceil_div(min(num_tokens, limits.max_model_len), self.block_size)


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(KeysAndValuesSpec):
    """A decoder's layer that attends to the tokens of an encoder."""

    @property
    def kind(self) -> tuple[object, ...]:
        return ("cross",)

    def max_num_pages(self, limits: Limits) -> int:
        return ceil_div(limits.max_encoder_len, self.block_size)


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(KeysAndValuesSpec):
    """An encoder's layer: it sees all tokens at once and keeps nothing."""

    @property
    def kind(self) -> tuple[object, ...]:
        return ("encoder-only",)

    def max_num_pages(self, limits: Limits) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """A layer whose state replaces K and V: tensors of ``shapes`` and ``dtypes`` in each page.

    ``mamba_cache_mode`` says which states are kept: "none" the running one, "align" that and the
    one before it, "all" one at the end of each block. ``num_speculative_blocks`` are for drafts.
    Raises ValueError for another mode, or shapes and dtypes that do not pair.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    mamba_cache_mode: Literal["none", "align", "all"] = "none"
    num_speculative_blocks: int = 0

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.dtypes) or not self.shapes:
            raise ValueError(
                f"{len(self.shapes)} shapes and {len(self.dtypes)} dtypes; each state has one of "
                "both, and there is at least one state"
            )
        for dtype in self.dtypes:
            _check_dtype(dtype)
        for size in (size for shape in self.shapes for size in shape):
            at_least_1(size, "a size of a state")
        if self.mamba_cache_mode not in ("none", "align", "all"):
            raise ValueError(f"mamba_cache_mode is {self.mamba_cache_mode!r}: none, align or all")
        if whole_number(self.num_speculative_blocks, "num_speculative_blocks") < 0:
            raise ValueError(f"num_speculative_blocks is {self.num_speculative_blocks}, below 0")
        super().__post_init__()

    @property
    def content_bytes(self) -> int:
        return sum(
            prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @property
    def kind(self) -> tuple[object, ...]:
        return ("mamba", self.mamba_cache_mode, self.num_speculative_blocks)

    def max_num_pages(self, limits: Limits) -> int:
        if self.mamba_cache_mode == "all":
            return ceil_div(limits.max_model_len, self.block_size)
        return (1 if self.mamba_cache_mode == "none" else 2) + self.num_speculative_blocks


def _check_dtype(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {dtype!r}; a torch.dtype is needed")
