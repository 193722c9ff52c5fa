"""A fork copies the table and forgets the counts.

The first sharer to end frees the blocks, the second finds them free already: removing the child
failed because the count was 0. apache/tvm#16666.
"""

SYMPTOM = "the child's table names blocks that count one reference, the parent's"
KILLED_BY = (
    "test_fork.py::test_a_fork_takes_no_block",
    "test_fork.py::test_every_fork_counts",
    "test_copy_on_write.py::test_only_one_of_two_writes",
)


def apply(stage):
    library_fork = stage.PagedKVCache.fork

    def fork(self, parent, child):
        library_fork(self, parent, child)
        for block in self.sequences[child].blocks:
            block.ref_cnt -= 1

    stage.PagedKVCache.fork = fork
