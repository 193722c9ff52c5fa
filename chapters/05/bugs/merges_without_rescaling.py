"""Two parts are merged with the sums that each has measured from its own greatest score.

Sums measured from different places cannot be added: one of them has to be rescaled first. With
scores near 0 the places lie close together and little shows.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "a part with low scores weighs as much as one with high scores"
KILLED_BY = (
    "test_merge.py::test_three_parts_in_any_order",
    "test_merge.py::test_two_parts_are_the_whole",
)


def apply(stage):
    rewrite(
        stage,
        "merge._merge_kernel",
        "    weight_b = tl.exp(b - base)",
        "    weight_b = tl.exp(b - tl.where(b > minus_inf, b, 0.0))",
    )
