"""The copy is made, but the row of the block table still names the old block.

The list of blocks and the table that the attention reads are two records of one thing. In the field
a request's blocks were exchanged and its table went on pointing at the old ones:
sgl-project/mini-sglang#142.
"""

SYMPTOM = "a copy is paid for, and the shared block is written all the same"
KILLED_BY = (
    "test_copy_on_write.py::test_the_batch_writes_into_the_copies",
    "test_copy_on_write.py::test_two_that_diverge",
)


def apply(stage):
    library_copy = stage.PagedKVCache._copy_before_write

    def _copy_before_write(self, shared):
        rows = {seq_id: self.block_ids(seq_id) for seq_id in shared}
        library_copy(self, shared)
        for seq_id, block_ids in rows.items():
            self.block_table.add_row(block_ids, self.sequences[seq_id].row)

    stage.PagedKVCache._copy_before_write = _copy_before_write
