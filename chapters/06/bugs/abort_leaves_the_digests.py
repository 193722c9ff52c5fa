"""A request that leaves before its step has run is freed like any other.

Freed blocks can be found. These were registered when slots were given, and nobody computes them
now, so the next request with this prompt reads what the memory held before:
huggingface/text-generation-inference#2489; for states, vllm-project/vllm#56525.
"""

SYMPTOM = "a prompt that was never computed is found"
KILLED_BY = (
    "test_abort.py::test_what_was_registered_in_the_step_is_forgotten",
    "test_abort.py::test_what_was_registered_before_stays",
)


def apply(stage):
    def abort(self, request):
        self.free(request)
        return []

    stage.KVCacheManager.abort = abort
