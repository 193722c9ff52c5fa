"""What pages cannot do is refused, in words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedattn.course.witness import DEVICE
from pagedattn.hugging_face import paged_attention_forward

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")


def no_cache(model: Any, ids: Tensor, paged: Any) -> None:
    paged(model)
    model(ids)


def another_attention(model: Any, ids: Tensor, paged: Any) -> None:
    made = paged(model)
    model.set_attn_implementation("sdpa")
    model(ids, past_key_values=made)


def four_dimensions(model: Any, ids: Tensor, paged: Any) -> None:
    mask = torch.zeros(2, 1, 6, 6, device=DEVICE)
    model(ids, attention_mask=mask, past_key_values=paged(model))


def gradients(model: Any, ids: Tensor, paged: Any) -> None:
    model.requires_grad_(True)
    model(ids, past_key_values=paged(model))


def another_batch(model: Any, ids: Tensor, paged: Any) -> None:
    made = paged(model)
    model(ids, past_key_values=made)
    model(ids[:1], past_key_values=made)


def a_mask_without_its_beginning(model: Any, ids: Tensor, paged: Any) -> None:
    made = paged(model)
    model(ids, past_key_values=made)
    model(ids, attention_mask=torch.ones_like(ids), past_key_values=made)


def padding_that_is_forgotten(model: Any, ids: Tensor, paged: Any) -> None:
    made, mask = paged(model), torch.ones_like(ids)
    mask[0, :2] = 0
    model(ids, attention_mask=mask, past_key_values=made)
    model(ids, past_key_values=made)


def added_twice(model: Any, ids: Tensor, paged: Any) -> None:
    made = paged(model)
    made.add(ids)
    made.add(ids)


def another_type(model: Any, ids: Tensor, paged: Any) -> None:
    made = paged(model)
    model(ids, past_key_values=made)
    made.reset()
    model.double()(ids, past_key_values=made)


def cropped(model: Any, ids: Tensor, paged: Any) -> None:
    paged(model).crop(1)


def too_many_rows(model: Any, ids: Tensor, paged: Any) -> None:
    model(ids, past_key_values=paged(model, max_num_seqs=1))


def too_many_beams(model: Any, ids: Tensor, paged: Any) -> None:
    made = paged(model, max_num_seqs=3)
    model(ids, past_key_values=made)
    made.reorder_cache(torch.tensor([0, 0]))


def no_blocks(model: Any, ids: Tensor, paged: Any) -> None:
    paged(model, num_blocks=1)


def chunked_layers(model: Any, ids: Tensor, paged: Any) -> None:
    model.config.layer_types = ["chunked_attention"] * 3
    paged(model)


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (no_cache, "pass past_key_values=PagedCache"),
        (another_attention, "'sdpa', which cannot read pages"),
        (four_dimensions, r"\[2, 1, 6, 6\]; pages take \[batch, columns\]"),
        (gradients, "no gradients"),
        (another_batch, "a batch of 1 rows, and the cache holds 2"),
        (a_mask_without_its_beginning, r"is \[2, 6\]; it must be \[2, 12\]"),
        (padding_that_is_forgotten, "row 0: the attention mask shows 6 of .* stored 4"),
        (added_twice, r"holds 2 rows: reset\(\) it first"),
        (another_type, "torch.float64, the cache holds torch.float32"),
        (cropped, "cannot be cropped"),
        (too_many_rows, "2 rows; max_num_seqs is 1"),
        (too_many_beams, "2 rows continue 2: .* max_num_seqs is 3"),
        (no_blocks, "num_blocks is 1"),
        (chunked_layers, "chunked_attention"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused(
    model: Any, misuse: Callable[[Any, Tensor, Any], None], words: str, paged: Any, prompts: Any
) -> None:
    with pytest.raises(ValueError, match=words):
        misuse(model, prompts(6, 6)[0], paged)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"is_causal": False}, "not causal"),
        ({"dropout": 0.1}, "dropout is 0.1"),
        ({"s_aux": torch.ones(4)}, "s_aux"),
    ],
)
def test_attention_that_is_not_known_here(
    model: Any, arguments: dict[str, Any], words: str, paged: Any
) -> None:
    made = paged(model)
    module, heads = model.model.layers[0].self_attn, torch.ones(1, 4, 2, 8)
    k, v = made.update(torch.ones(1, 2, 2, 8), torch.ones(1, 2, 2, 8), 0)
    with pytest.raises(ValueError, match=words):
        paged_attention_forward(module, heads, k, v, None, **arguments)
    assert made.pages is None, "nothing was stored"


def test_a_mask_that_is_more_than_causal(model: Any, paged: Any, prompts: Any) -> None:
    masks = pytest.importorskip("transformers.masking_utils")
    paged(model)
    ids, _ = prompts(6)
    hidden = model.model.embed_tokens(ids)
    with pytest.raises(ValueError, match="not plain causal"):
        masks.create_bidirectional_mask(model.config, hidden, torch.ones_like(ids))
