"""Chapter 05: kernels.

The same memory on a GPU, in Triton. What chapters 02 and 03 did with torch's indexing, kernels do
here: slots, writes, copies, attention. A kernel reads the block table itself, so nothing is
gathered first, and nothing waits for the CPU.

Where there is no GPU, Triton's interpreter runs the same kernels, slowly.
"""
# ruff: noqa: E402  the interpreter is chosen before the kernels are defined

from .interpreter import interpret_without_gpu

interpret_without_gpu()

from pagedattn.prefix import (
    BlockHasher,
    BlockPool,
    BlockTable,
    ExtraKeys,
    FreeKVCacheBlockQueue,
    Heir,
    Image,
    KVCacheBlock,
)

from .attention import paged_attention
from .buffers import AttentionPlan
from .cache import PagedKVCache, build_cache
from .checks import check_block_table
from .copy_blocks import copy_blocks
from .merge import merge_attention_states
from .naive import naive_paged_decode
from .plan import new_plan, plan_attention
from .slot_mapping import compute_slot_mapping
from .write_kv import write_kv

__all__ = [
    "AttentionPlan",
    "BlockHasher",
    "BlockPool",
    "BlockTable",
    "ExtraKeys",
    "FreeKVCacheBlockQueue",
    "Heir",
    "Image",
    "KVCacheBlock",
    "PagedKVCache",
    "build_cache",
    "check_block_table",
    "compute_slot_mapping",
    "copy_blocks",
    "merge_attention_states",
    "naive_paged_decode",
    "new_plan",
    "paged_attention",
    "plan_attention",
    "write_kv",
]
