"""A block id times the block size is computed in 32 bits, and large slots become negative.

Block ids are stored as 32-bit numbers. In the field a kernel multiplied them with the size of a
block before it widened the result. All went well until a machine had enough memory: then the high
blocks gave garbage, or the kernel died: vllm-project/vllm#1486, and again, in another kernel,
vllm-project/vllm#47671.
"""

import torch

SYMPTOM = "slots past 2147483647 wrap round to negative numbers"
KILLED_BY = ("test_slot_mapping.py::test_slots_do_not_fit_into_32_bits",)


def apply(stage):
    library_mapping = stage.compute_slot_mapping

    def compute_slot_mapping(block_table, query_start_loc, positions, block_size):
        slots = library_mapping(block_table, query_start_loc, positions, block_size)
        return slots.to(torch.int32).to(torch.int64)

    stage.compute_slot_mapping = compute_slot_mapping
