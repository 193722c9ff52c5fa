"""The rows of the block table are taken by place in the batch instead of by sequence.

As long as the batch is sequence 0, 1, 2, … the two are the same. In the field one table was
gathered by request and another by place, so the answers were garbage as soon as the requests of a
batch were not the first ones in order: meta-pytorch/attention-gym#189.

To see it: three prompts, one of which ends early. Its row is taken over by the last sequence, and
from then on the others write into and read from each other's blocks, in the middle of a sentence.
"""

SYMPTOM = "after one of several answers has ended, the others use each other's memory"
KILLED_BY = (
    "test_paged_cache.py::test_a_sequence_reads_its_own_blocks_whatever_its_place_in_the_batch",
    "test_paged_cache.py::test_a_sequence_goes_on_when_another_has_left",
)


def apply(stage):
    def _address(self, seq_ids, query_start_loc, positions):
        block_size = self.config.block_size
        width = int(positions.max()) // block_size + 1
        table = self.block_table.table[: len(seq_ids), :width].to(positions.device)
        return table, stage.compute_slot_mapping(table, query_start_loc, positions, block_size)

    stage.PagedKVCache._address = _address
