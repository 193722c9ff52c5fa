"""The keys of a row are rounded up to whole tiles.

Behind a row's last block its table still names blocks of whoever had the row before. Their tokens
are hidden by the causal mask, but their values are loaded: a freed block may hold anything,
tenstorrent/vllm-tt-plugin#103.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "a row reads blocks that it does not own any more"
KILLED_BY = (
    "test_paged_attention.py::test_the_end_of_the_table_is_not_read[decode]",
    "test_plan.py::test_every_pair_once",
)


def apply(stage):
    rewrite(
        stage,
        "plan._plan_kernel",
        "        keys_to = tl.minimum(keys_from + length, seq_len)",
        "        keys_to = keys_from + length",
    )
