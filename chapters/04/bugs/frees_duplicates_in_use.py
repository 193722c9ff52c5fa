"""Two equal prompts were computed side by side; the second one's blocks are freed as superfluous.

They are superfluous in the map. The sequence's table names them still, and reads them until it
ends. In the field a request read blocks that belonged to somebody else by then:
sgl-project/mini-sglang#142.
"""

SYMPTOM = "two equal prompts in one step: the second answer goes on with a stranger's tokens"
KILLED_BY = ("test_prefix_cache.py::test_equal_prompts_in_one_step",)


def apply(stage):
    library_commit = stage.PagedKVCache._commit

    def _commit(self, batch):
        library_commit(self, batch)
        for seq_id in batch.num_new_tokens:
            for block in self.sequences[seq_id].blocks:
                digest = block.block_hash
                if digest and self.pool.get_cached_block(digest) is not block and block.ref_cnt:
                    self.pool.free_blocks([block])

    stage.PagedKVCache._commit = _commit
