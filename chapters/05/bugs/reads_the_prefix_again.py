"""A row's own part begins at its first key, not behind what it shares.

The parts of a row must hold each key once: the shared prefix in one, the rest in the other. A key
that is in two of them weighs twice, and no merge can tell. The output is still a mean of values, so
nothing looks broken.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "what is shared counts twice against what is a row's own, and is read twice, too"
KILLED_BY = (
    "test_shared_groups.py::test_two_rows_of_three",
    "test_shared_groups.py::test_groups_within_groups",
)


def apply(stage):
    rewrite(
        stage,
        "plan._measure",
        "first = tl.load(own_begin + rows, mask=real, other=0)",
        "first = tl.zeros_like(seq_len)",
    )
