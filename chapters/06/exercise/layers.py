# Chapter 06, given: pagedattn/manager/layers.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 e48a3ea005da09c307a7ef48093fa6735efb3f7d3d29a87a7d31394122c6fe66

"""From the ``Config`` of every chapter to the specs of this one: what each layer keeps."""

from __future__ import annotations

import sys
from typing import Any

from pagedattn.cache import Config

from .config import KVCacheConfig, get_kv_cache_configs
from .limits import Limits
from .specs import FullAttentionSpec, KeysAndValuesSpec, SlidingWindowSpec


def configure(config: Config) -> KVCacheConfig:
    """Groups and tensors of a cache of ``config.num_blocks`` blocks. Its layers are called "0",
    "1", …; those with a window are kept as such."""
    specs = {str(layer): spec_of_layer(config, layer) for layer in range(config.num_layers)}
    (kv_cache_config,) = get_kv_cache_configs(
        [specs],
        [sys.maxsize],  # the number of blocks is given, so memory does not decide
        limits_of(config),
        num_blocks=config.num_blocks,
    )
    return kv_cache_config


def limits_of(config: Config) -> Limits:
    """The lengths that a cache allows; a whole sequence may be one step."""
    return Limits(max_model_len=config.max_seq_len)


def spec_of_layer(config: Config, layer: int) -> KeysAndValuesSpec:
    """What one layer keeps: all tokens, or those of its window."""
    sizes: dict[str, Any] = {
        "block_size": config.block_size,
        "num_kv_heads": config.num_kv_heads,
        "head_size": config.head_dim,
        "dtype": config.dtype,
    }
    window = config.layer_specs[layer].window
    if window is None:
        return FullAttentionSpec(**sizes)
    return SlidingWindowSpec(**sizes, sliding_window=window)
