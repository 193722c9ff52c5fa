"""The adapters to other libraries, with stand-ins for these: each computes plain attention from
the arguments that the library documents, so a wrong argument gives a wrong result."""

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedattn.attention import attention
from pagedattn.bench.kernel_rows import AttentionRow, decode

pytest.importorskip("triton")

from pagedattn.bench import installed_peers as peers
from pagedattn.bench import kernel_inputs
from pagedattn.bench.kernel_inputs import Batch, Pool, Trial, Write, make_batches
from pagedattn.bench.peers import Absent

SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
DECODE = decode("mixed", 5, 48, 17, **SMALL)
MIXED = AttentionRow("mixed step", (20, 33), (7, 1), **SMALL)
GIVEN: dict[str, Any] = {}  # what the stand-ins were given besides


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
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor,
    causal: bool, cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None,
) -> Tensor:  # fmt: skip
    assert causal
    if cu_seqlens_q is None:  # [num_seqs, num_queries, num_heads, head_dim]
        starts = torch.arange(len(q) + 1) * q.shape[1]
        out = plain(q.flatten(0, 1), k_cache, v_cache, list(page_table), cache_seqlens, starts)
        return out.view(q.shape)
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    return plain(q, k_cache, v_cache, list(page_table), cache_seqlens, cu_seqlens_q)


class FlashInfer:
    """Both of its wrappers, and its write."""

    def __init__(self, workspace: Tensor, layout: str, use_tensor_cores: bool = False) -> None:
        assert workspace.dtype == torch.uint8 and layout == "NHD"

    def plan(
        self, *arrays: Any, causal: bool | None = None, q_data_type: Any, kv_data_type: Any
    ) -> None:
        *pages, heads, kv_heads, head_dim, page_size = arrays
        assert (heads, kv_heads, head_dim, page_size) == (4, 2, 16, 16)
        assert q_data_type == kv_data_type == torch.float32
        self.starts = None
        if causal is not None:
            assert causal
            self.starts, *pages = pages
        indptr, self.indices, last = pages
        assert (last >= 1).all() and (last <= page_size).all()
        self.lengths = (indptr.diff() - 1) * page_size + last
        self.blocks = list(self.indices.split(indptr.diff().tolist()))

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        starts = torch.arange(len(q) + 1) if self.starts is None else self.starts
        return plain(q, *caches, self.blocks, self.lengths, starts)

    @staticmethod
    def append_paged_kv_cache(
        append_key: Tensor, append_value: Tensor, batch_indices: Tensor, positions: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor], kv_indices: Tensor, kv_indptr: Tensor,
        kv_last_page_len: Tensor,
    ) -> None:  # fmt: skip
        assert kv_last_page_len.tolist() == [16]
        blocks = kv_indices[kv_indptr[batch_indices] + positions // 16]
        for cache, new in zip(paged_kv_cache, (append_key, append_value), strict=True):
            cache[blocks.long(), positions % 16] = new


def vllm_unified(
    *, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int,
    seqused_k: Tensor, max_seqlen_k: int, softmax_scale: float, causal: bool,
    window_size: tuple[int, int], block_table: Tensor, softcap: float, q_descale: None,
    k_descale: Tensor, v_descale: Tensor, seq_threshold_3D: int | None = None,
    num_par_softmax_segments: int | None = None, softmax_segm_output: Tensor | None = None,
    softmax_segm_max: Tensor | None = None, softmax_segm_expsum: Tensor | None = None,
) -> None:  # fmt: skip
    assert causal and window_size == (-1, -1) and softcap == 0 and softmax_scale == 0.25
    assert k_descale.shape == (len(seqused_k), 2)
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == seqused_k.max()
    GIVEN["splits"] = softmax_segm_output is not None and softmax_segm_output.shape
    out.copy_(plain(q, k, v, list(block_table), seqused_k, cu_seqlens_q))


def vllm_decode(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, o: Tensor, lse: Tensor, req_to_token: Tensor,
    b_seq_len: Tensor, attn_logits: Tensor, num_kv_splits: int, sm_scale: float,
    page_size: int = 1,
) -> None:  # fmt: skip
    assert attn_logits.shape == (*q.shape[:2], num_kv_splits, 17) and lse.shape == q.shape[:2]
    assert sm_scale == 0.25 and page_size == 16
    starts = torch.arange(len(q) + 1)
    o.copy_(plain(q, k_buffer, v_buffer, list(req_to_token), b_seq_len, starts))


def vllm_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    kv_cache_dtype: str, k_scale: Tensor, v_scale: Tensor,
) -> None:  # fmt: skip
    assert kv_cache_dtype == "auto"
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.flatten(0, 1)[slot_mapping] = new


STANDINS: dict[str, dict[str, Any]] = {
    "flash_attn_interface": {"flash_attn_with_kvcache": flash_attn_3},
    "flashinfer": {
        "BatchDecodeWithPagedKVCacheWrapper": FlashInfer,
        "BatchPrefillWithPagedKVCacheWrapper": FlashInfer,
        "append_paged_kv_cache": FlashInfer.append_paged_kv_cache,
    },
    "vllm.v1.attention.ops.triton_unified_attention": {"unified_attention": vllm_unified},
    "vllm.v1.attention.ops.triton_decode_attention": {"decode_attention_fwd": vllm_decode},
    "vllm.v1.attention.ops.triton_reshape_and_cache_flash": {
        "triton_reshape_and_cache_flash": vllm_write
    },
}


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """A small pool; the libraries are there."""
    monkeypatch.setattr(kernel_inputs, "MOST_SETS", 2)
    monkeypatch.setattr(peers, "WORKSPACE", 16)
    for name, members in STANDINS.items():
        for depth in range(1, name.count(".") + 1):
            package = ".".join(name.split(".")[:depth])
            monkeypatch.setitem(sys.modules, package, SimpleNamespace(__path__=[]))
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
    torch.manual_seed(0)
    return Pool(2**17, "cpu", torch.float32)


ADAPTERS = list(peers.INSTALLED.items())


@pytest.mark.parametrize("row", [DECODE, MIXED], ids=lambda row: row.name)
@pytest.mark.parametrize("name,trials", ADAPTERS)
def test_an_adapter_asks_for_the_right_attention(
    name: str, trials: Callable[[list[Batch]], list[Trial]], row: AttentionRow, pool: Pool
) -> None:
    batches = make_batches(pool, row)
    if name == "vLLM Triton decode" and row is MIXED:
        with pytest.raises(Absent, match="only decodes"):
            trials(batches)
        return
    for trial in trials(batches):
        assert trial.error(trial.calls[0]()) < 1e-5
        second = batches[1].error(trial.calls[1]())
        assert second < 1e-5, "each call has a batch of its own"


def test_vllm_splits_decodes_alone(pool: Pool) -> None:
    for row, splits in ((DECODE, (3, 4, 16, 16)), (MIXED, False)):
        (trial,) = peers.vllm_unified_trials(make_batches(pool, row))
        trial.calls[0]()
        assert GIVEN["splits"] == splits


@pytest.mark.parametrize("name,make", peers.WRITES.items())
def test_an_adapter_writes_all_tokens(name: str, make: Any, pool: Pool) -> None:
    k_cache, v_cache = pool.cache(decode("", 1))
    blocks = torch.tensor([6, 2])
    slots = (blocks[:, None] * 16 + torch.arange(16)).flatten()
    write = Write(k_cache, v_cache, pool.randn(32, 8, 128), pool.randn(32, 8, 128), blocks, slots)
    assert write.error(None) == float("inf")
    make(write)()
    assert write.error(None) == 0


@pytest.mark.parametrize("name,trials", ADAPTERS)
def test_who_is_not_installed_is_absent(
    name: str, trials: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (*STANDINS, "flash_attn"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Absent, match="cannot import"):
        trials(make_batches(pool, DECODE))


def test_versions_of_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package != "vllm":
            raise PackageNotFoundError(package)
        return "0.21.0"

    monkeypatch.setattr(peers, "version", version)
    assert peers.installed_versions() == {"vllm": "0.21.0"}


def test_the_reference_sees_one_wrong_token(pool: Pool) -> None:
    """Our own measure of error, by chapter 01's attention in float64."""
    (batch, *_) = make_batches(pool, MIXED)
    blocks, starts = list(batch.block_table), batch.query_start_loc
    caches = batch.k_cache.double(), batch.v_cache.double()
    right = plain(batch.q.double(), *caches, blocks, MIXED.seq_lens, starts).float()
    assert batch.error(right) < 1e-6
    for token in (0, len(right) - 1):
        wrong = right.clone()
        wrong[token] *= 1.1
        assert 0.01 < batch.error(wrong) < 0.1
    wrong = right.clone()
    wrong[3, 2, 5] = float("nan")
    assert batch.error(wrong) == float("inf")
