"""Every sharer that writes gets a copy, the last one too.

The answers are right. But the block that nobody names any more was copied once too often, and a
pool that holds exactly what is needed refuses. Counting with the counts of before, and not letting
them fall from one sharer to the next, asks for k blocks where k - 1 do. Whether a fork fits has to
be known before it begins: huggingface/transformers#46117.
"""

SYMPTOM = "four beams, prompt of 1030 tokens: 4 copies instead of 3"
KILLED_BY = (
    "test_copy_on_write.py::test_the_last_sharer_writes_in_place",
    "test_copy_on_write.py::test_four_beams_after_one_token[partly filled]",
    "test_copy_on_write.py::test_copies_count_as_needed_blocks",
)


def apply(stage):
    def _blocks_to_copy(self, sharers):
        return {seq_id: self.sequences[seq_id].blocks[-1] for seq_id in sharers}

    stage.PagedKVCache._blocks_to_copy = _blocks_to_copy
