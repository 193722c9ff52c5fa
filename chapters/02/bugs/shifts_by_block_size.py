"""Position and block are told apart by shifting bits, which is right for powers of two only.

A shift is cheaper than a division, and 16 and 32 are powers of two. In the field, models that mix
attention with state layers made the block size 544, and the addressing was wrong:
vllm-project/vllm#31380. Other readers of the block size had to be taught the same:
vllm-project/vllm#41339, vllm-project/vllm#38502.
"""

import torch

SYMPTOM = "with block size 544, position 1000 lies at offset 488 of block 1 instead of 456"
KILLED_BY = ("test_slot_mapping.py::test_block_size_544",)


def apply(stage):
    def compute_slot_mapping(block_table, query_start_loc, positions, block_size):
        shift = block_size.bit_length() - 1  # log2 of a power of two
        rows = torch.arange(len(block_table), device=positions.device)
        rows = rows.repeat_interleave(query_start_loc.diff())
        real = positions[: len(rows)]
        block_ids = block_table[rows, real >> shift].to(torch.int64)
        slot_mapping = torch.full_like(positions, -1)
        slot_mapping[: len(rows)] = block_ids * block_size + (real & ((1 << shift) - 1))
        return slot_mapping

    stage.compute_slot_mapping = compute_slot_mapping
