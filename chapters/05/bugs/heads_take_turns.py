"""Query head h reads KV head h modulo their number, not h divided by the group.

Weights of a model are laid out group by group: the first heads share the first KV head. Both rules
agree where every head has its own KV head, and where there is only one.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "with 4 query heads and 2 KV heads, heads 1 and 2 read each other's keys"
KILLED_BY = (
    "test_paged_attention.py::test_groups[9-3-torch.float32]",
    "test_paged_attention.py::test_groups[10-2-torch.float32]",
)


def apply(stage):
    rewrite(
        stage,
        "attend.attend_kernel",
        "heads = kv_head * GROUP + rows % GROUP",
        "heads = kv_head + rows % GROUP * tl.num_programs(0)",
    )
