"""Without a GPU the kernels are interpreted, and nobody has to do anything for it."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here"),
]

# Merging takes exp, log and a kernel of Triton's own, tl.cdiv, which is made when triton is.
USE = """
import torch, triton, triton.language as tl
from pagedattn.kernels import merge_attention_states

@triton.jit
def total(x, out, SIZE: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, SIZE))) + tl.cdiv(SIZE, 3))

out = torch.zeros(1)
total[(1,)](torch.arange(8.0), out, SIZE=8)
a, b = torch.full((1, 1, 2), 3.0), torch.full((1, 1, 2), 5.0)
merged, lse = merge_attention_states(a, torch.zeros(1, 1), b, torch.zeros(1, 1))
print(out.item(), merged.flatten().tolist(), round(lse.item(), 4))
"""
EXPECTED = "31.0 [4.0, 4.0] 0.6931"  # 0 + … + 7 = 28, and 3 thirds of 8; half and half; log 2


@pytest.mark.parametrize(
    "first", ["import pagedattn.kernels", "import torch, torch._inductor.utils, triton"]
)
def test_whatever_was_imported_first(first: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", f"{first}\n{USE}"], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == EXPECTED, done.stderr
