"""Holes that touch stay two holes.

After a while the free memory is all crumbs: everything has been given back, and yet no long
sequence fits. A restart cures it, for a while. OpenPPL/ppl.nn#234.
"""

from typing import Any

SYMPTOM = "take(12) is refused after three slabs of 4 have come back to an arena of 12"
KILLED_BY = (
    "test_arena.py::test_holes_that_touch_grow_together[4-2-holes1]",
    "test_arena.py::test_free_slots_in_pieces_serve_nobody_long",
)


def apply(stage: Any) -> None:
    give_back = stage.SlabArena.give_back

    def apart(self, start: int, size: int) -> None:
        holes = self.holes
        give_back(self, start, size)
        self.holes = sorted([*holes, (start, size)])

    stage.SlabArena.give_back = apart
