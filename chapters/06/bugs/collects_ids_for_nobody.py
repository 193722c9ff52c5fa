"""The ids of new blocks are noted in every model, and taken only where blocks must be cleared.

Nobody else asks for them, so the list grows by a number for each block ever given, for as long as
the server runs: 0.57 GiB in twelve hours, vllm-project/vllm#44175.
"""

SYMPTOM = "a list grows with every block, and nothing ever empties it"
KILLED_BY = ("test_single_type.py::test_ids_are_collected_only_when_somebody_asked",)


def apply(stage):
    group = stage.SingleTypeKVCacheManager
    library_init = group.__init__

    def __init__(self, *given, **options):
        library_init(self, *given, **options)
        self.new_block_ids = []

    group.__init__ = __init__
