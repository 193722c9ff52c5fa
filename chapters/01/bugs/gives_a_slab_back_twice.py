"""A slab that is given back twice is free twice.

Nobody looks whether the slots are free already, so the list of holes says that there is more memory
than exists, and later two sequences are given the same slots. What breaks is far from the mistake.
vllm-project/vllm#42571.
"""

from typing import Any

SYMPTOM = "a slab that comes back twice is given to two sequences"
KILLED_BY = ("test_arena.py::test_a_slab_comes_back_once",)


def apply(stage: Any) -> None:
    def give_back(self, start: int, size: int) -> None:
        if size < 1 or start < 0 or start + size > self.num_slots:
            last = start + size - 1
            raise ValueError(f"slots {start} .. {last} of an arena with {self.num_slots} slots")
        self.holes = sorted([*self.holes, (start, size)])

    stage.SlabArena.give_back = give_back
