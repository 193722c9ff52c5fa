"""A sharer gives its reference back first and asks for a block of its own then.

When all sharers write, the last of them frees the source before its contents are copied. A free
block is dead: it may be overwritten, or handed out at once as the destination of another copy. In
the field freed blocks were recycled while a request still had them in its table:
sgl-project/mini-sglang#142.
"""

SYMPTOM = "the copies hold what stands in a block after it was freed"
KILLED_BY = (
    "test_copy_on_write.py::test_two_that_diverge",
    "test_copy_on_write.py::test_a_pool_that_holds_exactly_the_copies",
)


def apply(stage):
    def _blocks_to_copy(self, sharers):
        return {seq_id: self.sequences[seq_id].blocks[-1] for seq_id in sharers}

    def _take(self, num_new_tokens):
        sharers = [seq_id for seq_id in num_new_tokens if self._shares_what_it_writes(seq_id)]
        self._copy_before_write(self._blocks_to_copy(sharers))
        super(stage.PagedKVCache, self)._take(num_new_tokens)

    def _copy_before_write(self, shared):
        for seq_id, source in shared.items():
            self._release([source])
            (copy,) = self.pool.get_new_blocks(1)
            for cache in (self.k_cache, self.v_cache):
                cache[:, copy.block_id] = cache[:, source.block_id]
            sequence = self.sequences[seq_id]
            sequence.blocks[-1] = copy
            self.block_table.add_row(self.block_ids(seq_id), sequence.row)
            self.num_copies += 1

    stage.PagedKVCache._take = _take
    stage.PagedKVCache._blocks_to_copy = _blocks_to_copy
    stage.PagedKVCache._copy_before_write = _copy_before_write
