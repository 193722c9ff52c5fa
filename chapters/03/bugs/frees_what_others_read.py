"""The first sharer that ends frees the blocks of all.

`free_blocks` of a pool without sharing: whatever is given back is free. The block is handed out
again while other tables name it, and late in its answer a sequence reads the tokens of somebody
else: sgl-project/mini-sglang#142.
"""

SYMPTOM = "one sample ends early, and the others go on with a stranger's tokens"
KILLED_BY = (
    "test_counts.py::test_a_shared_block_is_free_after_its_last_reference",
    "test_counts.py::test_only_contents_that_nobody_reads_are_dead",
    "test_fork.py::test_the_last_to_go_frees_the_blocks[ABC]",
)


def apply(stage):
    def free_blocks(self, blocks):
        blocks = list(blocks)
        self._check_release(blocks)
        dead = list(dict.fromkeys(blocks))
        for block in dead:
            block.ref_cnt = 0
        self.free_queue.extend(dead)
        return dead

    stage.BlockPool.free_blocks = free_blocks
