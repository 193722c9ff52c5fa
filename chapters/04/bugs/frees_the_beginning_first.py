"""The blocks of a chain are freed so that its beginning is evicted first.

Whoever frees says the order, last block first; here it is turned round once more. The next request
then takes the first block of a finished prompt, and all the others, still there, can't be found:
nobody gets past a missing first block. In the field the blocks of a request had one age, and which
of them went first was chance: llm-d/llm-d-inference-sim#704.
"""

SYMPTOM = "one block is evicted, and a prompt of three blocks hits none instead of two"
KILLED_BY = (
    "test_pool_cache.py::test_the_end_of_a_chain_is_evicted_first",
    "test_pool_cache.py::test_freed_last_evicted_last",
    "test_pool_cache.py::test_a_hit_renews_what_it_found_and_nothing_else",
)


def apply(stage):
    free_blocks = stage.BlockPool.free_blocks
    stage.BlockPool.free_blocks = lambda self, blocks: free_blocks(self, list(blocks)[::-1])
