"""Policies that know the lengths: exact, first fit, buddy, and pages with a promise."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn.cache import OutOfBlocks
from pagedattn.traces import BuddyArena, Request, policy_named, replay

# The same model the long way: slots are listed one by one, and nothing is remembered between steps
# but who holds which. A placement is the slots that a request holds; None says that it doesn't fit.

Place = Callable[[list[bool], int], "range | None"]


@dataclass(eq=False)
class Member:
    request: Request
    num_tokens: int
    slots: range


def step_by_step(requests: list[Request], num_slots: int, place: Place) -> tuple[float, ...]:
    """Steps, peak running, sum of used, sum of reserved, and the running requests of those steps
    in which somebody waits."""
    waiting = list(requests)
    running: list[Member] = []
    taken = [False] * num_slots
    steps = peak = used = reserved = saturated = 0
    while waiting or running:
        for member in running:
            member.num_tokens += 1
        while waiting:
            slots = place(taken, waiting[0].total_length)
            if slots is None:
                break
            for slot in slots:
                assert not taken[slot]
                taken[slot] = True
            running.append(Member(waiting[0], waiting.pop(0).input_length, slots))
        steps += 1
        peak = max(peak, len(running))
        used += sum(member.num_tokens for member in running)
        reserved += sum(taken)
        saturated += len(running) if waiting else 0
        for member in list(running):
            if member.num_tokens == member.request.total_length:
                running.remove(member)
                for slot in member.slots:
                    taken[slot] = False
    return steps, peak, used / reserved, saturated


def first_fit(taken: list[bool], size: int) -> range | None:
    for start in range(len(taken) - size + 1):
        if not any(taken[start : start + size]):
            return range(start, start + size)
    return None


def buddy(taken: list[bool], num_tokens: int) -> range | None:
    """Free slabs are the largest aligned pieces that are free as a whole: eager merging leaves no
    others."""
    wanted = 16
    while wanted < num_tokens:
        wanted *= 2
    roots, start = [], 0
    for size in (2**bit for bit in range(20, -1, -1)):
        if len(taken) & size:
            roots.append((start, size))
            start += size

    def is_free(start: int, size: int) -> bool:
        return not any(taken[start : start + size])

    size = wanted
    while size <= len(taken):
        for root, root_size in roots:
            for start in range(root, root + root_size - size + 1, size):
                parent = root + (start - root) // (2 * size) * (2 * size)
                if is_free(start, size) and (size == root_size or not is_free(parent, 2 * size)):
                    return range(start, start + wanted)
        size *= 2
    return None


LENGTHS = st.builds(Request, st.integers(1, 40), st.integers(1, 40))
REQUESTS = st.lists(LENGTHS, min_size=1, max_size=25)


@pytest.mark.parametrize(("name", "place"), [("exact_ff", first_fit), ("buddy", buddy)])
@settings(deadline=None, max_examples=100)
@given(requests=REQUESTS, num_slots=st.integers(128, 400))
def test_slabs_equal_the_step_by_step_model(
    name: str, place: Place, requests: list[Request], num_slots: int
) -> None:
    metrics = replay(requests, policy_named(name, num_slots, 80))
    steps, peak, share, saturated = step_by_step(requests, num_slots, place)
    assert (metrics.num_steps, metrics.peak_running) == (steps, peak)
    assert metrics.used_of_reserved == pytest.approx(share, rel=1e-12)
    assert math.isnan(metrics.saturated_mean_running) == (saturated == 0)
    assert metrics.num_preemptions == 0


# Whole-length limits need no placement: a request is a number, and the sum has a limit.


def sums(requests: list[Request], limit: int, size: Callable[[int], int]) -> list[list[Request]]:
    """The running requests, step by step, when their sizes at full length add up to `limit`."""
    waiting = list(requests)
    ends: list[tuple[Request, int]] = []
    steps: list[list[Request]] = []
    while waiting or ends:
        while waiting and limit >= sum(size(r.total_length) for r in [*dict(ends), waiting[0]]):
            ends.append((waiting[0], len(steps) + waiting.pop(0).output_length))
        steps.append([request for request, _ in ends])
        ends = [(request, end) for request, end in ends if end > len(steps) - 1]
    return steps


@settings(deadline=None, max_examples=100)
@given(
    st.lists(LENGTHS, min_size=1, max_size=25, unique=True),
    st.integers(96, 300),
    st.sampled_from([0, 1, 3, 8, 16]),
)
def test_limits_equal_sums(requests: list[Request], num_slots: int, block_size: int) -> None:
    """Block size 0 stands for `exact`."""
    name = f"pagedR{block_size}" if block_size else "exact"

    def blocks(num_tokens: int) -> int:
        return math.ceil(num_tokens / (block_size or 1))

    steps = sums(requests, num_slots // (block_size or 1), blocks)
    metrics = replay(requests, policy_named(name, num_slots, 80))
    assert metrics.num_steps == len(steps)
    assert metrics.peak_running == max(map(len, steps))
    assert metrics.num_preemptions == 0
    used = reserved = 0
    for request in requests:
        life = range(request.input_length, request.total_length + 1)
        used += sum(life)
        reserved += (
            sum(blocks(num_tokens) * block_size for num_tokens in life)
            if block_size
            else len(life) * request.total_length
        )
    assert metrics.used_of_reserved == pytest.approx(used / reserved, rel=1e-12)
    assert metrics.mean_reserved == pytest.approx(reserved / len(steps), rel=1e-12)


@pytest.mark.parametrize("name", ["exact", "exact_ff", "buddy", "pagedR3"])
def test_a_policy_is_empty_again_after_a_run(name: str) -> None:
    policy = policy_named(name, 80, 80)
    requests = [Request(7, 20), Request(5, 30), Request(11, 4), Request(40, 20)]
    first = replay(requests, policy)
    assert policy.reserved == 0
    assert replay(requests, policy) == first


# Worked by hand.


def test_exact_serves_what_first_fit_cannot_place() -> None:
    # Slots 0-2 are held in steps 0 to 2, slots 3-7 in steps 0 to 4, slots 8-9 in steps 0 and 1. The
    # last request wants 5 slots for 5 steps. From step 3 on 3 + 2 are free, from step 5 on all are.
    requests = [Request(1, 2), Request(1, 4), Request(1, 1), Request(1, 4)]
    assert replay(requests, policy_named("exact", 10, 10)).num_steps == 3 + 5
    assert replay(requests, policy_named("exact_ff", 10, 10)).num_steps == 5 + 5


def test_buddies_split_the_low_half_first_and_merge() -> None:
    arena = BuddyArena(16 + 64 + 5)  # slabs of 64 at 0 and of 16 at 64; 5 slots are of no use
    assert arena.take(10) == 64  # the smallest that holds 16
    assert arena.take(17) == 0  # 64 is cut into 0 and 32
    assert arena.take(16) == 32  # 32 is cut into 32 and 48
    assert arena.num_free_slots == 16
    with pytest.raises(OutOfBlocks, match="32 slots in one slab are needed; 16 are free"):
        arena.take(20)
    arena.give_back(0, 17)
    assert arena.take(12) == 48
    arena.give_back(32, 16)
    arena.give_back(48, 12)
    assert arena.take(64) == 0
    arena.give_back(0, 64)
    arena.give_back(64, 10)
    assert arena.free == {64: {0}, 32: set(), 16: {64}}


# Bad input.


def test_buddy_arena_rejects() -> None:
    with pytest.raises(ValueError, match="num_slots is 15, but must be at least 16"):
        BuddyArena(15)
    arena = BuddyArena(64)
    with pytest.raises(ValueError, match="a slab of 0 slots"):
        arena.take(0)
    assert (arena.take(16), arena.take(16)) == (0, 16)
    before = {size: set(starts) for size, starts in arena.free.items()}
    for start, num_slots, message in (
        (8, 16, "no slab of 16 slots starts at slot 8"),
        (64, 16, "no slab of 16 slots starts at slot 64"),
        (-16, 16, "no slab of 16 slots starts at slot -16"),
        (32, 16, "slots 32 .. 47: some are free already"),
        (0, 64, "slots 0 .. 63: some are free already"),
    ):
        with pytest.raises(ValueError, match=message):
            arena.give_back(start, num_slots)
    assert arena.free == before


@pytest.mark.parametrize("name", ["exact", "exact_ff", "buddy", "pagedR8"])
def test_a_request_that_can_never_run(name: str) -> None:
    policy = policy_named(name, 72, 72)
    with pytest.raises(ValueError, match=r"input_length=8, output_length=65.* needs "):
        replay([Request(1, 1), Request(8, 65)], policy)
    assert policy.reserved == 0


def test_buddy_names_its_largest_slab() -> None:
    # 72 slots hold 72 tokens, but the next power of two of 65 is 128.
    assert replay([Request(8, 64)], policy_named("exact_ff", 72, 72)).peak_running == 1
    with pytest.raises(ValueError, match="needs 128 slots, but gets at most 64 of the pool's 72"):
        replay([Request(8, 57)], policy_named("buddy", 72, 72))


@pytest.mark.parametrize("name", ["maxi", "paged", "paged0", "pagedR", "pagedR08", "paged-8", ""])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match=f"no policy '{name}'; known: max, exact, exact_ff, "):
        policy_named(name, 160, 80)


@pytest.mark.parametrize("name", ["max", "exact", "exact_ff", "buddy", "paged8", "pagedR8"])
def test_pools_that_hold_nothing(name: str) -> None:
    with pytest.raises(ValueError, match=r"is [08], but must be|arena of 0 slots"):
        policy_named(name, 0, 8)
