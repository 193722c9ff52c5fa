"""Block 0 pads every block table, and some sequence owns it.

In the field, a pool built for growing memory took its null block from an allocator that another
thread had used first, so another block became the null block and block 0 went to a request. All
else treats 0 as "nothing here": layers skipped that request's state, and its answers were garbage:
ovg-project/kvcached#398.
"""

SYMPTOM = "the first sequence gets block 0, the padding of every table row"
KILLED_BY = (
    "test_pool.py::test_all_blocks_but_block_0_can_be_used",
    "test_reserve.py::test_blocks_are_taken_in_the_order_of_the_batch",
)


def apply(stage):
    library_init = stage.BlockPool.__init__

    def __init__(self, num_blocks):
        library_init(self, num_blocks)
        self.free_queue.appendleft(self.null_block)

    stage.BlockPool.__init__ = __init__
