"""A trace through a pool: who runs, what is reserved."""

import math
from dataclasses import astuple, dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn.traces import Metrics, Paged, Policy, Request, ReserveMax, replay

# Worked by hand.


def test_max_serves_two_at_a_time_in_nine_slots() -> None:
    # Three requests of 1 + 1 tokens, max_seq_len 4. Steps 0 and 1: two run, one waits; 2, 3: one.
    # used 2 4 1 2, reserved 8 8 4 4, saturated in the first two steps.
    assert replay([Request(1, 1)] * 3, ReserveMax(num_slots=9, max_seq_len=4)) == Metrics(
        num_steps=4,
        num_preemptions=0,
        peak_running=2,
        mean_used=9 / 4,
        mean_reserved=24 / 4,
        used_of_reserved=9 / 24,
        saturated_used_of_reserved=6 / 16,
        saturated_used_of_pool=6 / (9 * 2),
        saturated_mean_running=2.0,
    )


def test_the_older_request_takes_the_place_of_the_younger() -> None:
    # Two requests of 1 + 3 tokens, 4 blocks of one slot. In step 2 both have 2 tokens and the first
    # needs a block: the second loses its two. It comes back in step 4 with 2 tokens.
    # used = reserved 2 4 3 4 2 3 4, saturated in steps 2 and 3.
    assert replay([Request(1, 3)] * 2, Paged(num_slots=4, block_size=1)) == Metrics(
        num_steps=7,
        num_preemptions=1,
        peak_running=2,
        mean_used=22 / 7,
        mean_reserved=22 / 7,
        used_of_reserved=1.0,
        saturated_used_of_reserved=1.0,
        saturated_used_of_pool=7 / (4 * 2),
        saturated_mean_running=1.0,
    )


def test_the_youngest_request_gives_way_to_itself() -> None:
    # 1 + 2 and 2 + 1 tokens, 2 blocks of 2 slots (the fifth slot is no block). In step 1 only the
    # second needs a block, and nobody is younger. It comes back in step 3, when the first is done.
    # used 3 2 3 2 3, reserved 4 2 4 2 4, saturated in steps 1 and 2.
    requests = [Request(1, 2), Request(2, 1)]
    assert replay(requests, Paged(num_slots=5, block_size=2)) == Metrics(
        num_steps=5,
        num_preemptions=1,
        peak_running=2,
        mean_used=13 / 5,
        mean_reserved=16 / 5,
        used_of_reserved=13 / 16,
        saturated_used_of_reserved=5 / 6,
        saturated_used_of_pool=5 / (5 * 2),
        saturated_mean_running=1.0,
    )


def test_saturated_figures_are_nan_if_nobody_waits() -> None:
    metrics = replay([Request(3, 2)], Paged(num_slots=8, block_size=8))
    assert (metrics.num_steps, metrics.used_of_reserved) == (3, 12 / 24)
    assert math.isnan(metrics.saturated_used_of_reserved)
    assert math.isnan(metrics.saturated_used_of_pool)
    assert math.isnan(metrics.saturated_mean_running)


# Against the same model done the long way: every request is visited in every step.


@dataclass(eq=False)
class Member:
    num_tokens: int
    total_length: int
    num_blocks: int = 0


def step_by_step(
    requests: list[Request], num_slots: int, slab: int | None, block_size: int
) -> Metrics:
    """`slab` slots for each request, or blocks where it is None."""
    waiting = [Member(request.input_length, request.total_length) for request in requests]
    running: list[Member] = []
    free_blocks = num_slots // block_size
    num_preemptions = 0
    steps: list[tuple[int, int, int, bool]] = []
    while waiting or running:
        preempted = False
        for member in list(running):
            if member not in running:
                continue  # preempted by an older one in this step
            if slab is None and member.num_tokens % block_size == 0:
                while free_blocks == 0 and member in running:
                    victim = running.pop()
                    free_blocks += victim.num_blocks
                    victim.num_blocks = 0
                    waiting.insert(0, victim)
                    preempted = True
                    num_preemptions += 1
                if member not in running:
                    continue
                free_blocks -= 1
                member.num_blocks += 1
            member.num_tokens += 1
        while waiting and not preempted:
            if slab is not None:
                if len(running) == num_slots // slab:
                    break
            else:
                wanted = math.ceil(waiting[0].num_tokens / block_size)
                if wanted > free_blocks:
                    break
                free_blocks -= wanted
                waiting[0].num_blocks = wanted
            running.append(waiting.pop(0))
        used = sum(member.num_tokens for member in running)
        blocks = sum(member.num_blocks for member in running)
        reserved = blocks * block_size if slab is None else slab * len(running)
        steps.append((len(running), used, reserved, bool(waiting)))
        for member in list(running):
            if member.num_tokens == member.total_length:
                free_blocks += member.num_blocks
                running.remove(member)

    saturated = [step for step in steps if step[3]]

    def share(part: int, whole: int) -> float:
        return part / whole if whole else math.nan

    return Metrics(
        num_steps=len(steps),
        num_preemptions=num_preemptions,
        peak_running=max(step[0] for step in steps),
        mean_used=sum(step[1] for step in steps) / len(steps),
        mean_reserved=sum(step[2] for step in steps) / len(steps),
        used_of_reserved=sum(step[1] for step in steps) / sum(step[2] for step in steps),
        saturated_used_of_reserved=share(
            sum(step[1] for step in saturated), sum(step[2] for step in saturated)
        ),
        saturated_used_of_pool=share(
            sum(step[1] for step in saturated), num_slots * len(saturated)
        ),
        saturated_mean_running=share(sum(step[0] for step in saturated), len(saturated)),
    )


REQUESTS = st.lists(
    st.builds(Request, st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=25
)


def assert_equal(metrics: Metrics, expected: Metrics) -> None:
    """Both divide the same whole numbers, so nothing but nan needs care."""
    assert astuple(metrics) == pytest.approx(astuple(expected), rel=0, abs=0, nan_ok=True)


@settings(deadline=None, max_examples=300)
@given(REQUESTS, st.sampled_from([1, 3, 8, 16]), st.integers(0, 200))
def test_paged_equals_the_step_by_step_model(
    requests: list[Request], block_size: int, spare: int
) -> None:
    longest = max(request.total_length for request in requests)
    num_slots = math.ceil(longest / block_size) * block_size + spare
    metrics = replay(requests, Paged(num_slots, block_size))
    assert_equal(metrics, step_by_step(requests, num_slots, None, block_size))


@settings(deadline=None, max_examples=100)
@given(REQUESTS, st.integers(0, 20), st.integers(0, 300))
def test_max_equals_the_step_by_step_model(
    requests: list[Request], unused: int, spare: int
) -> None:
    slab = max(request.total_length for request in requests) + unused
    metrics = replay(requests, ReserveMax(slab + spare, slab))
    assert_equal(metrics, step_by_step(requests, slab + spare, slab, block_size=1))


@pytest.mark.parametrize("block_size", [1, 3, 8, 16])
def test_many_preemptions_equal_the_step_by_step_model(block_size: int) -> None:
    rng = np.random.default_rng(block_size)
    lengths = rng.integers(1, 60, size=(200, 2)).tolist()
    requests = [Request(prompt, output) for prompt, output in lengths]
    expected = step_by_step(requests, 400, None, block_size)
    assert expected.num_preemptions > 50
    assert_equal(replay(requests, Paged(400, block_size)), expected)


def test_a_policy_is_empty_again_after_a_run() -> None:
    policy = Paged(num_slots=40, block_size=3)
    requests = [Request(7, 20), Request(5, 30), Request(11, 4)]
    first = replay(requests, policy)
    assert first.num_preemptions > 0
    assert policy.reserved == 0
    assert replay(requests, policy) == first


# Bad input.


def test_policies_reject_a_pool_that_holds_nothing() -> None:
    with pytest.raises(ValueError, match="max_seq_len is 9, but must be from 1 to the pool's 8"):
        ReserveMax(num_slots=8, max_seq_len=9)
    with pytest.raises(ValueError, match="max_seq_len is 0, but must be from 1"):
        ReserveMax(num_slots=8, max_seq_len=0)
    with pytest.raises(ValueError, match="block_size is 9, but must be from 1 to the pool's 8"):
        Paged(num_slots=8, block_size=9)
    with pytest.raises(ValueError, match="block_size is 0, but must be from 1"):
        Paged(num_slots=8, block_size=0)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (ReserveMax(num_slots=80, max_seq_len=16), "has 17 tokens, but max_seq_len is 16"),
        (Paged(num_slots=23, block_size=8), "needs 3 blocks of 8, but the pool has 2"),
        (Paged(num_slots=16, block_size=1), "needs 17 blocks of 1, but the pool has 16"),
    ],
)
def test_replay_rejects_a_request_that_can_never_run(policy: Policy, message: str) -> None:
    with pytest.raises(ValueError, match=f"input_length=8, output_length=9.*{message}"):
        replay([Request(1, 1), Request(8, 9)], policy)
    assert policy.reserved == 0


def test_replay_rejects_an_empty_trace() -> None:
    with pytest.raises(ValueError, match="the trace is empty"):
        replay([], Paged(num_slots=16, block_size=8))
