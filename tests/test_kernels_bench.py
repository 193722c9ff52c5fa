"""`pagedattn bench kernels` without a GPU: every call and every check on tiny rows, in Triton's
interpreter, by a clock that stands still. Its times are no test."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from pagedattn.bench import kernels
from pagedattn.bench.kernel_rows import (
    SMALL_ROWS,
    AttentionRow,
    Ceilings,
    SmallRow,
    Work,
    decode,
)
from pagedattn.cli import main

ROOT = Path(__file__).resolve().parents[1]
H200 = Ceilings(4.67e6, 4.56e6, 4.30e6, 760e6, 1.2)
SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
TINY = (
    decode("mixed", 5, 40, 1, **SMALL),
    decode("shared", 40, 40, shared=32, **SMALL),
    decode("shared, read once", 150, 140, 144, shared=128, share=True, **SMALL),
    decode("batch-invariant", 5, 40, batch_invariant=True, **SMALL),
    decode("fp8 cache", 7, 40, fp8=True, **SMALL),
    AttentionRow("prefill chunk", (50,), (20,), **SMALL),
    AttentionRow("mixed step", (20, 33), (7, 1), **SMALL),
)
PLAN = SmallRow("plan mixed step", Work(16, 0), TINY[-1])
SHARED_PLAN = SmallRow("plan shared", Work(16, 0), TINY[2])


def stub_clock(calls: Sequence[Callable[[], object]]) -> float:
    calls[-1]()
    return 10.0


def stub_host_clock(calls: Sequence[Callable[[], object]]) -> float:
    calls[-1]()
    return 25.0


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules that need triton, with inputs that the interpreter is done with in seconds."""
    pytest.importorskip("triton")
    from pagedattn.bench import ceilings, kernel_inputs, kernel_measure, kernel_trials, peers
    from pagedattn.kernels import groups, plan

    if torch.cuda.is_available():
        pytest.skip("here the kernels are compiled, not interpreted")
    monkeypatch.setattr(kernel_inputs, "MOST_SETS", 2)
    monkeypatch.setattr(kernel_trials, "TOKENS", 128)
    monkeypatch.setattr(groups, "SAVED_KEYS", 128)
    monkeypatch.setattr(plan, "SPARED_BYTES", 0)
    monkeypatch.setattr(ceilings, "MATMUL_SIZE", 64)
    monkeypatch.setattr(ceilings, "NODES", 2)
    monkeypatch.setattr(peers, "_compiled_flex", lambda: flex_attention)
    torch.manual_seed(0)
    pool = kernel_inputs.Pool(2**19, "cpu", torch.float32)
    lines: list[str] = []
    measurement = kernel_measure.Measurement(
        pool, stub_clock, stub_host_clock, lines.append, flex=True
    )
    return SimpleNamespace(
        pool=pool, lines=lines, it=measurement, ceilings=ceilings, inputs=kernel_inputs,
        trials=kernel_trials, measure=kernel_measure, peers=peers,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options,message",
    [
        ([], "torch sees no GPU here"),
        (["--only", "encode"], "--only encode: known rows are decode 1x512, "),
        (["--evidence", "--quick"], "evidence is of the whole run"),
        (["--evidence", "--only", "decode"], "evidence is of the whole run"),
    ],
)
def test_what_is_refused(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "kernels", *options]) == 2
    assert message in capsys.readouterr().err


def test_every_row_is_checked_and_timed(measuring: Any) -> None:
    small = [row for row in SMALL_ROWS if not row.attention]
    rows: list[AttentionRow | SmallRow] = [*TINY, *small, PLAN, SHARED_PLAN]
    result = measuring.measure.measure(measuring.it, rows, TINY[:1], H200)
    assert measuring.measure.failures(result) == []
    json.dumps(result, allow_nan=False)
    assert [row["name"] for row in result["rows"]] == [row.name for row in rows]
    for row, given in zip(result["rows"], rows, strict=True):
        assert row["us"] == 10.0 and row["error"] < 1e-5, row["name"]
        assert row["share"] == pytest.approx(given.work.floor(H200)[0] / 10, rel=0.01)
    peers = {row["name"]: row["peers"] for row in result["rows"]}
    chunk = peers["prefill chunk"]
    assert chunk["SDPA flash"]["us"] == chunk["FlexAttention"]["us"] == 10.0
    assert chunk["SDPA cuDNN"] == {"absent": "has no causal mask that ends at the last key"}
    assert peers["decode mixed"]["SDPA flash"]["absent"].startswith("K and V in one piece")
    assert "RuntimeError" in peers["decode shared"]["SDPA cuDNN"]["failed"]  # no CPU backend
    assert peers["write 8192 tokens"]["torch index_copy_"]["error"] == 0
    assert peers["copy 1024 blocks"]["torch index"]["error"] == 0
    for name in ("FlashInfer", "flash-attn", "vLLM Triton unified", "vLLM Triton decode"):
        assert "cannot import" in chunk[name]["absent"]
    assert list(result["climb"]["decode mixed"]) == [
        "naive",
        "packed",
        "split",
        "pipelined",
        "Hopper",
    ]
    assert all(step["error"] < 1e-5 for step in result["climb"]["decode mixed"].values())
    assert "decode mixed: 10.0 us" in measuring.lines


def test_an_unpipelined_step_is_launched_with_one_stage(
    measuring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = measuring.trials
    shipped = trials.attention.Tile(64, 2, 3)
    launched = []
    monkeypatch.setattr(trials.attention, "decode_tile", lambda *call: shipped)
    monkeypatch.setattr(
        trials, "paged_attention",
        lambda *args, **kwargs: launched.append(trials.attention.decode_tile(*args)),
    )  # fmt: skip
    steps = trials.climb_trials(measuring.inputs.make_batches(measuring.pool, TINY[0]))
    for step in ("packed", "split", "pipelined"):
        trial = steps[step]()
        with trial.context():
            trial.calls[0]()
    assert launched == [(64, 2, 1, None), (64, 2, 1, None), (64, 2, 3, None)]


def test_calls_of_some_rows_are_timed_on_the_cpu_as_well(
    measuring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*TINY[3:4], TINY[1], PLAN]
    monkeypatch.setattr(measuring.measure, "HOST", ("decode shared", "plan mixed step"))
    result = measuring.measure.measure(measuring.it, rows, [], H200)
    assert [row["us"] for row in result["rows"]] == [10.0] * 3
    assert list(result["host"]) == ["decode shared", "plan mixed step"]
    attention, plan = result["host"].values()
    assert attention["us"] == attention["peers"]["SDPA flash"]["us"] == plan["us"] == 25.0
    assert "FlexAttention" not in attention["peers"] and plan["peers"] == {}
    assert "on the CPU, decode shared: 25.0 us" in measuring.lines

    monkeypatch.setattr(measuring.trials, "plan_attention", lambda *_: None)
    result = measuring.measure.measure(measuring.it, [PLAN], [], H200)
    told = measuring.measure.failures(result)
    assert [line.partition(":")[0] for line in told] == [
        "plan mixed step", "plan mixed step, on the CPU",
    ]  # fmt: skip


def test_a_peer_is_chosen_before_the_clock_starts(measuring: Any) -> None:
    seen = []

    def clock(calls: Sequence[Callable[[], object]]) -> float:
        seen.append(torch.backends.cuda.flash_sdp_enabled())
        return 1.0

    cudnn, flash = (
        getattr(torch.nn.attention.SDPBackend, f"{name}_ATTENTION") for name in ("CUDNN", "FLASH")
    )
    measuring.it.clock = clock
    measuring.it.trial_us(measuring.peers.sdpa_trial(measuring.pool, TINY[1], flash))
    with pytest.raises(RuntimeError):  # the CPU has no such backend
        measuring.it.trial_us(measuring.peers.sdpa_trial(measuring.pool, TINY[1], cudnn))
    assert seen == [True] and torch.backends.cuda.cudnn_sdp_enabled()


def test_one_program_has_all_keys_of_a_row_in_an_unsplit_plan(measuring: Any) -> None:
    (batch, *_) = measuring.inputs.make_batches(measuring.pool, decode("1x900", 900, **SMALL))
    assert measuring.trials.unsplit_plan(batch).num_items.tolist() == [1, 0]
    assert measuring.trials.made_plan(batch).num_items[0] > 1


def test_the_plan_of_a_row_shares_what_the_row_shares(measuring: Any) -> None:
    plain, shared, invariant = (
        measuring.trials.made_plan(measuring.inputs.make_batches(measuring.pool, row)[0])
        for row in TINY[1:4]
    )
    assert plain.shared is None and not plain.batch_invariant
    assert int(shared.shared.num_items) > 0
    assert invariant.shared is None and invariant.batch_invariant


@pytest.mark.parametrize("what", ["nothing", "half", "one head"])
def test_wrong_attention_has_no_time(
    what: str, measuring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = measuring.trials.paged_attention

    def wrong(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if what != "nothing":
            right(*args, out=out, **kwargs)
            out[:, : None if what == "half" else 1] *= 0.5
        return out

    monkeypatch.setattr(measuring.trials, "paged_attention", wrong)
    result = measuring.measure.measure(measuring.it, TINY[:1], [], H200)
    (failure,) = measuring.measure.failures(result)
    assert failure.startswith("decode mixed: ValueError: the result is wrong")
    assert "us" not in result["rows"][0] and "share" not in result["rows"][0]


@pytest.mark.parametrize("name", ["write_kv", "copy_blocks", "plan_attention"])
def test_a_kernel_that_does_nothing_has_no_time(
    name: str, measuring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring.trials, name, lambda *args: None)
    kind = name.partition("_")[0]
    row = next(row for row in (*SMALL_ROWS[:2], PLAN) if row.name.startswith(kind))
    found = measuring.it.small(row)
    assert "the result is wrong" in found["failed"]
    assert all("us" in peer for name, peer in found["peers"].items() if name.startswith("torch"))


def test_ceilings_are_rates_of_right_results(measuring: Any) -> None:
    errors = []

    def measure(trial: Any) -> float:
        errors.append(trial.error(trial.calls[0]()))
        return 10.0

    pool = measuring.inputs.Pool(2**17, "cpu", torch.float32)
    found = measuring.ceilings.measure_ceilings(pool, measure)
    num_bytes = 4 * 2**17
    assert found.read == num_bytes / 10
    assert found.read_through_table == 2 * num_bytes / 10  # K and V
    assert found.copy == 2 * (num_bytes / 2) / 10  # half of it, read and written
    assert found.matmul == 2 * 64**3 / 10
    assert found.node == 10
    assert len(errors) == 11 and max(errors) < 1e-6


COMPILE = """
from pagedattn.bench import ceilings
from pagedattn.bench.kernel_inputs import Pool
from pagedattn.kernels.compiled import compile_launches

pool = Pool(2**31, "meta")
streams = *ceilings.read_trials(pool), *ceilings.copy_trials(pool)
for trial in (*streams, *ceilings.read_through_table_trials(pool), ceilings.node_trial(pool)):
    for kernel in compile_launches(trial.calls[0], "ceiling"):
        assert not kernel.spills, kernel
        print(kernel.kernel)
"""


def test_the_ceilings_compile_for_an_h200() -> None:
    pytest.importorskip("triton")
    found = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert set(found.stdout.split()) == {
        "_read_kernel", "_read_through_table_kernel", "_copy_kernel", "_empty_kernel",
    }  # fmt: skip


def test_the_command_writes_all_that_is_asked_for(
    measuring: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    from pagedattn.course import evidence

    recorded: dict[str, Any] = {}
    monkeypatch.setattr(
        evidence, "record",
        lambda path, command, sources, result, root: recorded.update(locals()),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr("pagedattn.bench.gpu_clock.GraphClock", lambda **_: stub_clock)
    monkeypatch.setattr("pagedattn.bench.host_clock.HostClock", lambda: stub_host_clock)
    pool = measuring.inputs.Pool(2**17, "cpu", torch.float32)
    monkeypatch.setattr(measuring.inputs, "Pool", lambda _: pool)
    monkeypatch.setattr(kernels, "ATTENTION_ROWS", TINY[:1])
    monkeypatch.setattr(kernels, "SMALL_ROWS", (PLAN,))
    options = ["--json", str(tmp_path / "a.json"), "--figure", str(tmp_path / "a.svg")]
    monkeypatch.setattr("sys.argv", ["pagedattn", "bench", "kernels", *options, "--evidence"])
    assert main() == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["command"].startswith("pagedattn bench kernels --json ")
    assert result["card"] == "a device" and result["peer_versions"]["torch"] == torch.__version__
    assert [row["name"] for row in result["rows"]] == ["decode mixed", "plan mixed step"]
    assert "</svg>" in (tmp_path / "a.svg").read_text()
    assert recorded["path"] == ROOT / kernels.EVIDENCE
    assert recorded["result"]["rows"] == result["rows"]
    assert {"pagedattn/kernels/attention.py", "pagedattn/bench/gpu_clock.py"} <= set(
        recorded["sources"]
    )
    assert all((ROOT / source).is_file() for source in recorded["sources"])


def test_a_failure_is_told_and_not_recorded(
    measuring: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from pagedattn.course import evidence

    monkeypatch.setattr(evidence, "record", lambda *_: pytest.fail("recorded"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("pagedattn.bench.gpu_clock.GraphClock", lambda **_: stub_clock)
    monkeypatch.setattr("pagedattn.bench.host_clock.HostClock", lambda: stub_host_clock)
    monkeypatch.setattr(measuring.inputs, "Pool", lambda _: measuring.pool)
    monkeypatch.setattr(measuring.measure, "measure_ceilings", lambda *_: H200)
    monkeypatch.setattr(measuring.trials, "plan_attention", lambda *_: None)
    monkeypatch.setattr(kernels, "ATTENTION_ROWS", ())
    monkeypatch.setattr(kernels, "SMALL_ROWS", (PLAN,))
    assert main(["bench", "kernels", "--evidence"]) == 1
    assert "plan mixed step: ValueError: the result is wrong" in capsys.readouterr().err
