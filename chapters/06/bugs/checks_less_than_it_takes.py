"""The check caps the need of a window, the allocation takes the whole prompt.

"Can allocate" says yes to a prompt of 6 blocks when 4 are free, because a window of 2 blocks never
holds more in the long run. Then the pool runs out: vllm-project/vllm#11168. The cap is right for
the question whether the request will fit in chunks, and for that question alone.
"""

SYMPTOM = "the need of 16 blocks is 5, and 16 are taken"
KILLED_BY = ("test_single_type.py::test_the_cap_counts_only_when_it_is_asked_for",)


def apply(stage):
    group = stage.SingleTypeKVCacheManager
    library_need = group.get_num_blocks_to_allocate

    def get_num_blocks_to_allocate(self, *request, apply_admission_cap=False):
        return library_need(self, *request, apply_admission_cap=True)

    group.get_num_blocks_to_allocate = get_num_blocks_to_allocate
