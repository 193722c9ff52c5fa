"""A window is handed over as "how many to the left", W - 1, to a formula that subtracts one again.

Half of the libraries count the token itself as part of its window, the others do not; the two were
taken for each other: huggingface/transformers#29623. Read the other way round a window keeps one
key too many. Read this way a block is given back while its last token is still seen.
"""

SYMPTOM = "with a window of 4 and 4 tokens computed, 2 are out of reach instead of 1"
KILLED_BY = (
    "test_sliding_window.py::test_tokens_before_the_window_of_the_next[4-4-1]",
    "test_sliding_window.py::test_what_is_held_is_what_later_tokens_see",
    "test_random_manager.py::test_everybody_sees_their_own_tokens[sliding]",
)


def apply(stage):
    def get_num_skipped_tokens(self, num_computed_tokens):
        num_to_the_left = self.sliding_window - 1
        return max(0, num_computed_tokens - num_to_the_left + 1)

    stage.SlidingWindowManager.get_num_skipped_tokens = get_num_skipped_tokens
