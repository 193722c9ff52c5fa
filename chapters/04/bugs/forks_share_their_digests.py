"""Parent and child have one list of digests between them.

Whoever fills its next block first adds a digest to the list. The other finds its own block hashed
already, and registers it under the digest of a block with other tokens. Children that shared an
object with their parent went wrong in vllm-project/vllm#1101.
"""

SYMPTOM = "the answer of one sample is found under the tokens of another"
KILLED_BY = (
    "test_prefix_cache.py::test_parent_and_child_register_their_own[9]",
    "test_prefix_cache.py::test_a_copy_never_has_a_digest",
)


def apply(stage):
    library_fork = stage.PagedKVCache.fork

    def fork(self, parent, child):
        library_fork(self, parent, child)
        self.sequences[child].block_hashes = self.sequences[parent].block_hashes

    stage.PagedKVCache.fork = fork
