"""A row moves, and what its new place held before stays behind it.

When a sequence ends, the last row of the table fills its place. In the field the move copied only
the row's own entries: the former owner's ids stayed in the columns behind them. A reader of whole
rows took them for the sequence's own and wrote a prompt's K and V into another user's blocks. The
first token came out right, the rest did not: tenstorrent/vllm-tt-plugin#103.
"""

SYMPTOM = "the table row of a short sequence ends in the blocks of a long one that has left"
KILLED_BY = (
    "test_block_table.py::test_a_moved_row_leaks_nothing",
    "test_growth.py::test_rows_close_up_when_a_sequence_leaves",
)


def apply(stage):
    def move_row(self, source, target):
        num_blocks = self.num_blocks[source]
        self.table[target, :num_blocks] = self.table[source, :num_blocks]
        self.num_blocks[target] = num_blocks

    stage.BlockTable.move_row = move_row
