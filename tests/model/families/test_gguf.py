"""GGUF files of each family, written from models of ``transformers``, in every type of tensor."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from pagedattn.model import load_model

FAMILIES = ["llama", "qwen2", "qwen3"]
TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q4_K, Type.Q6_K]
# Rows must be whole blocks of 256 numbers.
SIZES: dict[str, dict[str, int]] = {
    family: {"hidden_size": 256, "intermediate_size": 256} for family in FAMILIES
}
SIZES["qwen3"]["head_dim"] = 128  # 4 heads of 128 in 256 dimensions
Array = np.ndarray[Any, Any]


def random_blocks(kind: Type, rows: int, columns: int) -> Array:
    """Blocks of random bytes, whose float16 scales make numbers of about 0.1, both signs.

    The package reads these types and does not write them. A block stands for 256 numbers.
    """
    rng = np.random.default_rng(rows)
    places = {Type.Q4_K: {0: 6e-4, 2: 45e-4}, Type.Q6_K: {208: 9e-5}}[kind]
    raw = rng.integers(
        256, size=(rows * columns // 256, {Type.Q4_K: 144, Type.Q6_K: 210}[kind]), dtype=np.uint8
    )
    for place, scale in places.items():
        raw[:, place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return raw.reshape(rows, -1)


def encode(array: Array, kind: Type) -> Array:
    """The bytes that a file holds, row by row."""
    if kind in (Type.Q4_K, Type.Q6_K):
        return random_blocks(kind, *array.shape)
    return quantize(array, kind)


@pytest.fixture
def write(tmp_path: Path, interleave: Any, reference_tokenizer: Any) -> Callable[..., Path]:
    """``write(reference, kind)``: a file of this model, named and ordered as llama.cpp does it.

    The matrices of ``reference`` become those of the file, rounding included.
    """
    tokens = reference_tokenizer.convert_ids_to_tokens(range(262))
    tokens += [f"[PAD{i}]" for i in (262, 263)]

    def write(reference: Any, kind: Type, rope_factors: Array | None = None) -> Path:
        path, config = tmp_path / "model.gguf", reference.config
        family = config.model_type
        writer = gguf.GGUFWriter(path, family)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        if family == "qwen3":
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm" if family == "llama" else "qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types([3] * 3 + [1] * 259 + [5] * 2)
        writer.add_token_merges(["t h"])
        writer.add_eos_token_id(0)
        if rope_factors is not None:
            writer.add_tensor("rope_freqs.weight", rope_factors)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for name, parameter in reference.named_parameters():
            array = parameter.detach().numpy()
            stored_as = kind if array.ndim == 2 else Type.F32
            raw = encode(array, stored_as)
            values = dequantize(raw, stored_as).reshape(array.shape)
            parameter.data = torch.from_numpy(np.array(values, np.float32))
            module, _, ending = name.rpartition(".")
            part = module.rpartition(".")[2]
            if family == "llama" and part in heads:
                raw = interleave(raw, heads[part])
            writer.add_tensor(f"{names.get_name(module)}.{ending}", raw, raw_dtype=stored_as)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_families(
    family: str, kind: Type, write: Any, make_reference: Any, assert_equal: Any
) -> None:
    reference = make_reference(family, **SIZES[family])
    model, _ = load_model(write(reference, kind))
    assert_equal(model, reference)


def test_rows_that_no_token_has(write: Any, make_reference: Any) -> None:
    """The file names them [PAD262] and [PAD263] and calls them unused."""
    model, tokenizer = load_model(write(make_reference("llama"), Type.F32))
    assert model.config.vocab_size == 264
    assert len(tokenizer) == 262
    assert tokenizer.decode([262, 263]) == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_head(family: str, write: Any, make_reference: Any, assert_equal: Any) -> None:
    """The quantised embedding is the head (vllm-project/vllm#30412)."""
    reference = make_reference(family, **SIZES[family], tie_word_embeddings=True)
    model, _ = load_model(write(reference, Type.Q8_0))
    assert model.config.tie_word_embeddings
    reference.tie_weights()
    assert_equal(model, reference)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_key_value_heads(kv_heads: int, write: Any, make_reference: Any, assert_equal: Any) -> None:
    """Rows of q and k are put in order by their own numbers of heads."""
    reference = make_reference("llama", num_key_value_heads=kv_heads)
    assert_equal(load_model(write(reference, Type.F32))[0], reference)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_llama3_rope_scaling(
    family: str, write: Any, make_reference: Any, llama3: Any, assert_equal: Any
) -> None:
    """The file holds the numbers that divide the frequencies: here from those of transformers."""
    plain = make_reference(family, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    reference = make_reference(family, rope_parameters=llama3)
    inv_freq = [model.model.rotary_emb.inv_freq for model in (plain, reference)]
    factors = (inv_freq[0] / inv_freq[1]).numpy()
    assert factors.max() > 7.9
    model, _ = load_model(write(reference, Type.F32, rope_factors=factors))
    assert_equal(model, reference)
