"""A config.json that is wrong, or asks for what the decoder does not compute, is refused."""

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("nothing_is_read")
CONFIG = "config.json"
REQUIRED = ["model_type", "num_hidden_layers", "num_attention_heads", "hidden_size"]
REQUIRED += ["intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps"]
ROPE_NUMBERS = ["factor", "low_freq_factor", "high_freq_factor"]
ROPE_NUMBERS += ["original_max_position_embeddings"]


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key(folder: Any, key: str, refused: Any) -> None:
    folder.change(CONFIG, **{key: None})
    refused(folder.path, f"{CONFIG}: {key} is missing")


def test_qwen3_states_its_head_dim(sharded: Any, refused: Any) -> None:
    sharded.change(CONFIG, head_dim=None)
    refused(sharded.path, f"{CONFIG}: head_dim is missing")


@pytest.mark.parametrize("name", ["mistral", "qwen3_moe", "gpt2", "LLAMA"])
def test_architecture(folder: Any, name: str, refused: Any) -> None:
    folder.change(CONFIG, model_type=name)
    refused(folder.path, f"architecture '{name}' is not supported, only llama, qwen2, qwen3")


def test_architecture_of_another_family(folder: Any, sharded: Any, refused: Any) -> None:
    """A Llama has no biases, and a Qwen3 has norms that a Llama lacks."""
    folder.change(CONFIG, model_type="qwen2")
    refused(folder.path, "q_proj.bias is missing")
    sharded.change(CONFIG, model_type="llama")
    refused(sharded.path, "unexpected tensor model.layers.0.self_attn.k_norm.weight")


@pytest.mark.parametrize(
    "setting",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"use_sliding_window": True, "sliding_window": 8},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"quantization_config": {"quant_method": "fp8"}},
        {"is_causal": False},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 99.0}}},
        {"rope_scaling": {"full_attention": {"rope_type": "default"}}},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_what_the_decoder_does_not_follow(
    folder: Any, setting: dict[str, Any], refused: Any
) -> None:
    folder.change(CONFIG, **setting)
    refused(folder.path, CONFIG, next(iter(setting)).removesuffix("s"))


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "su"])
def test_rotary_scaling(folder: Any, kind: str, llama3: Any, refused: Any) -> None:
    folder.change(CONFIG, rope_parameters=llama3 | {"rope_type": kind})
    refused(folder.path, f"rope_parameters.rope_type = '{kind}' is not supported", "llama3")
    older = {"type": kind, "factor": 2.0}
    folder.change(CONFIG, rope_parameters=llama3, rope_scaling=older)
    refused(folder.path, f"rope_scaling.type = '{kind}' is not supported")
    folder.change(CONFIG, rope_parameters=None, rope_scaling=older)
    refused(folder.path, f"rope_scaling.type = '{kind}' is not supported")


def test_rope_type_counts_before_type(folder: Any, refused: Any) -> None:
    both = {"type": "default", "rope_type": "linear", "factor": 2.0}
    for place in ("rope_parameters", "rope_scaling"):
        folder.change(CONFIG, **{place: both})
        refused(folder.path, f"{place}.rope_type = 'linear' is not supported")


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("value", [[], [1], "linear", "", True, False, 0])
def test_rotary_settings_are_an_object(
    folder: Any, place: str, value: Any, llama3: Any, refused: Any
) -> None:
    """The one that does not count is looked at, too."""
    folder.change(CONFIG, **{"rope_parameters": llama3, "rope_scaling": llama3, place: value})
    refused(folder.path, f"{CONFIG}: {place} is {value!r}, expected dict")


@pytest.mark.parametrize("name", ROPE_NUMBERS)
def test_numbers_of_rotary_scaling(folder: Any, name: str, llama3: Any, refused: Any) -> None:
    folder.change(CONFIG, rope_parameters={k: v for k, v in llama3.items() if k != name})
    refused(folder.path, CONFIG, f"rope_parameters.{name} is missing")
    for value in (0, -1, "8"):
        folder.change(CONFIG, rope_parameters=llama3 | {name: value})
        refused(folder.path, CONFIG, repr(value))


def test_order_of_rotary_scaling(folder: Any, llama3: Any, refused: Any) -> None:
    folder.change(CONFIG, rope_parameters=llama3 | {"low_freq_factor": 4})
    refused(folder.path, "low_freq_factor 4.0 is not below high_freq_factor 4.0")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"num_hidden_layers": 0}, "num_layers must be a whole number, at least 1, got 0"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0, expected int"),
        ({"num_hidden_layers": 10**12}, "1000000000000 layers, but there are only 21 tensors"),
        ({"num_hidden_layers": 1}, "unexpected tensor model.layers.1"),
        ({"num_attention_heads": 0, "head_dim": None}, "0 heads cannot share 32"),
        ({"num_key_value_heads": 3}, "num_kv_heads 3 does not divide num_heads 4"),
        ({"num_key_value_heads": 4}, "k_proj.weight has shape [16, 32], expected [32, 32]"),
        ({"hidden_size": 2**70}, "expected [264, 1180591620717411303424]"),
        ({"vocab_size": 100}, "embed_tokens.weight has shape [264, 32], expected [100, 32]"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be finite and above 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True, expected float"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta must be finite"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected bool"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_numbers(folder: Any, setting: dict[str, Any], words: str, refused: Any) -> None:
    folder.change(CONFIG, **setting)
    refused(folder.path, words)
