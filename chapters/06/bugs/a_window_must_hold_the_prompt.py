"""Before a prompt is let in, a group of windows must have room for all of it.

It never holds more than a window and a step. But the question scales with the prompt, so a long one
is never admitted, however empty the pool is: vllm-project/vllm#55800.
"""

SYMPTOM = "a prompt of 40 tokens waits for ever at 0 % usage"
KILLED_BY = (
    "test_allocate_slots.py::test_of_a_window_only_so_much_must_fit",
    "test_single_type.py::test_the_cap_counts_only_when_it_is_asked_for",
)


def apply(stage):
    group = stage.SlidingWindowManager
    library_init = group.__init__

    def __init__(self, *given, **options):
        library_init(self, *given, **options)
        self.max_admission_blocks = None

    group.__init__ = __init__
