"""Parent and child have one list of tokens between them.

Copying a sequence copies a reference to its list. The token that the child samples is then known to
the parent, too. In the field the supposed parent was no longer a prefix of its children:
vllm-project/vllm#1101.
"""

SYMPTOM = "a token appended to the child stands in the parent as well"
KILLED_BY = (
    "test_fork.py::test_tokens_of_the_child_are_its_own",
    "test_copy_on_write.py::test_two_that_diverge",
)


def apply(stage):
    library_fork = stage.PagedKVCache.fork

    def fork(self, parent, child):
        library_fork(self, parent, child)
        self.sequences[child].token_ids = self.sequences[parent].token_ids

    stage.PagedKVCache.fork = fork
