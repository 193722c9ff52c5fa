"""A batch is given up, and the blocks that it had opened are never given back.

Aborting is the rare path: the client has gone, or a step failed. In the field, freeing a cancelled
request had to wait for a transfer to end, the message of its end could be missed, and each
cancelled request cost the pool its blocks for good: vllm-project/vllm#46283, and before it
vllm-project/vllm#32255.
"""

SYMPTOM = "every aborted batch makes the pool smaller"
KILLED_BY = (
    "test_reserve.py::test_abort_gives_back_all_blocks_of_the_batch",
    "test_reserve.py::test_abort_gives_back_the_last_block_first",
)


def apply(stage):
    def _abort(self, batch):
        for seq_id in batch.num_new_tokens:
            sequence = self.sequences[seq_id]
            del sequence.blocks[self._num_blocks(sequence.num_computed_tokens) :]
            self.block_table.add_row(self.block_ids(seq_id), sequence.row)

    stage.PagedKVCache._abort = _abort
