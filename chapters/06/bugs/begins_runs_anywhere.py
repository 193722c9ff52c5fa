"""The search for a window's run does not ask where a hit may end. The hit is cut afterwards.

Then the run that was found is not the run that is left. With blocks 3 and 4 in the cache and hits
of two blocks, five blocks are found and four remain, of which only the last is there, and the
window needs two. The search was written for groups of one block size, where every block's end will
do; groups of several sizes came later: vllm-project/vllm#29143.
"""

SYMPTOM = "a hit of 16 tokens whose window has one block instead of two"
KILLED_BY = (
    "test_sliding_window.py::test_a_hit_ends_at_the_alignment[cached1-6-False-hit1]",
    "test_sliding_window.py::test_a_run_is_found_if_and_only_if_there_is_one[8]",
    "test_hybrid_hits.py::test_a_window_ends_where_the_larger_block_ends",
)


def apply(stage):
    library_find = stage.SlidingWindowManager.find_longest_cache_hit.__func__

    @classmethod
    def find_longest_cache_hit(cls, *where, alignment_tokens, **options):
        block_size = where[-1].block_size
        hits = library_find(cls, *where, alignment_tokens=block_size, **options)
        length = len(hits[0]) - len(hits[0]) % (alignment_tokens // block_size)
        return tuple(blocks[:length] for blocks in hits)

    stage.SlidingWindowManager.find_longest_cache_hit = find_longest_cache_hit
