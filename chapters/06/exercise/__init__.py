# Chapter 06, given: pagedattn/manager/__init__.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 d35c00f9fddf58d23b78abc6b55895c1af9ce30c6a3f723491557bb52c699a13

"""The KV cache of a whole model: what its layers keep, and how memory is divided among them.

- ``limits``: the lengths that a server allows.
- ``page``, ``specs``: what one layer keeps of one block, and how many blocks a sequence needs.
- ``merging``, ``groups``: which layers share a block table.
- ``memory``: how many blocks fit, and how long a sequence.
- ``keys``, ``pool``, ``events``, ``residency``: the pool of all groups, and what it tells.
- ``request``: what the cache knows of a request.
- ``single_type``: the tables of one group; ``full_attention``, ``window``, ``chunked``, ``mamba``,
  ``cross_attention``: what is different in each kind; ``kinds``: which kind a spec has.
- ``group_managers``, ``coordinator``: all groups together, and what of a prompt they all have.
- ``manager``: which blocks a request gets, keeps and gives back; ``slot_checks``, ``abort``,
  ``blocks``, ``statistics``, ``invariants``: its parts.
- ``config``: the tensors, the groups and the number of blocks of each worker; ``tensors``: their
  bytes, and what a layer sees of them.
- ``block_table``, ``kernel_blocks``, ``slots``: the tables on the device, and where a step's tokens
  go on each of several ranks.
- ``cache``: the verbs of every chapter over all this; ``layers``, ``visible``, ``take_back``,
  ``dead_pages``, ``cache_state``: its parts.

In vLLM: ``vllm/v1/kv_cache_interface.py``, ``vllm/v1/core/kv_cache_utils.py``.
"""

from .block_table import BlockTable, MultiGroupBlockTable
from .blocks import KVCacheBlocks
from .cache import HybridKVCache, build_cache
from .chunked import ChunkedLocalAttentionManager
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
from .coordinator import (
    HybridCoordinator,
    NoPrefixCacheCoordinator,
    UnitaryCoordinator,
    get_kv_cache_coordinator,
)
from .cross_attention import CrossAttentionManager, NoPrefixCaching
from .events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, short_hash
from .full_attention import FullAttentionManager, SinkFullAttentionManager
from .group_managers import KVCacheCoordinator
from .groups import (
    KVCacheGroupSpec,
    UnequalPages,
    UniformTypeKVCacheSpecs,
    get_kv_cache_groups,
    unify_page_sizes,
)
from .kernel_blocks import MultipleOf, map_to_kernel_blocks, select_kernel_block_size
from .kinds import get_manager_for_spec
from .layers import configure
from .limits import Limits
from .mamba import AlignedMambaManager, MambaManager
from .manager import KVCacheManager
from .memory import NotEnoughMemory, estimate_max_model_len, fit_max_model_len
from .merging import merge
from .page import KVCacheSpec
from .pool import BlockPool, block_hashes_of
from .request import Request
from .residency import BlockMetricsCollector
from .single_type import SingleTypeKVCacheManager
from .slots import ContextParallel, compute_slot_mapping
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
from .statistics import PrefixCacheStats
from .take_back import take_back_slots
from .tensors import (
    allocate_pages,
    keys_and_values,
    kv_scales,
    latent_vectors,
    mamba_states,
    specs_of_layers,
    split_pages,
)
from .visible import without_skipped_blocks
from .window import SlidingWindowManager

__all__ = [
    "AlignedMambaManager",
    "AllBlocksCleared",
    "BlockMetricsCollector",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "BlockTable",
    "ChunkedLocalAttentionManager",
    "ChunkedLocalAttentionSpec",
    "ContextParallel",
    "CrossAttentionManager",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionManager",
    "FullAttentionSpec",
    "HybridCoordinator",
    "HybridKVCache",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheCoordinator",
    "KVCacheEvent",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "KVCacheSpec",
    "KVCacheTensor",
    "KVQuantMode",
    "KeysAndValuesSpec",
    "Limits",
    "MLAAttentionSpec",
    "MambaManager",
    "MambaSpec",
    "MultiGroupBlockTable",
    "MultipleOf",
    "NoPrefixCacheCoordinator",
    "NoPrefixCaching",
    "NotEnoughMemory",
    "PrefixCacheStats",
    "Request",
    "SingleTypeKVCacheManager",
    "SinkFullAttentionManager",
    "SinkFullAttentionSpec",
    "SlidingWindowManager",
    "SlidingWindowSpec",
    "UnequalPages",
    "UniformTypeKVCacheSpecs",
    "UnitaryCoordinator",
    "add_kv_sharing_layers",
    "allocate_pages",
    "block_hashes_of",
    "build_cache",
    "compute_slot_mapping",
    "configure",
    "estimate_max_model_len",
    "fit_max_model_len",
    "get_groups_of_workers",
    "get_kv_cache_configs",
    "get_kv_cache_coordinator",
    "get_kv_cache_groups",
    "get_manager_for_spec",
    "get_max_concurrency",
    "get_num_cache_tokens",
    "get_scheduler_config",
    "keys_and_values",
    "kv_scales",
    "latent_vectors",
    "mamba_states",
    "map_to_kernel_blocks",
    "merge",
    "select_kernel_block_size",
    "short_hash",
    "specs_of_layers",
    "split_pages",
    "take_back_slots",
    "unify_page_sizes",
    "without_skipped_blocks",
]
