"""A token that is the first of its row is taken for the last of the row before.

The kernel looks for a token's row among the rows' first tokens. "Before" in place of "at or before"
is enough: every decode of a batch then stores its K and V in another sequence's block.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "the first token of every row is stored through the table of the row before"
KILLED_BY = (
    "test_slot_mapping.py::test_agrees_with_a_loop_over_many_programs[1-counts1]",
    "test_slot_mapping.py::test_agrees_with_a_loop_over_many_programs[16-counts2]",
    "test_slot_mapping.py::test_every_number_of_rows",
)


def apply(stage):
    rewrite(stage, "slot_mapping._slot_mapping_kernel", "other=0) <= tokens", "other=0) < tokens")
