"""A release list names a block twice, and the block goes onto the free queue twice.

In the field, a sequence with a sliding window recycled one of its own blocks, so its table named
that block in two places. Freeing the sequence lowered the count once for each place, and each time
the block was put on the free list. The pool then held more free blocks than exist, and much later
two sequences got the same block: vllm-project/vllm#42571.
"""

SYMPTOM = "5 blocks are free in a pool of 4"
KILLED_BY = (
    "test_pool.py::test_a_block_named_twice_in_one_call",
    "test_pool.py::test_a_block_freed_in_two_calls",
)


def apply(stage):
    def free_blocks(self, blocks):
        blocks = list(blocks)
        for block in blocks:
            block.ref_cnt -= 1
            self.free_queue.append(block)
        return blocks

    stage.BlockPool.free_blocks = free_blocks
