"""Every number of a GGUF file arrives in its place."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedattn.attention import attention
from pagedattn.bench.generate import to_transformers
from pagedattn.model import Llama, load_model
from pagedattn.model.gguf_checkpoint import undo_interleave
from pagedattn.model.gguf_file import GGUFFile

LAYERS = 2
PARTS = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"]
PARTS += ["ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]


def logits_of(model: Llama, token_ids: Tensor) -> Tensor:
    def no_cache(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v)

    return model.compute_logits(model(token_ids, torch.arange(len(token_ids)), no_cache))


def test_every_weight_arrives(tiny_file: Any) -> None:
    weights = tiny_file.weights
    model, _ = load_model(tiny_file.write())
    expected = {"embed_tokens": weights["token_embd.weight"], "norm": weights["output_norm.weight"]}
    if "output.weight" in weights:
        expected["lm_head"] = weights["output.weight"]
    for layer in range(LAYERS):
        of = {part: weights[f"blk.{layer}.{part}.weight"] for part in PARTS}
        joined = {
            "self_attn.qkv_proj": [of["attn_q"], of["attn_k"], of["attn_v"]],
            "self_attn.o_proj": [of["attn_output"]],
            "mlp.gate_up_proj": [of["ffn_gate"], of["ffn_up"]],
            "mlp.down_proj": [of["ffn_down"]],
            "input_layernorm": [of["attn_norm"]],
            "post_attention_layernorm": [of["ffn_norm"]],
        }
        expected |= {f"layers.{layer}.{name}": np.concatenate(v) for name, v in joined.items()}
    state = model.state_dict()
    assert state.keys() == {f"{name}.weight" for name in expected}
    for name, weight in expected.items():
        assert np.array_equal(state[f"{name}.weight"].numpy(), weight), name


@pytest.mark.parametrize("num_heads", [8, 2])
def test_undo_interleave_is_exact(interleave: Callable[..., Any], num_heads: int) -> None:
    """The head count matters: 8 for q, 2 for k (huggingface/transformers#31766)."""
    weight = np.random.default_rng(1).normal(size=(num_heads * 4, 32))
    stored = torch.from_numpy(interleave(weight, num_heads))
    assert np.array_equal(undo_interleave(stored, num_heads).numpy(), weight)
    if num_heads == 2:
        assert not np.array_equal(undo_interleave(stored, 4).numpy(), weight)


def test_forward_equals_transformers(tiny_file: Any) -> None:
    """``transformers`` gets the original q and k, the decoder gets them through the file."""
    model, _ = load_model(tiny_file.write())
    reference = to_transformers(model)
    for layer in range(LAYERS):
        for name in ("q", "k"):
            weight = torch.from_numpy(tiny_file.weights[f"blk.{layer}.attn_{name}.weight"])
            parameter = reference.get_parameter(
                f"model.layers.{layer}.self_attn.{name}_proj.weight"
            )
            parameter.data = weight
    token_ids = torch.randint(98, (40,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = reference(token_ids[None]).logits[0]
    # float32, scores up to 30: sums in another order differ by some 1e-5.
    assert (logits_of(model, token_ids) - expected).abs().max() < 2e-4


def test_quantised_embedding(tiny_file: Any) -> None:
    """Blocks of 32 numbers: a float16 scale, then 32 signed bytes (vllm-project/vllm#30424)."""
    path = tiny_file.write(quantised=("token_embd.weight",))
    model, _ = load_model(path)
    stored = GGUFFile(path).tensors["token_embd.weight"].data[5].tobytes()
    scale = np.frombuffer(stored[:2], np.float16)[0].astype(np.float32)
    row = torch.from_numpy(np.frombuffer(stored[2:], np.int8).astype(np.float32) * scale)
    assert torch.equal(model.embed_tokens.weight[5], row)
    original = torch.from_numpy(tiny_file.weights["token_embd.weight"][5])
    assert 0 < (row - original).abs().max() <= scale
    if model.config.tie_word_embeddings:
        hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(model.compute_logits(hidden)[:, 5], hidden @ row)


def test_llama3_factors_divide_the_rotary_frequencies(untied_file: Any) -> None:
    """Factors of 1 change nothing; pair 1 divided by 8 turns as with theta times 64."""
    token_ids = torch.arange(20)
    plain, _ = load_model(untied_file.write())
    other, _ = load_model(untied_file.write({"llama.rope.freq_base": 64000.0}))
    untied_file.tensors["rope_freqs.weight"] = np.array([1, 1], np.float32)
    ones, _ = load_model(untied_file.write())
    untied_file.tensors["rope_freqs.weight"] = np.array([1, 8], np.float32)
    slow, _ = load_model(untied_file.write())
    assert torch.equal(logits_of(plain, token_ids), logits_of(ones, token_ids))
    # The angle of pair 1 is theta ** (-1 / 2) a position.
    torch.testing.assert_close(logits_of(slow, token_ids), logits_of(other, token_ids))
    assert not torch.allclose(logits_of(slow, token_ids), logits_of(plain, token_ids))
