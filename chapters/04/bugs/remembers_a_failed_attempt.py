"""A request that does not fit keeps the hit that was found for it, and uses it the next time.

Until then the blocks may have gone to somebody else. A free block is not held by anybody, so what
was found in it must be looked up again. In the field the number of cached tokens was remembered
from an attempt that had failed: vllm-project/vllm#18957.
"""

SYMPTOM = "a request that had to wait for memory begins with a stranger's tokens"
KILLED_BY = ("test_eviction.py::test_the_hit_of_a_failed_attempt_is_forgotten",)


def apply(stage):
    library_find = stage.PagedKVCache._find_hits

    def _find_hits(self, sequence):
        hits = library_find(self, sequence)
        found = self.__dict__.setdefault("found", {})
        return list(found.setdefault(tuple(sequence.token_ids), hits))

    stage.PagedKVCache._find_hits = _find_hits
