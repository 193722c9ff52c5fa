"""Block b is said to begin at kernel block b, not at b * r.

The first blocks of a pool look right, and block 0 is. Every other block lies in the pages of blocks
before it. Whether a table holds the manager's blocks or the kernel's is not to be seen from its
numbers, and a reader that takes the one for the other is wrong silently:
vllm-project/vllm#27753.
"""

import numpy as np

SYMPTOM = "blocks 5 and 6 share two of their three kernel blocks"
KILLED_BY = (
    "test_kernel_blocks.py::test_no_slot_moves",
    "test_block_table.py::test_rows_in_kernel_blocks",
)


def apply(stage):
    def map_to_kernel_blocks(block_ids, blocks_per_kv_block):
        parts = np.arange(blocks_per_kv_block, dtype=np.int64)
        return (np.asarray(block_ids, dtype=np.int64)[:, None] + parts).ravel()

    stage.map_to_kernel_blocks = stage.block_table.map_to_kernel_blocks = map_to_kernel_blocks
