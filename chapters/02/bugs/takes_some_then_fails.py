"""A batch takes blocks for one sequence after the other, and keeps them when one cannot be served.

In the field, a request was split into several that share memory, one after the other, and nothing
checked beforehand whether all of them fit. When memory ran out half-way, what was taken stayed
taken and the server went down: huggingface/transformers#46117.
"""

SYMPTOM = "every refused batch leaves fewer free blocks behind"
KILLED_BY = (
    "test_reserve.py::test_reserve_is_all_or_nothing",
    "test_reserve.py::test_a_failed_reserve_leaves_everything_as_it_was",
)


def apply(stage):
    library_take = stage.PagedKVCache._take

    def _take(self, num_new_tokens):
        for seq_id, n in num_new_tokens.items():
            library_take(self, {seq_id: n})

    stage.PagedKVCache._take = _take
