"""What a request needs is counted without its hits.

A hit that no sequence uses waits in the free queue. It is no new block, and yet after the request
took it there is one free block less. "2 new blocks, 3 are free" lets in a request that then finds 1
block free: the early check that was proposed, and found wanting, in vllm-project/vllm#11562.
"""

SYMPTOM = "a request is admitted, and its first step finds the pool empty"
KILLED_BY = (
    "test_eviction.py::test_hits_that_are_free_count_as_needed",
    "test_eviction.py::test_need_is_what_add_and_reserve_take",
)


def apply(stage):
    library_need = stage.PagedKVCache.need

    def need(self, token_ids, n, **identity):
        num_computed_tokens, _ = library_need(self, token_ids, n, **identity)
        hits = num_computed_tokens // self.config.block_size
        return num_computed_tokens, self._num_blocks(num_computed_tokens + n) - hits

    stage.PagedKVCache.need = need
