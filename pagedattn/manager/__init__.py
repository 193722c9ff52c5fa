"""The KV cache of a whole model: what its layers keep, and how memory is divided among them.

- ``limits``: the lengths that a server allows.
- ``page``, ``specs``: what one layer keeps of one block, and how many blocks a sequence needs.
- ``merging``, ``groups``: which layers share a block table.
- ``memory``: how many blocks fit, and how long a sequence.
- ``config``: the tensors, the groups and the number of blocks of each worker.

In vLLM: ``vllm/v1/kv_cache_interface.py``, ``vllm/v1/core/kv_cache_utils.py``.
"""

from .config import (
    KVCacheConfig,
    KVCacheTensor,
    add_kv_sharing_layers,
    get_groups_of_workers,
    get_kv_cache_configs,
    get_max_concurrency,
    get_num_cache_tokens,
    get_scheduler_config,
)
from .groups import (
    KVCacheGroupSpec,
    UnequalPages,
    UniformTypeKVCacheSpecs,
    get_kv_cache_groups,
    unify_page_sizes,
)
from .limits import Limits
from .memory import NotEnoughMemory, estimate_max_model_len, fit_max_model_len
from .merging import merge
from .page import KVCacheSpec
from .specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KeysAndValuesSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

__all__ = [
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVCacheTensor",
    "KVQuantMode",
    "KeysAndValuesSpec",
    "Limits",
    "MLAAttentionSpec",
    "MambaSpec",
    "NotEnoughMemory",
    "SinkFullAttentionSpec",
    "SlidingWindowSpec",
    "UnequalPages",
    "UniformTypeKVCacheSpecs",
    "add_kv_sharing_layers",
    "estimate_max_model_len",
    "fit_max_model_len",
    "get_groups_of_workers",
    "get_kv_cache_configs",
    "get_kv_cache_groups",
    "get_max_concurrency",
    "get_num_cache_tokens",
    "get_scheduler_config",
    "merge",
    "unify_page_sizes",
]
