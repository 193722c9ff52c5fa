"""Folders that ``transformers`` saved: the decoder computes what ``transformers`` computes."""

import json
from typing import Any

import pytest
import torch

from pagedattn import sharing
from pagedattn.bench.generate import to_transformers
from pagedattn.model import cache_config, complete, load_model
from pagedattn.model.beam_search import beam_search
from pagedattn.model.beams import BeamSearchParams

AutoConfig = pytest.importorskip("transformers").AutoConfig

FAMILIES = ["llama", "qwen2", "qwen3"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["separate head", "tied head"])
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "20KB"}], ids=["one file", "shards"])
def test_families(
    family: str, tied: bool, shards: Any, make_reference: Any, save: Any, assert_equal: Any
) -> None:
    reference = make_reference(family, tie_word_embeddings=tied)
    folder = save(reference, **shards)
    assert len(list(folder.path.glob("*.safetensors"))) > 3 * len(shards)
    model, _ = load_model(folder.path)
    assert model.config.tie_word_embeddings == tied
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert_equal(model, reference)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_key_value_heads(
    family: str, kv_heads: int, make_reference: Any, save: Any, assert_equal: Any
) -> None:
    """All query heads share one KV head, or each has its own."""
    reference = make_reference(family, num_key_value_heads=kv_heads)
    assert_equal(load_model(save(reference).path)[0], reference)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files(
    family: str, dtype: torch.dtype, make_reference: Any, save: Any, assert_equal: Any
) -> None:
    """Stored in 16 bits, computed in 32: the numbers are those of the file, widened."""
    reference = make_reference(family)
    folder = save(reference.to(dtype))
    widened = type(reference).from_pretrained(folder.path, dtype=torch.float32)
    assert_equal(load_model(folder.path)[0], widened)


def test_head_dim_of_its_own(make_reference: Any, save: Any, assert_equal: Any) -> None:
    """4 heads of 10 in 32 dimensions."""
    reference = make_reference("llama", head_dim=10)
    assert_equal(load_model(save(reference).path)[0], reference)


@pytest.mark.parametrize("family", FAMILIES)
def test_llama3_rope_scaling(
    family: str, make_reference: Any, save: Any, llama3: Any, assert_equal: Any
) -> None:
    """Of the 4 or 8 pairs some turn as before, some 8 times slower, some in between."""
    reference = make_reference(family, rope_parameters=llama3)
    model, _ = load_model(save(reference).path)
    factors = model.config.rope_factors
    assert factors[0] == 1
    assert factors[-1] == 8
    assert any(1 < factor < 8 for factor in factors)
    assert_equal(model, reference)


def test_older_keys_of_the_rotary_embedding(make_reference: Any, save: Any, llama3: Any) -> None:
    """rope_theta and rope_scaling beside the others, as folders had them until 2025."""
    folder = save(make_reference("llama", rope_parameters=llama3))
    config = load_model(folder.path)[0].config
    older = {key: value for key, value in llama3.items() if key != "rope_theta"}
    for type_key in ("rope_type", "type"):
        scaling = {type_key if key == "rope_type" else key: value for key, value in older.items()}
        folder.change("config.json", rope_parameters=None, rope_theta=500.0, rope_scaling=scaling)
        assert load_model(folder.path)[0].config == config
    folder.change("config.json", rope_scaling=None)
    plain = load_model(folder.path)[0].config
    assert (plain.rope_theta, plain.rope_factors) == (500.0, ())


SILENT: dict[str, Any] = {"rope_type": "default"}
THETA_99: dict[str, Any] = SILENT | {"rope_theta": 99.0}


@pytest.mark.parametrize(
    ("settings", "theta"),
    [
        ({"rope_theta": 500.0, "rope_parameters": THETA_99}, 99),
        ({"rope_theta": 500.0, "rope_scaling": THETA_99}, 99),
        ({"rope_theta": 500.0, "rope_scaling": THETA_99, "rope_parameters": SILENT}, 99),
        ({"rope_theta": 500.0, "rope_scaling": SILENT, "rope_parameters": THETA_99}, 500),
        ({"rope_theta": 500.0, "rope_scaling": {}, "rope_parameters": THETA_99}, 99),
        ({"rope_scaling": SILENT, "rope_parameters": THETA_99}, 10000),
        ({"rope_theta": 500.0, "rope_parameters": SILENT}, 500),
        ({"rope_scaling": {"type": "linear"} | SILENT}, 10000),
    ],
)
def test_rotary_settings_in_several_places(
    settings: Any, theta: float, make_reference: Any, save: Any
) -> None:
    """The number by which transformers loads the same folder is the one that counts."""
    folder = save(make_reference("llama"))
    folder.change("config.json", **{"rope_parameters": None} | settings)
    theirs = AutoConfig.from_pretrained(folder.path).rope_parameters
    assert (theirs["rope_type"], theirs["rope_theta"]) == ("default", theta)
    config = load_model(folder.path)[0].config
    assert (config.rope_theta, config.rope_factors) == (theta, ())


def test_no_object_of_rotary_settings(make_reference: Any, save: Any) -> None:
    """null is as nothing."""
    folder = save(make_reference("llama"))
    file = folder.path / "config.json"
    nothing = {"rope_theta": 500.0, "rope_parameters": None, "rope_scaling": None}
    file.write_text(json.dumps(folder.read("config.json") | nothing))
    assert load_model(folder.path)[0].config.rope_theta == 500


@pytest.mark.parametrize("width", [1, 3])
def test_rows_that_no_token_has_are_never_chosen(
    width: int, make_reference: Any, save: Any, paged_cache_for: Any
) -> None:
    """The model finds tokens 262 and 263 likeliest by far; the tokenizer ends with 261."""
    reference = make_reference("llama", tie_word_embeddings=False)
    padding = reference.lm_head.weight.data[262:]
    padding *= 1000
    model, tokenizer = load_model(save(reference).path)
    prompt = tokenizer.encode("the thing")
    free = complete(model, paged_cache_for(model), [prompt], max_new_tokens=20)
    assert max(free[0]) > 261
    if width == 1:
        tokens = complete(
            model, paged_cache_for(model), [prompt], max_new_tokens=20, tokenizer=tokenizer
        )
    else:
        params = BeamSearchParams(width=width, max_new_tokens=20)
        cache = sharing.build_cache(cache_config(model.config, num_blocks=64))
        found = beam_search(model, cache, [prompt], params, tokenizer=tokenizer)
        tokens = [list(hypothesis.token_ids) for hypothesis in found[0]]
    assert len(tokens) == width
    assert all(0 <= token_id < 262 for answer in tokens for token_id in answer)


def test_head_in_the_file_of_a_tied_model(
    make_reference: Any, save: Any, assert_equal: Any
) -> None:
    """A head that is there is used, whatever the tie says; so does transformers."""
    reference = make_reference("qwen2", tie_word_embeddings=False)
    folder = save(reference)
    folder.change("config.json", tie_word_embeddings=True)
    assert_equal(load_model(folder.path)[0], reference)


def test_the_model_outlives_its_files(make_reference: Any, save: Any, logits_of: Any) -> None:
    folder = save(make_reference("llama"))
    model, _ = load_model(folder.path)
    before = logits_of(model, [5, 6, 7])
    file = folder.path / "model.safetensors"
    with file.open("r+b") as stored:
        stored.seek(4096)
        stored.write(bytes(file.stat().st_size - 4096))
    assert torch.equal(logits_of(model, [5, 6, 7]), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_benchmark_measures_the_same_model(
    family: str, make_reference: Any, save: Any, llama3: Any, assert_equal: Any
) -> None:
    """What it hands to transformers is the model that it was given, rotary scaling included."""
    model, _ = load_model(save(make_reference(family, rope_parameters=llama3)).path)
    assert_equal(model, to_transformers(model))
