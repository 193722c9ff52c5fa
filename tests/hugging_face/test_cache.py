"""What a cache of pages does beside one call of ``generate``: turns, prefixes, beams, failures."""

from typing import Any

import pytest
import torch

from pagedattn.cache import OutOfBlocks
from pagedattn.course.witness import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")

TOLERANCE = 1e-4  # as in test_generate.py


def test_a_second_turn_computes_its_own_tokens_alone(
    model: Any, paged: Any, prompts: Any, generate: Any
) -> None:
    """The first answer and its prompt lie in the cache already."""
    ids, mask = prompts(7, 4)
    turn, _ = prompts(5, 5)
    first = generate(model, ids, mask)
    longer = torch.cat([first, turn], 1)
    long_mask = torch.cat([mask, torch.ones(2, 15, dtype=mask.dtype, device=DEVICE)], 1)
    second = generate(model, longer, long_mask)
    made = paged(model)
    assert torch.equal(generate(model, ids, mask, past_key_values=made), first)
    assert made.get_seq_length() == 7 + 9
    lengths = lengths_of_steps(model)
    assert torch.equal(generate(model, longer, long_mask, past_key_values=made), second)
    assert lengths == [22 - 16] + [1] * 9
    made.pages.check_invariants()


def lengths_of_steps(model: Any) -> list[int]:
    """Fills while the model runs: how many columns each step computes."""
    lengths: list[int] = []
    model.model.layers[0].register_forward_pre_hook(
        lambda layer, args, kwargs: lengths.append(
            (args or (kwargs["hidden_states"],))[0].shape[1]
        ),
        with_kwargs=True,
    )
    return lengths


@pytest.mark.parametrize(
    ("lengths", "shared", "spared"),
    [
        ([11], 11, 8),  # whole blocks of 4, and never the last token
        ([8], 8, 4),
        ([11], 5, 4),
        ([10, 10], 9, 8),
        ([10, 6], 9, 4),  # the second row begins with column 4, and finds nothing
        ([10, 7], 9, 0),  # with column 3, in the middle of a block
        ([11], 0, 0),
    ],
)
def test_prompts_that_are_known(
    model: Any,
    lengths: list[int],
    shared: int,
    spared: int,
    paged: Any,
    prompts: Any,
    generate: Any,
) -> None:
    """A prompt begins like one that was computed before (chapter 04): ``shared`` tokens."""
    known, known_mask = prompts(12)
    ids, mask = prompts(*lengths)
    ids[:, :shared] = known[:, :shared]
    ids = ids * mask
    expected = generate(model, ids, mask)
    made = paged(model)
    made.add(known)
    generate(model, known, known_mask, past_key_values=made)
    made.reset()
    assert made.pages.usage().used == 0
    assert made.add(ids, mask) == spared
    steps = lengths_of_steps(model)
    assert torch.equal(generate(model, ids, mask, past_key_values=made), expected)
    assert steps == [max(lengths) - spared] + [1] * 9
    made.pages.check_invariants()
    for seq_id in made.seq_ids:
        assert made.pages.num_tokens(seq_id) == made.pages.num_computed_tokens(seq_id)


def test_nobody_finds_tokens_that_the_cache_was_not_told(
    model: Any, paged: Any, prompts: Any, generate: Any
) -> None:
    """Neither the same prompt nor another, told or not: all is computed again."""
    ids, mask = prompts(12)
    other, _ = prompts(13)
    expected = generate(model, other[:, :12], mask)
    made = paged(model)
    generate(model, ids, mask, past_key_values=made)
    made.reset()
    assert torch.equal(generate(model, other[:, :12], mask, past_key_values=made), expected)
    made.reset()
    assert made.add(ids) == 0


def test_beam_search_forks(make_model: Any, paged: Any, prompts: Any, generate: Any) -> None:
    model = make_model("llama", initializer_range=0.2)  # scores near one another: beams change
    ids, mask = prompts(9, 4)
    greedy = generate(model, ids, mask)
    expected = generate(model, ids, mask, num_beams=3)
    assert not torch.equal(expected, greedy)
    made = paged(model)
    assert torch.equal(generate(model, ids, mask, num_beams=3, past_key_values=made), expected)
    made.pages.check_invariants()
    assert made.pages.num_copies > 0
    assert made.pages.usage().used < 3 * (9 + 4) + 6 * 9, "beams of one prompt share its blocks"


def test_rows_that_are_repeated_and_chosen(model: Any, paged: Any, prompts: Any) -> None:
    """The rows of a computed batch go on as others: each as the one that it continues."""
    ids, mask = prompts(6, 3)
    made = paged(model)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model(ids, attention_mask=mask, position_ids=positions, past_key_values=made)
    made.batch_repeat_interleave(2)  # rows 0 0 1 1
    assert made.pages.usage().used == 6 + 3, "nothing is copied yet"
    made.batch_select_indices(torch.tensor([3, 0, 1]))  # rows 1 0 0
    made.pages.check_invariants()
    rows, next_ids = [1, 0, 0], torch.tensor([[7], [8], [9]], device=DEVICE)
    grown = torch.cat([mask[rows], torch.ones_like(next_ids)], 1)
    positions = grown.sum(1, keepdim=True) - 1
    found = model(next_ids, attention_mask=grown, position_ids=positions, past_key_values=made)
    model.set_attn_implementation("eager")
    whole = torch.cat([ids[rows], next_ids], 1)
    all_positions = (grown.cumsum(1) - 1).clamp(min=0)
    expected = model(whole, attention_mask=grown, position_ids=all_positions).logits[:, -1]
    assert (found.logits[:, 0] - expected).abs().max() < TOLERANCE


def test_a_full_pool_and_what_comes_after(
    model: Any, paged: Any, prompts: Any, generate: Any
) -> None:
    ids, mask = prompts(9, 5)
    expected = generate(model, ids, mask)
    made = paged(model, num_blocks=8)
    with pytest.raises(OutOfBlocks):
        generate(model, ids, mask, past_key_values=made)
    made.reset()
    made.pages.check_invariants()
    assert made.pages.usage().reserved == 0
    short = generate(model, ids[:1], mask[:1], past_key_values=made)
    assert torch.equal(short, expected[:1])


def test_a_step_that_failed_is_forgotten(
    model: Any, paged: Any, prompts: Any, generate: Any
) -> None:
    ids, mask = prompts(6, 4)
    expected = generate(model, ids, mask)
    made = paged(model)

    def stop(*anything: Any) -> None:
        raise RuntimeError("somebody pressed a key")

    handle = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="a key"):
        generate(model, ids, mask, past_key_values=made)
    handle.remove()
    assert torch.equal(generate(model, ids, mask, past_key_values=made), expected)
    made.pages.check_invariants()
