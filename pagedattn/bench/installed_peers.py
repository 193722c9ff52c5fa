"""Other libraries' paged attention beside ours, where they are installed: FlashInfer, flash-attn,
and vLLM's Triton kernels. They read the same caches through the same block tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from pagedattn.bench.kernel_inputs import Batch, Trial, Write
from pagedattn.bench.peers import Absent

PACKAGES = ("flashinfer-python", "flash-attn", "flash_attn_3", "vllm")
SEGMENTS = 16  # of vLLM's unified kernel, which it uses for up to 128 programs
DECODE_SPLITS = (4, 16, 64)  # of vLLM's decode kernel, which leaves the number to its caller
WORKSPACE = 2**29  # bytes, of FlashInfer


def installed_versions() -> dict[str, str]:
    """The versions of those that are there."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _imported(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise Absent(f"cannot import {module}: {error}") from error


def _trial(batches: list[Batch], make: Callable[[Batch], Callable[[], Tensor]]) -> Trial:
    if batches[0].row.fp8:
        raise Absent("not called with an fp8 cache here")
    return Trial([make(batch) for batch in batches], batches[0].error)


def flashinfer_trials(batches: list[Batch]) -> list[Trial]:
    """FlashInfer, planned beforehand: with tensor cores for decodes, its own choice for others."""
    flashinfer = _imported("flashinfer")
    row, first = batches[0].row, batches[0]
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=first.q.device)
    indptr = torch.tensor([0, *row.num_blocks], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = [
        seq_len - (blocks - 1) * row.block_size
        for seq_len, blocks in zip(row.seq_lens, row.num_blocks, strict=True)
    ]
    last_page_len = torch.tensor(last, dtype=torch.int32)

    def make(batch: Batch) -> Callable[[], Tensor]:
        ids = torch.cat([batch.block_table[n, :blocks] for n, blocks in enumerate(row.num_blocks)])
        heads = row.num_heads, row.num_kv_heads, row.head_dim, row.block_size
        types = {"q_data_type": batch.q.dtype, "kv_data_type": batch.k_cache.dtype}
        if row.has_prefill:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            starts = batch.query_start_loc.cpu()
            wrapper.plan(starts, indptr, ids, last_page_len, *heads, causal=True, **types)
        else:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True
            )
            wrapper.plan(indptr, ids, last_page_len, *heads, **types)
        return lambda: wrapper.run(batch.q, (batch.k_cache, batch.v_cache))

    return [_trial(batches, make)]


def flash_attn_trials(batches: list[Batch]) -> list[Trial]:
    """FlashAttention-3, or else FlashAttention-2, which takes blocks of 256 only."""
    try:
        flash_attn, table = _imported("flash_attn_interface"), "page_table"
    except Absent:
        flash_attn, table = _imported("flash_attn"), "block_table"
    row = batches[0].row

    def make(batch: Batch) -> Callable[[], Tensor]:
        options: dict[str, Any] = {"cache_seqlens": batch.seq_lens, "causal": True}
        options[table] = batch.block_table
        q = batch.q
        if row.has_prefill:
            options |= {"cu_seqlens_q": batch.query_start_loc, "max_seqlen_q": max(row.query_lens)}
        else:
            q = q[:, None]

        def call() -> Tensor:
            out = flash_attn.flash_attn_with_kvcache(q, batch.k_cache, batch.v_cache, **options)
            return out.view(batch.q.shape)

        return call

    return [_trial(batches, make)]


def vllm_unified_trials(batches: list[Batch]) -> list[Trial]:
    """vLLM's unified Triton kernel, with splits where vLLM's backend would have it split."""
    module = _imported("vllm.v1.attention.ops.triton_unified_attention")
    parameters = inspect.signature(module.unified_attention).parameters
    row, first = batches[0].row, batches[0]
    device = first.q.device
    descale = torch.ones(len(row.seq_lens), row.num_kv_heads, device=device)
    splitting: dict[str, Any] = {}
    if not row.has_prefill:
        segments = row.num_tokens, row.num_heads, SEGMENTS
        splitting = {
            "seq_threshold_3D": 128 // row.num_kv_heads,
            "num_par_softmax_segments": SEGMENTS,
            "softmax_segm_output": torch.empty(*segments, row.head_dim, device=device),
            "softmax_segm_max": torch.empty(segments, device=device),
            "softmax_segm_expsum": torch.empty(segments, device=device),
        }

    def make(batch: Batch) -> Callable[[], Tensor]:
        out = torch.full_like(batch.q, float("nan"))
        options = {
            "q": batch.q,
            "k": batch.k_cache,
            "v": batch.v_cache,
            "out": out,
            "cu_seqlens_q": batch.query_start_loc,
            "max_seqlen_q": max(row.query_lens),
            "seqused_k": batch.seq_lens,
            "max_seqlen_k": max(row.seq_lens),
            "softmax_scale": row.head_dim**-0.5,
            "causal": True,
            "window_size": (-1, -1),
            "block_table": batch.block_table,
            "softcap": 0.0,
            "q_descale": None,
            "k_descale": descale,
            "v_descale": descale,
        }
        options |= {name: value for name, value in splitting.items() if name in parameters}

        def call() -> Tensor:
            module.unified_attention(**options)
            return out

        return call

    return [_trial(batches, make)]


def vllm_decode_trials(batches: list[Batch]) -> list[Trial]:
    """vLLM's Triton decode kernel, with several numbers of splits."""
    module = _imported("vllm.v1.attention.ops.triton_decode_attention")
    row = batches[0].row
    if row.has_prefill:
        raise Absent("does only decodes")
    takes_lse = "lse" in inspect.signature(module.decode_attention_fwd).parameters

    def maker(splits: int) -> Callable[[Batch], Callable[[], Tensor]]:
        def make(batch: Batch) -> Callable[[], Tensor]:
            out = torch.full_like(batch.q, float("nan"))
            sizes = row.num_tokens, row.num_heads
            partial = torch.empty(*sizes, splits, row.head_dim + 1, device=out.device)
            lse = (torch.empty(sizes, device=out.device),) if takes_lse else ()

            def call() -> Tensor:
                module.decode_attention_fwd(
                    batch.q, batch.k_cache, batch.v_cache, out, *lse, batch.block_table,
                    batch.seq_lens, partial, splits, row.head_dim**-0.5, row.block_size,
                )  # fmt: skip
                return out

            return call

        return make

    return [_trial(batches, maker(splits)) for splits in DECODE_SPLITS]


INSTALLED: dict[str, Callable[[list[Batch]], list[Trial]]] = {
    "FlashInfer": flashinfer_trials,
    "flash-attn": flash_attn_trials,
    "vLLM Triton unified": vllm_unified_trials,
    "vLLM Triton decode": vllm_decode_trials,
}


def vllm_write(write: Write) -> Callable[[], object]:
    """vLLM's Triton kernel."""
    module = _imported("vllm.v1.attention.ops.triton_reshape_and_cache_flash")
    one = torch.ones(1, device=write.k.device)
    return lambda: module.triton_reshape_and_cache_flash(
        write.k, write.v, write.k_cache, write.v_cache, write.slots, "auto", one, one
    )


def flashinfer_write(write: Write) -> Callable[[], object]:
    """FlashInfer: the tokens are those of one sequence."""
    flashinfer = _imported("flashinfer")
    num_tokens, block_size = len(write.slots), write.k_cache.shape[1]
    int32: Any = {"dtype": torch.int32, "device": write.k.device}
    rows, positions = torch.zeros(num_tokens, **int32), torch.arange(num_tokens, **int32)
    indptr = torch.tensor([0, len(write.blocks)], **int32)
    last_page_len = torch.tensor([block_size], **int32)
    ids = write.blocks.int()
    return lambda: flashinfer.append_paged_kv_cache(
        write.k, write.v, rows, positions, (write.k_cache, write.v_cache), ids, indptr,
        last_page_len,
    )  # fmt: skip


WRITES: dict[str, Callable[[Write], Callable[[], object]]] = {
    "FlashInfer": flashinfer_write,
    "vLLM Triton": vllm_write,
}
