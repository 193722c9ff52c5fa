"""The aborted request's digests are forgotten; who hit its blocks in the same step goes on.

Its table names blocks that nobody computes, and it counts their tokens as computed. The hole moved
from the map to a table: huggingface/text-generation-inference#2489, with two requests in one step.
"""

SYMPTOM = "b shares 12 tokens with a, a is aborted, and b reads what nobody wrote"
KILLED_BY = (
    "test_abort.py::test_who_hit_it_must_start_anew",
    "test_abort.py::test_and_who_hit_theirs",
)


def apply(stage):
    def abort(self, request):
        void = self.pool.registered_in_step.pop(request.request_id, [])
        self.free(request)
        self.evict_blocks(block.block_id for block in void)
        return []

    stage.KVCacheManager.abort = abort
