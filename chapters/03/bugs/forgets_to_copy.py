"""A sequence writes into a block that others still read.

The count is there, but nobody asks for it before writing. As long as the sharers' tokens are equal,
nothing shows; with the first token in which they differ the last writer wins, and the others go on
with its token as if it were theirs. The same happens one level up when children share an object
that one of them goes on to change: vllm-project/vllm#1101.
"""

SYMPTOM = "two samples of one prompt: one answer leaks into the other"
KILLED_BY = (
    "test_copy_on_write.py::test_two_that_diverge",
    "test_copy_on_write.py::test_only_one_of_two_writes",
)


def apply(stage):
    def _blocks_to_copy(self, sharers):
        return {}

    stage.PagedKVCache._blocks_to_copy = _blocks_to_copy
