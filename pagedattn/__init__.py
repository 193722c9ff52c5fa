"""PagedAttention, built one idea a chapter. What is imported here is the last stage of each."""

from pagedattn.attention import AttentionSpec
from pagedattn.cache import Batch, Config, KVCache, OutOfBlocks, Usage
from pagedattn.prefix import (
    BlockHasher,
    BlockPool,
    BlockTable,
    ExtraKeys,
    FreeKVCacheBlockQueue,
    Heir,
    Image,
    KVCacheBlock,
    PagedKVCache,
    build_cache,
)

__all__ = [
    "AttentionSpec",
    "Batch",
    "BlockHasher",
    "BlockPool",
    "BlockTable",
    "Config",
    "ExtraKeys",
    "FreeKVCacheBlockQueue",
    "Heir",
    "Image",
    "KVCache",
    "KVCacheBlock",
    "OutOfBlocks",
    "PagedKVCache",
    "Usage",
    "build_cache",
]
