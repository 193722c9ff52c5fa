"""Kernels without a GPU: Triton's interpreter runs them in Python, on tensors of the CPU.

Triton decides at each ``@triton.jit`` whether a kernel is to be interpreted, by the environment
variable ``TRITON_INTERPRET``. Its own functions, ``tl.sum`` say, are such kernels too, so for them
the decision falls when ``triton`` is imported.
"""

from __future__ import annotations

import importlib
import os

import torch


def interpret_without_gpu() -> None:
    """Kernels that are defined after this call are interpreted where there is no GPU.

    ``TRITON_INTERPRET=0`` in the environment forbids it: then kernels can be compiled, not run.
    """
    if torch.cuda.is_available():
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import triton  # not above: it looks at the variable

    somebody_was_first = isinstance(triton.language.cdiv, triton.JITFunction)
    if triton.knobs.runtime.interpret and somebody_was_first:
        # Define its functions again, and last the module that names them all.
        for name in ("standard", "random"):
            importlib.reload(importlib.import_module(f"triton.language.{name}"))
        importlib.reload(triton.language)
