"""Slot -1 means "do not store", and a token is stored in the last slot of the last block.

Batches of a fixed size are filled up with padding tokens whose slot is -1. In the field the write
divided the slot by the block size: floor division makes -1 the last slot of block -1, and indexing
from the end finds it. Whoever owned the last block lost a token: vllm-project/vllm#43810.
"""

SYMPTOM = "every padded batch overwrites the last slot of the last block"
KILLED_BY = (
    "test_slot_mapping.py::test_slot_minus_one_is_never_written",
    "test_slot_mapping.py::test_a_batch_of_padding_writes_nothing",
)


def apply(stage):
    def write_kv(k_cache, v_cache, k, v, slot_mapping):
        block_size = k_cache.shape[1]
        k_cache[slot_mapping // block_size, slot_mapping % block_size] = k
        v_cache[slot_mapping // block_size, slot_mapping % block_size] = v

    stage.write_kv = write_kv
