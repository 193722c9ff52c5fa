"""A page that is smaller than the largest is filled up, not given more tokens.

All pages are equal then, and everything works. But a layer with an eighth of the heads wastes seven
eighths of each of its pages. Padding is for pages that cannot grow with their block:
local-inference-lab/vllm#509.
"""

from dataclasses import replace

SYMPTOM = "a block of 16 tokens takes a page in which 128 would fit"
KILLED_BY = (
    "test_groups.py::test_smaller_pages_get_more_tokens",
    "test_groups.py::test_layers_alike_after_unification_share_a_group",
)


def apply(stage):
    def unify_page_sizes(specs):
        largest = max(spec.page_size_bytes for spec in specs.values())
        return {name: replace(spec, page_size_padded=largest) for name, spec in specs.items()}

    stage.groups.unify_page_sizes = stage.unify_page_sizes = unify_page_sizes
