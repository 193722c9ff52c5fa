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

PACKAGES = ("flashinfer-python", "flash_attn_3", "vllm")
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


def _known(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Those of the options that the installed version of ``function`` has."""
    parameters = inspect.signature(function).parameters
    return {name: option for name, option in options.items() if name in parameters}


def _trial(batches: list[Batch], make: Callable[[Batch], Callable[[], Tensor]]) -> Trial:
    """``make`` turns a batch into the call that is timed. Raises Absent for an fp8 cache: each of
    these libraries has one scale for all KV heads, or wants queries in fp8, too."""
    if batches[0].row.fp8:
        raise Absent("reads no fp8 cache with a scale for each KV head beside bf16 queries")
    return Trial([make(batch) for batch in batches], batches[0].error)


def flashinfer_trials(batches: list[Batch]) -> list[Trial]:
    """FlashInfer, planned beforehand: decodes on tensor cores, anything else as it chooses. A batch
    of prefill chunks and decodes can also go through its one kernel for both."""
    flashinfer = _imported("flashinfer")
    row, device = batches[0].row, batches[0].q.device
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)  # it asks for zeros
    indptr = torch.tensor([0, *row.num_blocks], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = [
        seq_len - (blocks - 1) * row.block_size
        for seq_len, blocks in zip(row.seq_lens, row.num_blocks, strict=True)
    ]
    last_page_len = torch.tensor(last, dtype=torch.int32)
    heads = row.num_heads, row.num_kv_heads, row.head_dim
    types = {"q_data_type": batches[0].q.dtype, "kv_data_type": batches[0].k_cache.dtype}

    def ids(batch: Batch) -> Tensor:
        rows = enumerate(row.num_blocks)
        return torch.cat([batch.block_table[n, :blocks] for n, blocks in rows])

    def decodes(batch: Batch) -> Any:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        wrapper.plan(indptr, ids(batch), last_page_len, *heads, row.block_size, **types)
        return wrapper

    def prefills(batch: Batch) -> Any:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        starts, pages = batch.query_start_loc.cpu(), (indptr, ids(batch), last_page_len)
        wrapper.plan(starts, *pages, *heads, row.block_size, causal=True, **types)
        return wrapper

    def both(batch: Batch) -> Any:
        wrapper = flashinfer.BatchAttention("NHD", str(device))
        starts, seq_lens = batch.query_start_loc.cpu(), batch.seq_lens.cpu()
        sizes = *heads, row.head_dim, row.block_size
        wrapper.plan(starts, indptr, ids(batch), seq_lens, *sizes, causal=True, **types)
        return wrapper

    def maker(planned: Callable[[Batch], Any]) -> Callable[[Batch], Callable[[], Tensor]]:
        """Of the calls that run what ``planned`` gives. They hand over ``out``: without it, a
        prefill also fills a new output with zeros."""

        def make(batch: Batch) -> Callable[[], Tensor]:
            """The call of one batch."""
            wrapper, out = planned(batch), torch.full_like(batch.q, float("nan"))

            def call() -> Tensor:
                """Attends as planned."""
                wrapper.run(batch.q, (batch.k_cache, batch.v_cache), out=out)
                return out

            return call

        return make

    ways = [prefills if row.has_prefill else decodes]
    if len(set(row.query_lens)) > 1:
        ways.append(both)
    return [_trial(batches, maker(planned)) for planned in ways]


def flash_attn_trials(batches: list[Batch]) -> list[Trial]:
    """FlashAttention-3. FlashAttention-2 is left out: its blocks have a multiple of 256 tokens."""
    flash_attn = _imported("flash_attn_interface")
    row = batches[0].row

    def make(batch: Batch) -> Callable[[], Tensor]:
        """The call of one batch; decodes are batches of one query a sequence."""
        options: dict[str, Any] = {"causal": True, "page_table": batch.block_table}
        q = batch.q
        if row.has_prefill:
            options |= {"cu_seqlens_q": batch.query_start_loc, "max_seqlen_q": max(row.query_lens)}
        else:
            q = q[:, None]

        def call() -> Tensor:
            """Attends; it allocates its output."""
            out = flash_attn.flash_attn_with_kvcache(
                q, batch.k_cache, batch.v_cache, cache_seqlens=batch.seq_lens, **options
            )
            return out.view(batch.q.shape)

        return call

    return [_trial(batches, make)]


def vllm_unified_trials(batches: list[Batch]) -> list[Trial]:
    """vLLM's unified Triton kernel, with splits where vLLM's backend would have it split."""
    unified_attention = _imported(
        "vllm.v1.attention.ops.triton_unified_attention"
    ).unified_attention
    row, device = batches[0].row, batches[0].q.device
    descale = torch.ones(len(row.seq_lens), row.num_kv_heads, device=device)
    splitting: dict[str, Any] = {}
    if not row.has_prefill:
        segments = row.num_tokens, row.num_heads, SEGMENTS
        splitting = _known(
            unified_attention,
            seq_threshold_3D=128 // row.num_kv_heads,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=torch.empty(*segments, row.head_dim, device=device),
            softmax_segm_max=torch.empty(segments, device=device),
            softmax_segm_expsum=torch.empty(segments, device=device),
        )

    def make(batch: Batch) -> Callable[[], Tensor]:
        """The call of one batch, with an output of its own."""
        out = torch.full_like(batch.q, float("nan"))

        def call() -> Tensor:
            """Attends, in one launch or in splits and a merge."""
            unified_attention(
                q=batch.q, k=batch.k_cache, v=batch.v_cache, out=out,
                cu_seqlens_q=batch.query_start_loc, max_seqlen_q=max(row.query_lens),
                seqused_k=batch.seq_lens, max_seqlen_k=max(row.seq_lens),
                softmax_scale=row.head_dim**-0.5, causal=True, window_size=(-1, -1),
                block_table=batch.block_table, softcap=0.0, q_descale=None, k_descale=descale,
                v_descale=descale, **splitting,
            )  # fmt: skip
            return out

        return call

    return [_trial(batches, make)]


def vllm_decode_trials(batches: list[Batch]) -> list[Trial]:
    """vLLM's Triton decode kernel, with several numbers of splits."""
    decode = _imported("vllm.v1.attention.ops.triton_decode_attention").decode_attention_fwd
    row, device = batches[0].row, batches[0].q.device
    if row.has_prefill:
        raise Absent("does only decodes")
    sizes = row.num_tokens, row.num_heads
    one = torch.ones((), device=device)
    # Scales that it is not given it makes in every call, by a copy that no capture allows.
    extra = _known(decode, lse=torch.empty(sizes, device=device), k_scale=one, v_scale=one)

    def maker(splits: int) -> Callable[[Batch], Callable[[], Tensor]]:
        """Of the calls with this number of splits."""

        def make(batch: Batch) -> Callable[[], Tensor]:
            """The call of one batch, with an output and partial results of its own."""
            out = torch.full_like(batch.q, float("nan"))
            partial = torch.empty(*sizes, splits, row.head_dim + 1, device=device)

            def call() -> Tensor:
                """Attends in so many splits, and merges them."""
                decode(
                    q=batch.q, k_buffer=batch.k_cache, v_buffer=batch.v_cache, o=out,
                    req_to_token=batch.block_table, b_seq_len=batch.seq_lens, attn_logits=partial,
                    num_kv_splits=splits, sm_scale=row.head_dim**-0.5, page_size=row.block_size,
                    **extra,
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
