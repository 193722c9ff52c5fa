"""What has left the window is cut off the table.

Everybody else still looks for position p at entry p // block_size, and finds the block of a later
position there: ohdearquant/lattice#292. A table that is shortened in front needs an offset that
all its readers know; null blocks need none.
"""

SYMPTOM = "after the first block has left, position 9 is looked up in the block of position 13"
KILLED_BY = (
    "test_single_type.py::test_what_left_the_window_is_freed_from_right_to_left",
    "test_sliding_window.py::test_what_is_held_is_what_later_tokens_see",
)


def apply(stage):
    group = stage.SingleTypeKVCacheManager
    library_remove_skipped_blocks = group.remove_skipped_blocks

    def remove_skipped_blocks(self, request_id, total_computed_tokens):
        library_remove_skipped_blocks(self, request_id, total_computed_tokens)
        table = self.req_to_blocks.get(request_id, [])
        table[:] = [block for block in table if not block.is_null]

    group.remove_skipped_blocks = remove_skipped_blocks
