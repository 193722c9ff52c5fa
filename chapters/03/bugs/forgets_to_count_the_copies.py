"""Whether a batch fits is judged by its new blocks alone.

Copies need blocks too. The first of them are made, then the pool is empty, and the refused batch
leaves the tables changed. Nothing checked beforehand whether a fork fits:
huggingface/transformers#46117.
"""

SYMPTOM = "a refused batch has changed counts and tables"
KILLED_BY = (
    "test_copy_on_write.py::test_copies_and_new_blocks_are_counted_together",
    "test_copy_on_write.py::test_copies_count_as_needed_blocks",
)


def apply(stage):
    def _take(self, num_new_tokens):
        sharers = [seq_id for seq_id in num_new_tokens if self._shares_what_it_writes(seq_id)]
        for seq_id, block in self._blocks_to_copy(sharers).items():
            self._copy_before_write({seq_id: block})
        super(stage.PagedKVCache, self)._take(num_new_tokens)

    stage.PagedKVCache._take = _take
