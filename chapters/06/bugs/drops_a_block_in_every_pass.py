"""A kind with an EAGLE draft model drops a block whenever it is asked.

It is asked again in each pass, up to the length so far, and drops one more: two passes cost two
blocks, and a hit can melt away to nothing: vllm-project/vllm#32802.
"""

SYMPTOM = "40 tokens are in the cache of three kinds, and 28 are found instead of 36"
KILLED_BY = (
    "test_hybrid_hits.py::test_eagle_drops_once_for_a_candidate",
    "test_hybrid_hits.py::test_eagle_does_not_drop_again_after_a_drop",
)


def apply(stage):
    coordinator = stage.HybridCoordinator
    library_find = coordinator._find

    def _find(self, kind, block_hashes, max_length, *, drop_eagle_block):
        drop = kind.drops_eagle_block
        return library_find(self, kind, block_hashes, max_length, drop_eagle_block=drop)

    coordinator._find = _find
