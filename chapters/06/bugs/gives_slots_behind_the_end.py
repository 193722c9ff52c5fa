"""Slots for drafts are given behind the greatest length.

Near its end a request gets a block more than its row in the block table has room for. That the
token behind the last one needs a place, or must not get one, is where tables and captured buffers
break: GeeeekExplorer/nano-vllm#258.
"""

SYMPTOM = "at most 10 tokens are allowed, and a request has slots for 16"
KILLED_BY = (
    "test_allocate_slots.py::test_no_slot_behind_the_longest_length[7-9-3]",
    "test_allocate_slots.py::test_no_slot_behind_the_longest_length[9-9-3]",
)


def apply(stage):
    manager = stage.KVCacheManager
    library_init = manager.__init__

    def __init__(self, *given, **options):
        library_init(self, *given, **options)
        self.max_model_len = 2**31

    manager.__init__ = __init__
