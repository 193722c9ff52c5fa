"""Sequences are looked up in the order of their arrival, not in that of the batch.

One of the tables of a batch was gathered by request, another was not. As long as the running
requests happen to be 0, 1, 2, … in this order, both are the same. meta-pytorch/attention-gym#189.
"""

from typing import Any

SYMPTOM = "sequences decoded in the order s3, s4, s1 read and write each other's slabs"
KILLED_BY = (
    "test_slabs.py::test_slots_of_a_batch",
    "test_verbs.py::test_a_batch_in_another_order",
)


def apply(stage: Any) -> None:
    address = stage.ContiguousKVCache._address

    def _address(self, seq_ids, query_start_loc, positions):
        by_age = [seq_id for seq_id in self.seq_ids if seq_id in seq_ids]
        return address(self, by_age, query_start_loc, positions)

    stage.ContiguousKVCache._address = _address
