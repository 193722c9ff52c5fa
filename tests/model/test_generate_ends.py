"""However ``generate`` ends, none of its sequences stays in the cache and no batch stays open.

The fixture ``cache`` looks at that after every test.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest

from pagedattn import contiguous, paged
from pagedattn.cache import KVCache, OutOfBlocks
from pagedattn.model import Llama, cache_config, complete, generate

Check = Callable[[KVCache], None]
PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]


def test_failed_add_frees_the_earlier_ones(model: Llama, cache: KVCache) -> None:
    with pytest.raises(ValueError, match="'A'"):
        list(generate(model, cache, [[1], [2]], max_new_tokens=2, seq_ids=["A", "A"]))


@pytest.mark.parametrize("build", [contiguous.build_cache, paged.build_cache])
def test_pool_too_small(
    model: Llama, build: Callable[..., KVCache], assert_untouched: Check
) -> None:
    """28 slots, 24 for each: the second slab is refused, pages run out while answering."""
    cache = build(cache_config(model.config, num_blocks=8, block_size=4, poison=True))
    with pytest.raises(OutOfBlocks):
        complete(model, cache, [[1] * 4, [2] * 4], max_new_tokens=20)
    assert_untouched(cache)


def test_other_sequences_are_left_alone(model: Llama, cache: KVCache) -> None:
    cache.add("guest", [1, 2, 3])
    complete(model, cache, [[1], [2]], max_new_tokens=3)
    assert cache.seq_ids == ["guest"]
    cache.free("guest")


def test_caller_stops_early(model: Llama, cache: KVCache, assert_untouched: Check) -> None:
    events = generate(model, cache, PROMPTS, max_new_tokens=4)
    next(events)
    next(events)
    assert cache.seq_ids
    events.close()  # type: ignore[attr-defined]
    assert_untouched(cache)
    generate(model, cache, PROMPTS, max_new_tokens=4)  # never iterated: nothing is held
    assert_untouched(cache)


def test_model_fails_in_the_middle(
    model: Llama, cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 1 raises in the third step, while a batch is open."""
    calls = 0
    forward = model.layers[1].forward

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("layer 1 fails")
        return forward(*args)

    monkeypatch.setattr(model.layers[1], "forward", failing)
    with pytest.raises(RuntimeError, match="layer 1 fails"):
        complete(model, cache, [[1, 2], [3]], max_new_tokens=9)
    assert calls == 3


def test_on_step_fails(model: Llama, cache: KVCache) -> None:
    def fail(batch: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(generate(model, cache, [[1]], max_new_tokens=3, on_step=fail))


def test_contents_that_were_never_computed_are_noticed(
    model: Llama, cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in the hidden states comes out as an error, not as token 0."""
    monkeypatch.setattr(model.norm, "eps", math.nan)
    with pytest.raises(ValueError, match="nan"):
        complete(model, cache, [[1, 2]], max_new_tokens=3)


@pytest.mark.parametrize("freed", [0, 1, 2])
def test_a_sequence_freed_in_on_step(model: Llama, cache: KVCache, freed: int) -> None:
    def free(batch: object) -> None:
        cache.free(freed)

    with pytest.raises(ValueError, match=f"unknown sequence {freed}"):
        list(generate(model, cache, PROMPTS, max_new_tokens=4, on_step=free))


@pytest.mark.parametrize("freed", [0, 1, 2])
def test_a_sequence_freed_between_two_tokens(model: Llama, cache: KVCache, freed: int) -> None:
    events = generate(model, cache, PROMPTS, max_new_tokens=4)
    next(events)
    cache.free(freed)
    with pytest.raises(ValueError, match=f"unknown sequence {freed}"):
        list(events)


@pytest.mark.parametrize("stop", [False, True])
def test_a_batch_opened_between_two_tokens(model: Llama, cache: KVCache, stop: bool) -> None:
    cache.add("guest", [1, 2])
    events = generate(model, cache, PROMPTS, max_new_tokens=4)
    next(events)
    cache.reserve({"guest": 1})
    if stop:
        events.close()  # type: ignore[attr-defined]
    else:
        with pytest.raises(ValueError, match="while a batch of \\['guest'\\] is open"):
            list(events)
    assert cache.open_batch is None and cache.seq_ids == ["guest"]
    cache.free("guest")


def test_a_batch_that_is_in_nobodys_way_stays_open(model: Llama, cache: KVCache) -> None:
    """After the last step, when all sequences are freed, the cache is the caller's again."""
    cache.add("guest", [1, 2])
    events = generate(model, cache, [[1], [2]], max_new_tokens=1)
    next(events)
    batch = cache.reserve({"guest": 1})
    assert [event.index for event in events] == [1]
    batch.abort()
    cache.free("guest")


def test_a_cache_that_cannot_free(
    model: Llama, cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence cannot be freed: the others are, and the first error comes out."""
    free = cache.free

    def failing(seq_id: Any) -> None:
        if seq_id == 1:
            raise LookupError("sequence 1 is stuck")
        free(seq_id)

    def fail(batch: object) -> None:
        raise RuntimeError("on_step fails")

    with monkeypatch.context() as patched:
        patched.setattr(cache, "free", failing)
        with pytest.raises(RuntimeError, match="on_step fails"):
            list(generate(model, cache, PROMPTS, max_new_tokens=4, on_step=fail))
        assert cache.seq_ids == [1]
        free(1)
        events = generate(model, cache, PROMPTS, max_new_tokens=4)
        next(events)
        with pytest.raises(LookupError, match="sequence 1 is stuck"):
            events.close()  # type: ignore[attr-defined]
        assert cache.seq_ids == [1]
    cache.free(1)
