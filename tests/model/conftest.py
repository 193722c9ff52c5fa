"""Tiny model files, written by ``gguf``, and a random model with caches for it.

The files: random weights, 8 query heads, 2 KV heads, head_dim 4.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from torch import Tensor

from pagedattn import contiguous, paged, sharing
from pagedattn.cache import KVCache
from pagedattn.model import Llama, ModelConfig, cache_config

LAYERS, HEADS, KV_HEADS, HEAD_DIM, D_MODEL, D_FF = 2, 8, 2, 4, 32, 64
# Byte-level BPE in small: the printable ASCII characters, two merges, two special tokens.
TOKENS = ["<|end|>", "<|start|>", *map(chr, range(33, 127)), "th", "the"]
PARTS: dict[str, tuple[int, ...]] = {
    "attn_norm": (D_MODEL,),
    "attn_q": (HEADS * HEAD_DIM, D_MODEL),
    "attn_k": (KV_HEADS * HEAD_DIM, D_MODEL),
    "attn_v": (KV_HEADS * HEAD_DIM, D_MODEL),
    "attn_output": (D_MODEL, HEADS * HEAD_DIM),
    "ffn_norm": (D_MODEL,),
    "ffn_gate": (D_FF, D_MODEL),
    "ffn_up": (D_FF, D_MODEL),
    "ffn_down": (D_MODEL, D_FF),
}
Arrays = dict[str, np.ndarray[Any, Any]]


def interleave_rows(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Row by row, by hand: pair i of a head goes to rows 2i and 2i + 1."""
    out = np.empty_like(weight)
    head_dim = len(weight) // num_heads
    for head in range(num_heads):
        for i in range(head_dim // 2):
            out[head * head_dim + 2 * i] = weight[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = weight[head * head_dim + head_dim // 2 + i]
    return out


def random_weights(tied: bool) -> Arrays:
    """Weights in the decoder's order, under the file's names."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(TOKENS), D_MODEL)}
    shapes["output_norm"] = (D_MODEL,)
    if not tied:
        shapes["output"] = (len(TOKENS), D_MODEL)
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{part}": shape for part, shape in PARTS.items()}
    return {
        f"{name}.weight": rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def as_stored(weights: Arrays) -> Arrays:
    """The same in the file's order: rows of q and k interleaved."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    return {
        name: interleave_rows(weight, heads[name.split(".")[2]])
        if name.split(".")[-2] in heads
        else weight
        for name, weight in weights.items()
    }


METADATA: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 64,
    "llama.embedding_length": D_MODEL,
    "llama.feed_forward_length": D_FF,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 1000.0,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3] + [1] * (len(TOKENS) - 2),
    "tokenizer.ggml.merges": ["t h", "th e"],
    "tokenizer.ggml.eos_token_id": 0,
}


class TinyFile:
    """A model file to be written: change ``tensors``, then ``write``.

    ``weights`` are those of the decoder, ``tensors`` the same in the order of the file.
    """

    def __init__(self, path: Path, tied: bool) -> None:
        self.path = path
        self.weights = random_weights(tied)
        self.tensors = as_stored(self.weights)

    def write(
        self,
        metadata: dict[str, Any] | None = None,
        *,
        architecture: str = "llama",
        quantised: tuple[str, ...] = (),
    ) -> Path:
        """Write and return ``path``; a metadata value of None leaves the key out."""
        writer = gguf.GGUFWriter(self.path, architecture)
        add: dict[type, Any] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        for key, value in (METADATA | (metadata or {})).items():
            if value is not None:
                add[type(value)](key, value)
        for name, array in self.tensors.items():
            if name in quantised:
                kind = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return self.path


@pytest.fixture
def interleave() -> Any:
    """The order of the file's q and k rows, made by hand: ``interleave(weight, num_heads)``."""
    return interleave_rows


@pytest.fixture(params=[False, True], ids=["separate head", "tied head"])
def tiny_file(request: pytest.FixtureRequest, tmp_path: Path) -> TinyFile:
    """A good file, once with a head of its own and once with a tied one."""
    return TinyFile(tmp_path / "tiny.gguf", tied=request.param)


@pytest.fixture
def untied_file(tmp_path: Path) -> TinyFile:
    """A good file with a head of its own."""
    return TinyFile(tmp_path / "tiny.gguf", tied=False)


@pytest.fixture(scope="module")
def model() -> Llama:
    """A random model whose scores are far enough apart that rounding decides nothing."""
    config = ModelConfig(
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        d_model=32,
        d_ff=48,
        vocab_size=64,
        max_seq_len=40,
    )
    generator = torch.Generator().manual_seed(0)
    model = Llama(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.normal_(generator=generator, std=0.5)
    return model


@pytest.fixture(scope="session")
def assert_untouched() -> Callable[[KVCache], None]:
    """``assert_untouched(cache)``: no sequence is in it, no slot is taken, no batch is open."""

    def check(cache: KVCache) -> None:
        assert cache.seq_ids == []
        assert cache.usage().reserved == 0
        assert cache.open_batch is None
        cache.check_invariants()

    return check


@pytest.fixture(params=[contiguous.build_cache, paged.build_cache], ids=["slabs", "pages"])
def cache(
    request: pytest.FixtureRequest, model: Llama, assert_untouched: Callable[[KVCache], None]
) -> Iterator[KVCache]:
    """A cache with room for all; whatever a test does, nothing may be left in it."""
    cache = request.param(cache_config(model.config, num_blocks=60, block_size=4, poison=True))
    yield cache
    assert_untouched(cache)


class TableModel:
    """A model whose next token depends on the last one and its position only.

    ``probabilities`` [num_positions, vocab_size, vocab_size]: row by row those of the next token;
    behind its last position the table begins again.
    """

    def __init__(self, probabilities: Tensor) -> None:
        self.logprobs = probabilities.double().log().log_softmax(-1)
        sizes: dict[str, Any] = dict.fromkeys(
            ("num_layers", "num_heads", "num_kv_heads", "d_model", "d_ff"), 1
        )
        vocab_size = probabilities.shape[-1]
        self.config = ModelConfig(**sizes, head_dim=2, vocab_size=vocab_size, max_seq_len=64)

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
        hidden = torch.stack([positions, token_ids], dim=1)
        kv = hidden[:, None].float()
        attend(0, kv, kv, kv)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        positions, token_ids = hidden.unbind(1)
        return self.logprobs.float()[positions % len(self.logprobs), token_ids] + 3

    def next_logprobs(self, token_ids: list[int]) -> Tensor:
        return self.logprobs[(len(token_ids) - 1) % len(self.logprobs), token_ids[-1]]


@pytest.fixture(scope="session")
def table_model() -> Any:
    """``table_model(probabilities)``: a model that is no more than a table."""
    return TableModel


def _sharing_cache_for(model: Any, num_blocks: int = 80, **options: Any) -> sharing.PagedKVCache:
    options = {"block_size": 4, "poison": True} | options
    return sharing.build_cache(cache_config(model.config, num_blocks=num_blocks, **options))


@pytest.fixture(scope="session")
def sharing_cache_for() -> Any:
    """``sharing_cache_for(model, num_blocks=80, **options)``: a cache of chapter 03, poison on."""
    return _sharing_cache_for
