"""Rows without a query count when rows with equal blocks are looked for.

A batch of fixed size has padding rows. Their tables are full of zeros, the null block, or still
those of sequences that have ended; their lengths are those of an earlier step. So they begin like
one another, and like rows that go on. What they "save" is counted, and a row gets a shared prefix
with nobody. Padding has no query, and nothing may be done for it. Padding rows that were taken for
real ones: vllm-project/vllm#42947.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "one program reads the prefix of a row for it and for a row that does not exist"
KILLED_BY = ("test_shared_groups.py::test_a_row_without_queries_makes_no_group",)


def apply(stage):
    rewrite(
        stage,
        "groups._all_see",
        "(queries > 0) & (queries <= DECODE_QUERIES)",
        "queries <= DECODE_QUERIES",
    )
