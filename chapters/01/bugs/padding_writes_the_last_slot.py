"""Padding overwrites the last slot of the cache.

A batch that is padded to a fixed size gives its padding the slot -1, "none". An index of -1 means
the last element, so without a mask every padding token is stored in the last slot, which may belong
to somebody. vllm-project/vllm#43810.
"""

from typing import Any

SYMPTOM = "a batch of 3 tokens and 2 of padding writes slots 0, 1, 2 and the last one"
KILLED_BY = ("test_slabs.py::test_padding_is_not_stored",)


def apply(stage: Any) -> None:
    attend = stage.ContiguousKVCache._attend

    def _attend(self, batch, layer, q, k, v):
        self.k_cache[layer, batch.slot_mapping] = k
        self.v_cache[layer, batch.slot_mapping] = v
        return attend(self, batch, layer, q, k, v)

    stage.ContiguousKVCache._attend = _attend
