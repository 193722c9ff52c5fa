"""The pages' ratio is rounded down, and nobody looks at the rest.

With 24,576 bytes beside 65,536 the ratio is 2, and the pages have 49,152 and 65,536 bytes. They
share a tensor all the same: page 1 of the one lies across pages 0 and 1 of the other. Nor is it
asked whether a page grows at all. The one of a state does not: vllm-project/vllm#43626.
"""

SYMPTOM = "two layers share a tensor and disagree about where page 1 begins"
KILLED_BY = (
    "test_groups.py::test_padding_makes_pages_equal",
    "test_groups.py::test_a_state_does_not_grow_with_its_block",
)


def apply(stage):
    def unify_page_sizes(specs):
        largest = max(spec.page_size_bytes for spec in specs.values())
        return {
            name: spec.copy_with_new_block_size(spec.block_size * (largest // spec.page_size_bytes))
            for name, spec in specs.items()
        }

    stage.groups.unify_page_sizes = stage.unify_page_sizes = unify_page_sizes
