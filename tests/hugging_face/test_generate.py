"""Hugging Face's decoders on our pages give what they give with attention of their own.

Compared with ``attn_implementation="eager"`` and the cache of ``transformers``. Poison is on: K and
V that are read after their end are NaN.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedattn.course.witness import DEVICE
from pagedattn.hugging_face import PagedCache, cache

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")

DATA = Path(__file__).parents[1] / "data"
# Float32, logits of about 10 after three layers, sums in another order: 1e-5 is found.
TOLERANCE = 1e-4


def test_logits(family: str, make_model: Any, paged: Any, prompts: Any) -> None:
    """A batch of unequal prompts, all at once and in two steps; one row begins in the second."""
    model = make_model(family)
    ids, mask = prompts(11, 3, 8)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask, position_ids=positions).logits
    for cut in (11, 6):
        made, found = paged(model), []
        for columns in (slice(0, cut), slice(cut, 11)):
            if columns.start < 11:
                step = model(
                    ids[:, columns],
                    attention_mask=mask[:, : columns.stop],
                    position_ids=positions[:, columns],
                    past_key_values=made,
                )
                found.append(step.logits)
                made.pages.check_invariants()
        difference = (torch.cat(found, 1) - expected)[mask.bool()].abs().max()
        assert difference < TOLERANCE
        assert made.pages.usage().used == 11 + 3 + 8, "padding takes no slot"


def test_greedy_tokens(
    family: str, make_model: Any, paged: Any, prompts: Any, generate: Any
) -> None:
    model = make_model(family)
    ids, mask = prompts(9, 2, 6)
    expected = generate(model, ids, mask)
    made = paged(model)
    assert torch.equal(generate(model, ids, mask, past_key_values=made), expected)
    assert len({tuple(row[9:].tolist()) for row in expected}) == 3, "the prompts matter"
    made.pages.check_invariants()
    assert made.pages.usage().used == 9 + 2 + 6 + 3 * 9  # the last token is never computed


def test_the_window_matters(make_model: Any, prompts: Any, generate: Any) -> None:
    ids, mask = prompts(9, 2, 6)
    wide, narrow = (generate(make_model(f), ids, mask) for f in ("mistral", "mistral, a window"))
    assert not torch.equal(wide, narrow)


def test_on_kernels(
    monkeypatch: pytest.MonkeyPatch, make_model: Any, paged: Any, prompts: Any, generate: Any
) -> None:
    """Chapter 05's cache under the same class; without a GPU in the interpreter."""
    pytest.importorskip("triton")
    from pagedattn import kernels

    monkeypatch.setattr(cache, "build_pages", kernels.build_cache)
    model = make_model("qwen2, a window in two layers", num_hidden_layers=2)
    ids, mask = prompts(7, 3)
    expected = generate(model, ids, mask, max_new_tokens=3)
    made = paged(model)
    found = generate(model, ids, mask, max_new_tokens=3, past_key_values=made)
    assert type(made.pages) is kernels.PagedKVCache
    assert torch.equal(found, expected)


def test_a_model_from_a_folder(model: Any, tmp_path: Any, prompts: Any, generate: Any) -> None:
    ids, mask = prompts(5)
    expected = generate(model, ids, mask)
    model.save_pretrained(tmp_path)
    load = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained
    loaded = load(tmp_path, attn_implementation="pagedattn").to(DEVICE)
    made = PagedCache(loaded.config, num_blocks=20)
    assert torch.equal(generate(loaded, ids, mask, past_key_values=made), expected)


def test_a_cache_made_in_inference_mode_serves_outside(
    model: Any, paged: Any, prompts: Any
) -> None:
    ids, _ = prompts(6)
    made = paged(model)
    with torch.inference_mode():
        model(ids[:, :4], past_key_values=made)
    found = model(ids[:, 4:], past_key_values=made).logits
    model.set_attn_implementation("eager")
    assert (found - model(ids).logits[:, 4:]).abs().max() < TOLERANCE


@pytest.mark.slow
def test_the_real_model(monkeypatch: pytest.MonkeyPatch, paged: Any) -> None:
    """SmolLM2 as ``transformers`` reads it: the recorded answers, all prompts in one batch."""
    pytest.importorskip("accelerate")
    monkeypatch.syspath_prepend(str(DATA))
    recorder = __import__("record_transformers")
    monkeypatch.delitem(sys.modules, "record_transformers")
    recorded = json.loads((DATA / "transformers.json").read_text())["prompts"]
    model, _ = recorder.load_reference()
    model.to(DEVICE)
    made = paged(model, num_blocks=320)
    longest = max(len(prompt["token_ids"]) for prompt in recorded)
    padding = [longest - len(prompt["token_ids"]) for prompt in recorded]
    rows = [[0] * n + prompt["token_ids"] for n, prompt in zip(padding, recorded, strict=True)]
    ids = torch.tensor(rows, device=DEVICE)
    mask = torch.arange(longest, device=DEVICE) >= torch.tensor(padding, device=DEVICE)[:, None]
    found = model.generate(
        ids,
        attention_mask=mask.long(),
        past_key_values=made,
        max_new_tokens=recorder.NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    assert found[:, longest:].tolist() == [prompt["greedy"] for prompt in recorded]
