# Chapter 05, given: pagedattn/kernels/compiled.py; the tasks stand in the files beside it.
#   pytest chapters/05 --student                all its tests on this folder
#   pytest chapters/05 --student --task 5.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 453639468b626c3df0aa93b6b10412d3b17e6c7d0b600783e6e7832f41bb0c45

"""Every kernel compiled for an H200, on any machine: its registers, its spills, its shared memory.

A spill is a number that found no register: the program keeps it in memory and fetches it again. A
kernel that spills is slow, and nothing else tells.

Compilation needs no GPU. The public functions are called on tensors of torch's "meta" device, which
have shapes and no numbers, and each launch is compiled as it would be for the real call: so what
is compiled is what runs. A function that waited for the device would fail here, for there is no
number to wait for.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget

from .launches import LAUNCHES

_H200 = GPUTarget("cuda", 90, 32)
# Warps with different work begin in one program: its number is kept on the stack for those that are
# woken later, and read once.
KEPT = 8
_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class _AbsentGPU:
    """What Triton asks of a driver in order to compile."""

    def get_current_target(self) -> GPUTarget:
        return _H200

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Resources:
    """What one launch takes: registers a thread, bytes of a thread's stack (spills among them) and
    of its local memory, bytes of shared memory a program."""

    call: str
    kernel: str
    registers: int
    stack: int
    local: int
    shared: int
    num_warps: int

    @property
    def spills(self) -> bool:
        return self.stack > KEPT or self.local > 0


def compile_launches(call: Callable[[], object], name: str) -> list[Resources]:
    """The kernels that ``call`` would launch, in order, compiled for an H200.

    Raises ValueError when kernels are interpreted: then there is nothing to compile.
    """
    if triton.knobs.runtime.interpret:
        raise ValueError("kernels are interpreted here; TRITON_INTERPRET=0 lets them be compiled")
    kernels: list[Any] = []
    with _compiling_into(kernels):
        call()
    return [_resources(name, kernel) for kernel in kernels]


@contextmanager
def _compiling_into(kernels: list[Any]) -> Iterator[None]:
    """Inside, a launch compiles its kernel, adds it to the list, and does not run it."""
    run = triton.JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(run(kernel, *args, grid=grid, warmup=True, **kwargs))

    with patch.object(triton.JITFunction, "run", compile_only):
        triton.runtime.driver.set_active(_AbsentGPU())
        try:
            yield
        finally:
            triton.runtime.driver.set_active(None)  # the next launch looks for one


def _resources(call: str, kernel: Any) -> Resources:
    with TemporaryDirectory() as scratch:
        cubin = Path(scratch) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run(
            [_BIN / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
    numbers = {word: int(number) for word, number in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    return Resources(
        call,
        kernel.metadata.name,
        registers=numbers["REG"],
        stack=numbers["STACK"],
        local=numbers["LOCAL"],
        shared=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
    )


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--only", metavar="WORD", default="", help="calls with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")


def run(args: Namespace) -> int:
    """`pagedattn compile`: the table. Returns 1 if a kernel spills.

    A process of its own does it: in this one kernels may be interpreted. Raises ValueError when no
    call has such a name.
    """
    if not any(args.only in name for name in LAUNCHES):
        raise ValueError(f"--only {args.only}: known calls are {', '.join(LAUNCHES)}")
    options = [f"--only={args.only}", *([f"--json={args.json}"] if args.json else [])]
    return subprocess.run(
        [sys.executable, "-m", __name__, *options], env=os.environ | {"TRITON_INTERPRET": "0"}
    ).returncode


def _compile_all(args: Namespace) -> int:
    names = [name for name in LAUNCHES if args.only in name]
    found = [kernel for name in names for kernel in compile_launches(LAUNCHES[name], name)]
    versions = {"triton": triton.__version__, "target": "sm_90"}
    if args.json:
        rows = [asdict(kernel) | {"spills": kernel.spills} for kernel in found]
        args.json.write_text(json.dumps(versions | {"kernels": rows}, indent=1) + "\n")
    _print(found, f"triton {triton.__version__}, sm_90; spilled and shared in bytes")
    return int(any(kernel.spills for kernel in found))


def _print(found: list[Resources], title: str) -> None:
    table = Table(title=title)
    table.add_column("call")
    table.add_column("kernel")
    for heading in ("warps", "registers", "spilled", "shared"):
        table.add_column(heading, justify="right")
    for kernel in found:
        numbers = kernel.num_warps, kernel.registers, kernel.stack + kernel.local, kernel.shared
        short = kernel.kernel.removeprefix("_").removesuffix("_kernel")
        table.add_row(kernel.call, short, *map(str, numbers))
    Console().print(table)


if __name__ == "__main__":
    parser = ArgumentParser()
    add_arguments(parser)
    sys.exit(_compile_all(parser.parse_args()))
