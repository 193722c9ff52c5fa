"""The kernels compiled for an H200, which needs none: no spills, and a spill would be noticed."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedattn.cli import main

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")


def test_no_kernel_spills(tmp_path: Path, record_property: Any) -> None:
    """Every kernel of the package, in every configuration in which speed is measured. And the text
    shows what is compiled here."""
    from pagedattn.kernels.launches import LAUNCHES

    status = main(["compile", "--json", str(tmp_path / "table.json")])
    kernels = json.loads((tmp_path / "table.json").read_text())["kernels"]
    assert {kernel["call"] for kernel in kernels} == set(LAUNCHES)
    assert {kernel["kernel"] for kernel in kernels} == _launched(), "a kernel that no call launches"
    for kernel in kernels:
        record_property(f"{kernel['call']}: {kernel['kernel']}", json.dumps(kernel))
        assert 0 < kernel["registers"] <= 255 and kernel["shared"] <= 227 * 1024, kernel
    spilling = [kernel for kernel in kernels if kernel["spills"]]
    assert not spilling, "\n".join(map(str, spilling))
    assert status == 0
    _check_the_text(kernels)


def _check_the_text(kernels: list[dict[str, Any]]) -> None:
    """The rows of `pagedattn compile` in chapter 05, with the Triton that it names."""
    import triton

    text = (Path(__file__).parents[1] / "chapters/05/README.md").read_text(encoding="utf-8")
    head, _, table = text.partition("| call | kernel | warps | registers | spilled | shared |\n")
    if f"(Triton {triton.__version__}):" not in head:
        return
    rows = table.partition("\n\n")[0].splitlines()[1:]
    compiled = {
        f"| {kernel['call']} | {kernel['kernel'].strip('_').removesuffix('_kernel')} | "
        f"{kernel['num_warps']} | {kernel['registers']} | {kernel['stack'] + kernel['local']} | "
        f"{kernel['shared']:,} |"
        for kernel in kernels
    }
    assert rows and set(rows) <= compiled, "\n".join(sorted(compiled))


def _launched() -> set[str]:
    """The kernels that the package launches, by its source: those written `name[grid]`."""
    import pagedattn.kernels

    sources = Path(pagedattn.kernels.__path__[0]).glob("*.py")
    text = "\n".join(source.read_text() for source in sources)
    return set(re.findall(r"\b(\w+_kernel)\[", text))


SPILLING = """
import json
from dataclasses import asdict

import pagedattn.kernels
import torch
import triton
import triton.language as tl
from pagedattn.kernels.compiled import compile_launches


@triton.jit
def sum_of_rows(x, out, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    tile = tl.load(x + rows[:, None] * SIZE + rows[None, :])
    tl.store(out + rows, tl.sum(tile * tl.max(tile, 0)[None, :], 1))


def launch(size):
    x = torch.empty(size, size, device="meta")
    sum_of_rows[(1,)](x, x, SIZE=size, num_warps=1)


for size in (16, 128):  # 8 numbers a thread; 512, of which 255 at most are in registers
    for kernel in compile_launches(lambda: launch(size), f"size {size}"):
        print(json.dumps(asdict(kernel) | {"spills": kernel.spills}))
"""


def test_a_spill_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "spilling.py").write_text(SPILLING)
    lines = subprocess.run(
        [sys.executable, tmp_path / "spilling.py"],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    small, large = map(json.loads, lines)
    assert small["kernel"] == large["kernel"] == "sum_of_rows"
    assert small["num_warps"] == 1
    assert not small["spills"] and small["stack"] + small["local"] == 0
    assert large["spills"] and large["stack"] + large["local"] > 0


def test_a_name_that_no_call_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--only", "encode"]) == 2
    assert "--only encode: known calls are slot mapping, write" in capsys.readouterr().err
