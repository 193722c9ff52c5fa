"""The blocks of a sequence that ends go back in the order of its tokens.

Nothing is wrong with an answer. But the queue hands out the longest free block first, so the
beginning of the sequence is overwritten before its end, and once prefixes are kept (chapter 04) an
end without its beginning is worth nothing. In the field, blocks of one request were released with
the same age, the first was often the next victim, and the hit rate fell at random:
llm-d/llm-d-inference-sim#704.
"""

SYMPTOM = "the first block of a sequence that has ended is overwritten before its last"
KILLED_BY = (
    "test_growth.py::test_free_gives_back_the_last_block_first",
    "test_reserve.py::test_abort_gives_back_the_last_block_first",
)


def apply(stage):
    library_release = stage.PagedKVCache._release

    def _release(self, blocks):
        library_release(self, blocks[::-1])

    stage.PagedKVCache._release = _release
