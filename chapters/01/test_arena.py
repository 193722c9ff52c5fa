"""Tasks 1.2 and 1.3: the arena that slabs are cut from."""

import re
from types import ModuleType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagedattn.cache import OutOfBlocks

# Task 1.2: cutting slabs.


def test_take_from_an_empty_arena(stage: ModuleType) -> None:
    """Slabs are cut from the front, one after another."""
    arena = stage.SlabArena(20)
    starts = [arena.take(size) for size in (5, 3, 12)]
    assert starts == [0, 5, 8], f"the slabs start at {starts}, expected [0, 5, 8]"
    assert arena.holes == [], f"the arena is full, but its holes are {arena.holes}"
    assert arena.num_free_slots == 0


@pytest.mark.parametrize(
    "size, start, holes",
    [
        (1, 2, [(3, 3), (10, 8), (30, 20)]),
        (3, 2, [(5, 1), (10, 8), (30, 20)]),
        (4, 2, [(10, 8), (30, 20)]),  # an exact fit leaves no hole of size 0
        (6, 10, [(2, 4), (16, 2), (30, 20)]),
        (8, 10, [(2, 4), (30, 20)]),
        (9, 30, [(2, 4), (10, 8), (39, 11)]),
    ],
)
def test_take_is_first_fit(
    stage: ModuleType, size: int, start: int, holes: list[tuple[int, int]]
) -> None:
    """The first hole that is large enough, not the best one."""
    arena = stage.SlabArena(50)
    arena.holes = [(2, 4), (10, 8), (30, 20)]
    found = arena.take(size)
    assert found == start, f"take({size}) gave a slab at {found}, expected {start}"
    assert arena.holes == holes, f"after take({size}) the holes are {arena.holes}"


def test_take_refuses_what_lies_in_no_piece(stage: ModuleType) -> None:
    """External fragmentation: 12 slots are free, and 6 side by side are not to be had."""
    arena = stage.SlabArena(24)
    arena.holes = [(0, 4), (10, 5), (20, 3)]
    with pytest.raises(OutOfBlocks) as refused:
        arena.take(6)
    assert (refused.value.needed, refused.value.free) == (6, 12)
    for number in ("6", "12", "5"):
        assert re.search(rf"\b{number}\b", str(refused.value)), (
            f"the message should name what is needed (6), what is free (12) and the largest "
            f"piece (5): {refused.value}"
        )
    assert arena.holes == [(0, 4), (10, 5), (20, 3)], f"a refusal changed the holes: {arena.holes}"


def test_take_refuses_when_full(stage: ModuleType) -> None:
    arena = stage.SlabArena(4)
    arena.take(4)
    with pytest.raises(OutOfBlocks) as refused:
        arena.take(1)
    assert (refused.value.needed, refused.value.free) == (1, 0)


@pytest.mark.parametrize("num_slots", [0, -1])
def test_an_arena_has_slots(stage: ModuleType, num_slots: int) -> None:
    with pytest.raises(ValueError, match=f"an arena of {num_slots} slots"):
        stage.SlabArena(num_slots)


@pytest.mark.parametrize("size", [0, -3])
def test_take_refuses_an_empty_slab(stage: ModuleType, size: int) -> None:
    arena = stage.SlabArena(8)
    with pytest.raises(ValueError):
        arena.take(size)
    assert arena.holes == [(0, 8)], f"a refusal changed the holes: {arena.holes}"


# Task 1.3: giving slabs back.


@pytest.mark.parametrize(
    "start, size, holes",
    [
        (6, 2, [(2, 2), (6, 2), (10, 2)]),  # touches no hole
        (4, 2, [(2, 4), (10, 2)]),  # the hole below grows
        (7, 3, [(2, 2), (7, 5)]),  # the hole above grows
        (4, 6, [(2, 10)]),  # both grow together
        (0, 2, [(0, 4), (10, 2)]),
        (12, 4, [(2, 2), (10, 6)]),
    ],
)
def test_holes_that_touch_grow_together(
    stage: ModuleType, start: int, size: int, holes: list[tuple[int, int]]
) -> None:
    arena = stage.SlabArena(16)
    arena.holes = [(2, 2), (10, 2)]
    arena.give_back(start, size)
    assert arena.holes == holes, (
        f"holes (2, 2) and (10, 2), and {size} slots given back at {start}: "
        f"now {arena.holes}, expected {holes}"
    )


def test_free_slots_in_pieces_serve_nobody_long(stage: ModuleType) -> None:
    """Three slabs of 4. The outer two end: 8 slots are free, but not side by side."""
    arena = stage.SlabArena(12)
    first, middle, last = (arena.take(4) for _ in range(3))
    arena.give_back(first, 4)
    arena.give_back(last, 4)
    assert arena.num_free_slots == 8
    with pytest.raises(OutOfBlocks) as refused:
        arena.take(8)
    assert (refused.value.needed, refused.value.free) == (8, 8)
    arena.give_back(middle, 4)
    try:
        start = arena.take(12)
    except OutOfBlocks as error:
        pytest.fail(f"all 12 slots were given back, and yet: {error}; holes {arena.holes}")
    assert start == 0


@pytest.mark.parametrize(
    "start, size",
    [
        (4, 4),  # the whole slab, for the second time
        (3, 2),  # its first slot
        (7, 3),  # its last slot
        (2, 10),  # all around it
        (5, 1),  # inside it
    ],
)
def test_a_slab_comes_back_once(stage: ModuleType, start: int, size: int) -> None:
    """Slots 4 .. 7 are free. Nothing that has one of them can be given back."""
    arena = stage.SlabArena(16)
    for _ in range(4):
        arena.take(4)
    arena.give_back(4, 4)
    with pytest.raises(ValueError):
        arena.give_back(start, size)
    assert arena.holes == [(4, 4)], f"a refusal changed the holes: {arena.holes}"


@pytest.mark.parametrize("start, size", [(14, 3), (16, 1), (-1, 2), (9, 0)])
def test_a_slab_lies_in_the_arena(stage: ModuleType, start: int, size: int) -> None:
    arena = stage.SlabArena(16)
    arena.take(16)
    with pytest.raises(ValueError):
        arena.give_back(start, size)
    assert arena.holes == [], f"a refusal changed the holes: {arena.holes}"


class ArenaSchedule(RuleBasedStateMachine):
    """The arena beside a row of 24 booleans, in which a free piece is looked for slot by slot."""

    def __init__(self, stage: ModuleType) -> None:
        super().__init__()
        self.arena = stage.SlabArena(24)
        self.free = [True] * 24
        self.slabs: list[tuple[int, int]] = []

    @rule(size=st.integers(1, 10))
    def take(self, size: int) -> None:
        fits = [i for i in range(25 - size) if all(self.free[i : i + size])]
        try:
            start = self.arena.take(size)
        except OutOfBlocks:
            assert not fits, f"{size} slots from {fits[0]} on are free, but take({size}) refused"
            return
        assert fits, f"no {size} slots side by side are free, but take({size}) gave {start}"
        assert start == fits[0], f"take({size}) gave {start}, the first fit is {fits[0]}"
        self.free[start : start + size] = [False] * size
        self.slabs.append((start, size))

    @precondition(lambda self: self.slabs)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        start, size = data.draw(st.sampled_from(self.slabs))
        self.slabs.remove((start, size))
        self.arena.give_back(start, size)
        self.free[start : start + size] = [True] * size

    @invariant()
    def holes_are_the_free_pieces(self) -> None:
        edges = [i for i in range(25) if (i < 24 and self.free[i]) != (i > 0 and self.free[i - 1])]
        pieces = [(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        assert self.arena.holes == pieces, f"holes {self.arena.holes}, free pieces {pieces}"
        assert self.arena.num_free_slots == sum(self.free)


def test_any_schedule_of_the_arena(stage: ModuleType) -> None:
    run_state_machine_as_test(
        lambda: ArenaSchedule(stage),  # type: ignore[arg-type]
        settings=settings(max_examples=60, stateful_step_count=25),
    )
