"""Slot -1, "not to be stored", is wrapped round to the last slot of the pool.

Padding of a fixed-size batch carries slot -1. Python's division sends it to the last slot of the
last block, which belongs to somebody: vllm-project/vllm#43810.
"""

SYMPTOM = "padding overwrites the last real slot of the cache"
KILLED_BY = (
    "test_write_kv.py::test_more_tokens_than_one_program_has",
    "test_write_kv.py::test_padding_may_hold_anything",
)


def apply(stage):
    library_write_kv = stage.write_kv

    def write_kv(k_cache, v_cache, k, v, slot_mapping, **scales):
        num_slots = k_cache.shape[0] * k_cache.shape[1]
        library_write_kv(k_cache, v_cache, k, v, slot_mapping % num_slots, **scales)

    stage.write_kv = stage.cache.write_kv = write_kv
