# Chapter 06, given: pagedattn/manager/tensors.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 276423c2c965c8573eb7976069521c140e637f955c0e3636076edd42894bff2b

"""The memory behind a ``KVCacheConfig``, and what a layer sees of it.

A tensor is bytes. Page ``b`` owns the bytes [b * page, (b + 1) * page) of it, so a block's number
alone says where its page lies, for whatever layer, and pages of different blocks never overlap::

    page 0                 page 1                 page 2
    K K K K V V V V . .    K K K K V V V V . .    K K K K V V V V . .     full attention, padded
    state state state .    state state state .    state state state .     Mamba, in the same bytes

A layer gets views of all pages, in its own dtype and shape. Which of them hold its numbers is
decided by block tables: a block belongs to one group at a time, and so do its pages.

Source: ``vllm/v1/worker/gpu_model_runner.py``, ``_allocate_kv_cache_tensors`` and
``_reshape_kv_cache_tensors``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from .config import KVCacheConfig
from .groups import UniformTypeKVCacheSpecs
from .page import KVCacheSpec
from .specs import FP8_DS_MLA_TOKEN_BYTES, KeysAndValuesSpec, MambaSpec, MLAAttentionSpec

Part = tuple[torch.dtype, tuple[int, ...]]


def specs_of_layers(config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """The spec of each layer that has a group, by name."""
    specs: dict[str, KVCacheSpec] = {}
    for group in config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            specs |= dict(group.kv_cache_spec.specs)
        else:
            specs |= dict.fromkeys(group.layer_names, group.kv_cache_spec)
    return specs


def allocate_pages(config: KVCacheConfig, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """One buffer of zeros for each tensor; for each layer its pages, uint8 [num_blocks, page].

    Layers that share a tensor get the same memory. Raises ValueError for a tensor whose size is not
    one page of its layers for each block.
    """
    specs = specs_of_layers(config)
    pages: dict[str, Tensor] = {}
    for tensor in config.kv_cache_tensors:
        for name in tensor.shared_by:
            if tensor.size != specs[name].page_size_bytes * config.num_blocks:
                raise ValueError(
                    f"the tensor of layer {name} has {tensor.size} bytes; {config.num_blocks} "
                    f"pages of {specs[name].page_size_bytes} bytes are needed"
                )
        buffer = torch.zeros(tensor.size, dtype=torch.uint8, device=device)
        pages |= dict.fromkeys(tensor.shared_by, buffer.view(config.num_blocks, -1))
    return pages


def split_pages(pages: Tensor, ratio: int) -> Tensor:
    """Pages for a kernel whose blocks are ``ratio`` times smaller: uint8 [num_blocks * ratio, page
    / ratio]. Page b becomes the pages b * ratio to b * ratio + ratio - 1.

    Raises ValueError if ``ratio`` does not divide the page.
    """
    num_blocks, page = pages.shape
    if ratio < 1 or page % ratio:
        raise ValueError(f"a page of {page} bytes cannot be split into {ratio} equal ones")
    return pages.view(num_blocks * ratio, page // ratio)


def keys_and_values(pages: Tensor, spec: KeysAndValuesSpec) -> tuple[Tensor, Tensor]:
    """K [num_blocks, block_size, num_kv_heads, head_size] and V, of ``head_size_v``, as views.

    In each page K comes first, then V, then scales if there are any, then padding. Raises
    ValueError for a layer that keeps no V, pages of another size than the spec's, or numbers that
    would not begin at a multiple of their size.
    """
    if isinstance(spec, MLAAttentionSpec):
        raise ValueError("latent attention keeps one vector a token, no K and V")
    assert spec.head_size_v is not None
    slots = (spec.block_size, spec.num_kv_heads)
    k, v = _views(
        pages, spec, [(spec.dtype, (*slots, size)) for size in (spec.head_size, spec.head_size_v)]
    )
    return k, v


def kv_scales(pages: Tensor, spec: KeysAndValuesSpec) -> tuple[Tensor, Tensor]:
    """The scales of K and those of V where each token and head has its own: fp32 [num_blocks,
    block_size, num_kv_heads]. Raises ValueError where none are kept, and as above."""
    if not spec.kv_quant_mode.is_per_token_head:
        raise ValueError(f"{spec.kv_quant_mode} keeps no scales in the pages")
    k, v = keys_and_values(pages, spec)
    slots = (spec.block_size, spec.num_kv_heads)
    behind = (k[0].numel() + v[0].numel()) * spec.dtype.itemsize
    k_scales, v_scales = _views(pages, spec, [(torch.float32, slots)] * 2, behind)
    return k_scales, v_scales


def latent_vectors(pages: Tensor, spec: MLAAttentionSpec) -> Tensor:
    """The vectors of latent attention, [num_blocks, block_size / compress_ratio, num_kv_heads,
    head_size]; in the packed format uint8 [num_blocks, block_size, 656]. Raises as above."""
    if spec.cache_dtype_str == "fp8_ds_mla":
        part: Part = (torch.uint8, (spec.block_size, FP8_DS_MLA_TOKEN_BYTES))
    else:
        num_vectors = spec.block_size // spec.compress_ratio
        part = (spec.dtype, (num_vectors, spec.num_kv_heads, spec.head_size))
    return _views(pages, spec, [part])[0]


def mamba_states(pages: Tensor, spec: MambaSpec) -> tuple[Tensor, ...]:
    """The states of a Mamba layer, one after another in each page: [num_blocks, *shape] each.
    Raises as above."""
    return _views(pages, spec, list(zip(spec.dtypes, spec.shapes, strict=True)))


def _views(
    pages: Tensor, spec: KVCacheSpec, parts: Sequence[Part], begin: int = 0
) -> tuple[Tensor, ...]:
    """Views of parts that lie one after another in each page, from byte ``begin`` on."""
    page = pages.shape[1]
    if page != spec.page_size_bytes:
        raise ValueError(f"pages of {page} bytes; the layer's have {spec.page_size_bytes}")
    views = []
    for dtype, shape in parts:
        if begin % dtype.itemsize or page % dtype.itemsize:
            raise ValueError(
                f"{dtype} at byte {begin} of pages of {page} bytes: both must be multiples of "
                f"{dtype.itemsize}"
            )
        end = begin + prod(shape) * dtype.itemsize
        views.append(pages[:, begin:end].view(dtype).unflatten(1, shape))
        begin = end
    return tuple(views)
