"""Stand-ins for other libraries' attention: FlashInfer 0.6.18, FlashAttention-3, and vLLM's Triton
kernels, 0.21 and 0.33. Each has the parameters of the library and computes plain attention from
them, so that a call that the library would refuse fails, and a wrong argument gives a wrong result.
"""

from typing import Any

import torch
from torch import Tensor

from pagedattn.attention import attention

GIVEN: dict[str, Any] = {}  # what the stand-ins were given besides


def assert_int32(*arrays: Tensor) -> None:
    """The libraries' kernels read their arrays of integers as these, and do not look."""
    assert {array.dtype for array in arrays} == {torch.int32}


def plain(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: list[Tensor], lengths: Any, starts: Any
) -> Tensor:
    """Causal attention, row by row."""
    rows = []
    for row, (ids, length) in enumerate(zip(blocks, lengths, strict=True)):
        k, v = (cache[ids.long()].flatten(0, 1)[: int(length)] for cache in (k_cache, v_cache))
        rows.append(attention(q[starts[row] : starts[row + 1]], k, v))
    return torch.cat(rows)


def flash_attn_3(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any = None, v: Any = None, qv: Any = None,
    rotary_cos: Any = None, rotary_sin: Any = None, cache_seqlens: Any = None,
    cache_batch_idx: Any = None, cache_leftpad: Any = None, page_table: Any = None,
    cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None, max_seqlen_q: Any = None,
    rotary_seqlens: Any = None, q_descale: Any = None, k_descale: Any = None,
    v_descale: Any = None, softmax_scale: Any = None, causal: bool = False,
    window_size: Any = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: Any = None, num_splits: int = 0,
    pack_gqa: Any = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Tensor:  # fmt: skip
    """`flash_attn_with_kvcache` of FlashAttention-3."""
    assert causal and k is None and v is None
    assert_int32(cache_seqlens, page_table)
    if cu_seqlens_q is None:  # [num_seqs, num_queries, num_heads, head_dim]
        starts = torch.arange(len(q) + 1) * q.shape[1]
        out = plain(q.flatten(0, 1), k_cache, v_cache, list(page_table), cache_seqlens, starts)
        return out.view(q.shape)
    assert_int32(cu_seqlens_q)
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    return plain(q, k_cache, v_cache, list(page_table), cache_seqlens, cu_seqlens_q)


class FlashInfer:
    """What its classes share: pages one after the other, and a run that needs a plan."""

    lengths: Tensor
    blocks: list[Tensor]
    starts: Tensor

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
        assert not float_workspace_buffer.any(), "must be initialized to 0 for its first use"

    def planned(self, starts: Tensor, indptr: Tensor, indices: Tensor, lengths: Tensor) -> None:
        assert_int32(starts, indptr, indices, lengths)
        self.starts, self.lengths = starts, lengths
        self.blocks = list(indices.split(indptr.diff().tolist()))

    def paged(self, indptr: Tensor, last: Tensor, *sizes: Any) -> Tensor:
        assert sizes == (4, 2, 16, 16, torch.float32, torch.float32)
        assert_int32(last)
        assert (last >= 1).all() and (last <= 16).all()
        return (indptr.diff() - 1) * 16 + last

    def attend(self, q: Tensor, caches: tuple[Tensor, Tensor], out: Tensor | None) -> None:
        assert out is not None and out.dtype == q.dtype, "a prefill would fill one with zeros"
        GIVEN["ran"] = type(self)
        out.copy_(plain(q, *caches, self.blocks, self.lengths, self.starts))


class Decode(FlashInfer):
    """`BatchDecodeWithPagedKVCacheWrapper`."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None, paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto", jit_args: Any = None,
    ) -> None:  # fmt: skip
        assert use_tensor_cores and not use_cuda_graph
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, pos_encoding_mode: str = "NONE",
        window_left: int = -1, logits_soft_cap: Any = None, q_data_type: Any = "float16",
        kv_data_type: Any = None, o_data_type: Any = None, data_type: Any = None,
        sm_scale: Any = None, rope_scale: Any = None, rope_theta: Any = None,
        non_blocking: bool = True, block_tables: Any = None, seq_lens: Any = None,
        fixed_split_size: Any = None, disable_split_kv: bool = False, q_len_per_req: int = 1,
    ) -> None:  # fmt: skip
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type, kv_data_type
        starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self.planned(starts, indptr, indices, self.paged(indptr, last_page_len, *sizes))

    def run(
        self, q: Tensor, paged_kv_cache: Any, *args: Any, q_scale: Any = None, k_scale: Any = None,
        v_scale: Any = None, out: Any = None, lse: Any = None, return_lse: bool = False,
        enable_pdl: Any = None, window_left: Any = None, sinks: Any = None,
        q_len_per_req: Any = None,
    ) -> None:  # fmt: skip
        assert not args
        self.attend(q, paged_kv_cache, out)


class Prefill(FlashInfer):
    """`BatchPrefillWithPagedKVCacheWrapper`."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None, paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None, paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None, mask_indptr_buf: Any = None, backend: str = "auto",
        jit_args: Any = None, jit_kwargs: Any = None,
    ) -> None:  # fmt: skip
        assert not use_cuda_graph
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        page_size: int, head_dim_vo: Any = None, custom_mask: Any = None,
        packed_custom_mask: Any = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, sm_scale: Any = None, window_left: int = -1,
        logits_soft_cap: Any = None, rope_scale: Any = None, rope_theta: Any = None,
        q_data_type: Any = "float16", kv_data_type: Any = None, o_data_type: Any = None,
        non_blocking: bool = True,
    ) -> None:  # fmt: skip
        assert causal
        sizes = num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type, kv_data_type
        lengths = self.paged(paged_kv_indptr, paged_kv_last_page_len, *sizes)
        self.planned(qo_indptr, paged_kv_indptr, paged_kv_indices, lengths)

    def run(
        self, q: Tensor, paged_kv_cache: Any, *args: Any, q_scale: Any = None, k_scale: Any = None,
        v_scale: Any = None, out: Any = None, lse: Any = None, return_lse: bool = False,
        enable_pdl: Any = None, window_left: Any = None, sinks: Any = None,
    ) -> None:  # fmt: skip
        assert not args
        self.attend(q, paged_kv_cache, out)


class BothAtOnce(FlashInfer):
    """`BatchAttention`."""

    def __init__(self, kv_layout: str = "NHD", device: str = "cuda") -> None:
        assert kv_layout == "NHD" and device == "cpu"

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, head_dim_vo: int, page_size: int,
        causal: bool = False, sm_scale: Any = None, logits_soft_cap: Any = None,
        q_data_type: Any = torch.bfloat16, kv_data_type: Any = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:  # fmt: skip
        assert causal and head_dim_qk == head_dim_vo == page_size == 16
        assert (num_qo_heads, num_kv_heads) == (4, 2)
        assert q_data_type == kv_data_type == torch.float32
        self.planned(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    def run(
        self, q: Tensor, kv_cache: Any, out: Any = None, lse: Any = None, k_scale: Any = None,
        v_scale: Any = None, logits_soft_cap: float = 0.0, profiler_buffer: Any = None,
        kv_cache_sf: Any = None,
    ) -> None:  # fmt: skip
        self.attend(q, kv_cache, out)


def flashinfer_append(
    append_key: Tensor, append_value: Tensor, batch_indices: Tensor, positions: Tensor,
    paged_kv_cache: Any, kv_indices: Tensor, kv_indptr: Tensor, kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """`append_paged_kv_cache`."""
    assert_int32(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    assert kv_layout == "NHD" and kv_last_page_len.tolist() == [16]
    blocks = kv_indices[kv_indptr[batch_indices] + positions // 16]
    for cache, new in zip(paged_kv_cache, (append_key, append_value), strict=True):
        cache[blocks.long(), positions % 16] = new


def vllm_unified(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int,
    seqused_k: Tensor, max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: Any,
    block_table: Tensor, softcap: float, q_descale: Any, k_descale: Any, v_descale: Any,
    seq_threshold_3D: Any = None, num_par_softmax_segments: Any = None,
    softmax_segm_output: Any = None, softmax_segm_max: Any = None, softmax_segm_expsum: Any = None,
    alibi_slopes: Any = None, output_scale: Any = None, qq_bias: Any = None, sinks: Any = None,
) -> None:  # fmt: skip
    """`unified_attention`."""
    assert causal and window_size == (-1, -1) and softcap == 0 and softmax_scale == 0.25
    assert q_descale is None and k_descale.shape == v_descale.shape == (len(seqused_k), 2)
    assert_int32(cu_seqlens_q, seqused_k, block_table)
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == seqused_k.max()
    parts = softmax_segm_output, softmax_segm_max, softmax_segm_expsum
    if seq_threshold_3D is None:
        assert num_par_softmax_segments is None and parts == (None,) * 3
    else:
        assert seq_threshold_3D == 64 and num_par_softmax_segments == 16
        shapes = [(len(q), 4, 16, 16), (len(q), 4, 16), (len(q), 4, 16)]
        assert [part.shape for part in parts] == shapes
        assert {part.dtype for part in parts} == {torch.float32}
    GIVEN["splits"] = num_par_softmax_segments
    out.copy_(plain(q, k, v, list(block_table), seqused_k, cu_seqlens_q))


def vllm_decode(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, o: Tensor, lse: Tensor, req_to_token: Tensor,
    b_seq_len: Tensor, attn_logits: Tensor, num_kv_splits: int, sm_scale: float,
    page_size: int = 1, logit_cap: float = 0.0, k_scale: Any = None, v_scale: Any = None,
    is_mla: bool = False,
) -> None:  # fmt: skip
    """`decode_attention_fwd`."""
    assert attn_logits.shape == (*q.shape[:2], num_kv_splits, 17) and lse.shape == q.shape[:2]
    assert attn_logits.dtype == lse.dtype == torch.float32
    assert sm_scale == 0.25 and page_size == 16 and not logit_cap and not is_mla
    for scale in (k_scale, v_scale):
        assert scale is not None, "it makes one from a number of the CPU: no graph captures that"
        assert scale.dtype == torch.float32 and scale.numel() == 1 and scale == 1
    assert_int32(req_to_token, b_seq_len)
    starts = torch.arange(len(q) + 1)
    o.copy_(plain(q, k_buffer, v_buffer, list(req_to_token), b_seq_len, starts))


def vllm_decode_before(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, o: Tensor, req_to_token: Tensor,
    b_seq_len: Tensor, attn_logits: Tensor, num_kv_splits: int, sm_scale: float,
    page_size: int = 1, logit_cap: float = 0.0,
) -> None:  # fmt: skip
    """As it was before it returned a log-sum-exp and took scales."""
    one = torch.ones(1)
    vllm_decode(
        q, k_buffer, v_buffer, o, q.new_empty(q.shape[:2]), req_to_token, b_seq_len, attn_logits,
        num_kv_splits, sm_scale, page_size, logit_cap, one, one,
    )  # fmt: skip


def vllm_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    kv_cache_dtype: str, k_scale: Tensor, v_scale: Tensor,
) -> None:  # fmt: skip
    """`triton_reshape_and_cache_flash`."""
    assert kv_cache_dtype == "auto" and k_scale.dtype == v_scale.dtype == torch.float32
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.flatten(0, 1)[slot_mapping] = new


STANDINS: dict[str, dict[str, Any]] = {
    "flash_attn_interface": {"flash_attn_with_kvcache": flash_attn_3},
    "flashinfer": {
        "BatchDecodeWithPagedKVCacheWrapper": Decode,
        "BatchPrefillWithPagedKVCacheWrapper": Prefill,
        "BatchAttention": BothAtOnce,
        "append_paged_kv_cache": flashinfer_append,
    },
    "vllm.v1.attention.ops.triton_unified_attention": {"unified_attention": vllm_unified},
    "vllm.v1.attention.ops.triton_decode_attention": {"decode_attention_fwd": vllm_decode},
    "vllm.v1.attention.ops.triton_reshape_and_cache_flash": {
        "triton_reshape_and_cache_flash": vllm_write
    },
}
