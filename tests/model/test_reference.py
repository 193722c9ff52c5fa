"""The decoder against ``transformers``, which reads the same GGUF file with code of its own."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedattn.attention import attention
from pagedattn.model import Llama, Tokenizer, complete

DATA = Path(__file__).parents[1] / "data"
RECORDED = json.loads((DATA / "transformers.json").read_text())
PROMPTS: list[dict[str, Any]] = RECORDED["prompts"]
EVERY = 64  # of the last row every 64th score was recorded
# float32 sums in another order: about 1e-4 on scores up to 40.
TOLERANCE = 1e-3


def no_cache(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


def logits_of(model: Llama, token_ids: list[int]) -> Tensor:
    hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)), no_cache)
    return model.compute_logits(hidden)


def test_the_recorded_prompts_are_those_asked_for() -> None:
    lengths = sorted(len(prompt["token_ids"]) for prompt in PROMPTS)
    assert (len(lengths), lengths[0], lengths[-1]) == (8, 5, 300)
    assert all(len(prompt["greedy"]) == 64 for prompt in PROMPTS)


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: f"{len(p['token_ids'])} tokens")
def test_logits_equal_transformers(
    real_model: tuple[Llama, Tokenizer], prompt: dict[str, Any]
) -> None:
    logits = logits_of(real_model[0], prompt["token_ids"])
    last_row = torch.tensor(prompt["last_row"])
    logsumexp = torch.tensor(prompt["logsumexp"], dtype=torch.float64)
    assert logits[-1, ::EVERY].shape == last_row.shape
    assert (logits[-1, ::EVERY] - last_row).abs().max() < TOLERANCE
    assert (logits.double().logsumexp(-1) - logsumexp).abs().max() < TOLERANCE


def test_greedy_tokens_equal_transformers(
    real_model: tuple[Llama, Tokenizer], paged_cache_for: Any
) -> None:
    """All prompts in one batch on the paged cache; transformers had each alone."""
    model, _ = real_model
    prompts = [prompt["token_ids"] for prompt in PROMPTS]
    cache = paged_cache_for(model, num_blocks=100, max_seq_len=512)
    answers = complete(model, cache, prompts, max_new_tokens=64)
    assert answers == [prompt["greedy"] for prompt in PROMPTS]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: f"{len(p['token_ids'])} tokens")
def test_tokens_of_a_text_equal_transformers(
    real_model: tuple[Llama, Tokenizer], prompt: dict[str, Any]
) -> None:
    _, tokenizer = real_model
    assert tokenizer.encode(prompt["text"]) == prompt["token_ids"]
    decoded = tokenizer.decode(prompt["token_ids"], skip_special_tokens=False)
    assert decoded == prompt["text"]


@pytest.mark.slow
def test_logits_equal_transformers_live(
    real_model: tuple[Llama, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All scores of all positions, and the records are what transformers answers today."""
    pytest.importorskip("accelerate")
    monkeypatch.syspath_prepend(str(DATA))
    recorder = __import__("record_transformers")
    monkeypatch.delitem(sys.modules, "record_transformers")
    assert [prompt["text"] for prompt in PROMPTS] == recorder.PROMPTS
    reference, _ = recorder.load_reference()
    for prompt in PROMPTS:
        token_ids = prompt["token_ids"]
        with torch.inference_mode():
            theirs = reference(torch.tensor([token_ids])).logits[0]
        assert (logits_of(real_model[0], token_ids) - theirs).abs().max() < TOLERANCE
        assert recorder.answer(reference, token_ids)["greedy"] == prompt["greedy"]
