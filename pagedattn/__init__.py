"""PagedAttention, built one idea a chapter. What is imported here is the last stage of each."""

from pagedattn.attention import AttentionSpec
from pagedattn.cache import Batch, Config, KVCache, OutOfBlocks, Usage
from pagedattn.sharing import (
    BlockPool,
    BlockTable,
    Heir,
    KVCacheBlock,
    PagedKVCache,
    build_cache,
)

__all__ = [
    "AttentionSpec",
    "Batch",
    "BlockPool",
    "BlockTable",
    "Config",
    "Heir",
    "KVCache",
    "KVCacheBlock",
    "OutOfBlocks",
    "PagedKVCache",
    "Usage",
    "build_cache",
]
