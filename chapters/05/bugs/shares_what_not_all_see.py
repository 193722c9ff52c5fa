"""Keys count as common up to a row's length, not up to its first query.

Who reads a shared prefix masks nothing: every query sees every key of it. That holds only for keys
before the first new token. If a row has several (a draft that is checked), those after the first
are hidden from it, and twins have even these in common. The field's first shared prefixes left the
new tokens out for this reason: vllm-project/vllm#11635.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "the first of a row's new tokens attends to the later ones"
KILLED_BY = (
    "test_shared_groups.py::test_what_all_queries_see",
    "test_shared_groups.py::test_twins_with_two_queries",
)


def apply(stage):
    rewrite(
        stage,
        "groups._all_see",
        "mask=real, other=0) - queries",
        "mask=real, other=0)",
    )
