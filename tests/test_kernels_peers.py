"""The adapters to other libraries, with stand-ins for these."""

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedattn.bench.kernel_rows import AttentionRow, decode

pytest.importorskip("triton")

from pagedattn.bench import installed_peers as peers
from pagedattn.bench import kernel_inputs
from pagedattn.bench.kernel_inputs import Batch, Pool, Trial, Write, make_batches
from pagedattn.bench.peers import Absent
from tests.peer_libraries import (
    GIVEN,
    STANDINS,
    BothAtOnce,
    Decode,
    Prefill,
    plain,
    vllm_decode_before,
)

SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
DECODE = decode("mixed", 5, 48, 17, **SMALL)
MIXED = AttentionRow("mixed step", (20, 33), (7, 1), **SMALL)
PREFILL = AttentionRow("prefill", (20, 33), (7, 7), **SMALL)


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


@pytest.mark.parametrize("row", [DECODE, PREFILL, MIXED], ids=lambda row: row.name)
@pytest.mark.parametrize("name,trials", ADAPTERS)
def test_an_adapter_asks_for_the_right_attention(
    name: str, trials: Callable[[list[Batch]], list[Trial]], row: AttentionRow, pool: Pool
) -> None:
    batches = make_batches(pool, row)
    if name == "vLLM Triton decode" and row.has_prefill:
        with pytest.raises(Absent, match="only decodes"):
            trials(batches)
        return
    for trial in trials(batches):
        assert trial.error(trial.calls[0]()) < 1e-5
        second = batches[1].error(trial.calls[1]())
        assert second < 1e-5, "each call has a batch of its own"


def test_vllm_splits_decodes_alone(pool: Pool) -> None:
    for row, splits in ((DECODE, 16), (MIXED, None)):
        (trial,) = peers.vllm_unified_trials(make_batches(pool, row))
        trial.calls[0]()
        assert GIVEN["splits"] == splits


@pytest.mark.parametrize(
    "row,ways",
    [(DECODE, [Decode]), (PREFILL, [Prefill]), (MIXED, [Prefill, BothAtOnce])],
    ids=lambda value: getattr(value, "name", ""),
)
def test_flashinfer_has_two_ways_for_a_mixed_batch(
    row: AttentionRow, ways: list[type], pool: Pool
) -> None:
    trials = peers.flashinfer_trials(make_batches(pool, row))
    ran = []
    for trial in trials:
        trial.calls[0]()
        ran.append(GIVEN["ran"])
    assert ran == ways


def test_an_older_decode_kernel_of_vllm_is_called_without_what_it_lacks(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["vllm.v1.attention.ops.triton_decode_attention"]
    monkeypatch.setattr(module, "decode_attention_fwd", vllm_decode_before)
    for trial in peers.vllm_decode_trials(make_batches(pool, DECODE)):
        assert trial.error(trial.calls[0]()) < 1e-5


@pytest.mark.parametrize("name,trials", ADAPTERS)
def test_no_adapter_reads_a_cache_with_a_scale_for_each_kv_head(
    name: str, trials: Any, pool: Pool
) -> None:
    with pytest.raises(Absent, match="a scale for each KV head"):
        trials(make_batches(pool, decode("fp8", 5, fp8=True, **SMALL)))


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
    for module in STANDINS:
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
