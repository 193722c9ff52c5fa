"""How much memory the manager itself takes: not K and V, but what it knows about their blocks."""

import subprocess
import sys

import pytest

_PROGRAM = """
import torch
from pagedattn import manager

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

spec = manager.FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=1, dtype=torch.float32)
group = manager.KVCacheGroupSpec(("layer",), spec)
before = resident()
found = manager.KVCacheManager(
    manager.KVCacheConfig(1_000_000, (), (group,)),
    manager.Limits(max_model_len=999_999),
    enable_caching=False,
)
for number in range(3):
    assert found.allocate_slots(manager.Request(str(number), [7]), 333_333)
assert found.pool.num_free_blocks == 0
print((resident() - before) / 1e6)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_million_blocks() -> None:
    """All of them in tables: less than 400 MB, 400 bytes each."""
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    assert 50 < float(result.stdout) < 400
