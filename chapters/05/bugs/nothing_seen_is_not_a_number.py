"""The scores of a row are measured from its greatest one, also when it has none.

A tile that lies outside a row's window shows it no key. Its greatest score is then minus infinity,
and minus infinity minus itself is NaN: vllm-project/vllm#4405, where prefill over a cached prefix
was given its window.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "a row that sees no key in its first tile is NaN for ever after"
KILLED_BY = (
    "test_paged_attention.py::test_more_queries_than_keys[4-2]",
    "test_paged_attention.py::test_more_queries_than_keys[40-3]",
    "test_attention_numerics.py::test_rows_that_see_nothing_of_a_tile[splits-torch.float32]",
)


def apply(stage):
    rewrite(
        stage,
        "attend._walk",
        'base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max',
        "base = new_max",
    )
