"""A model in a GGUF file: its numbers, and where the file keeps each weight.

Sources: key and tensor names of the GGUF format (github.com/ggml-org/ggml, docs/gguf.md, and
llama.cpp's gguf-py/gguf/constants.py); the order of q and k rows from ``LlamaModel.permute`` in
llama.cpp's convert_hf_to_gguf.py.
"""

from pathlib import Path

from torch import Tensor

from pagedattn.model.families import check_family, make_config
from pagedattn.model.gguf_file import GGUFFile
from pagedattn.model.gguf_tokenizer import read_tokenizer
from pagedattn.model.llama import ModelConfig
from pagedattn.model.metadata import ModelFileError
from pagedattn.model.tokenizer import Tokenizer

GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    # of a layer
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEAD = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
INTERLEAVED = ("llama",)  # the architectures whose q and k rows the file has in another order


class GGUFCheckpoint:
    """A GGUF file as a ``Checkpoint``.

    Raises ModelFileError for an architecture that is not supported, a missing or impossible
    number, and what the decoder does not compute (scaled or partial rotary embedding, experts).
    """

    def __init__(self, path: str | Path) -> None:
        self._file = GGUFFile(path)
        self._architecture = check_family(self._file, "general.architecture")
        self.config = _read_config(self._file, self._architecture)
        self.shapes = {n: shape for n, shape in self._file.shapes.items() if n != ROPE_FACTORS}

    def tokenizer(self) -> Tokenizer:
        """The tokenizer inside the file. Raises ModelFileError for one that is not supported."""
        return read_tokenizer(self._file)

    def stored_name(self, name: str) -> str:
        module, _, kind = name.rpartition(".")  # kind: weight or bias
        if not module.startswith("layers."):
            return f"{GGUF_NAMES[module]}.{kind}"
        _, layer, part = module.split(".", 2)
        return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"

    def tensor(self, name: str) -> Tensor:
        stored = self._file.tensor(self.stored_name(name))
        if self._architecture in INTERLEAVED:
            if name.endswith("q_proj.weight"):
                return undo_interleave(stored, self.config.num_heads)
            if name.endswith("k_proj.weight"):
                return undo_interleave(stored, self.config.num_kv_heads)
        return stored

    def error(self, message: str, stored_name: str | None = None) -> ModelFileError:
        return self._file.error(message)


def _read_config(file: GGUFFile, arch: str) -> ModelConfig:
    """The model's numbers from the file's metadata."""
    num_heads = file.value(f"{arch}.attention.head_count", int)
    vocab_size = len(file.value("tokenizer.ggml.tokens", list))
    factors = file.tensor(ROPE_FACTORS).flatten().tolist() if ROPE_FACTORS in file.shapes else []
    key_length = f"{arch}.attention.key_length"
    config = make_config(
        file,
        arch,
        num_layers=file.value(f"{arch}.block_count", int),
        num_heads=num_heads,
        num_kv_heads=file.value(f"{arch}.attention.head_count_kv", int, num_heads),
        head_dim=file.value(key_length, int) if file.has(key_length) else None,
        d_model=file.value(f"{arch}.embedding_length", int),
        d_ff=file.value(f"{arch}.feed_forward_length", int),
        vocab_size=vocab_size,
        max_seq_len=file.value(f"{arch}.context_length", int),
        rope_theta=file.value(f"{arch}.rope.freq_base", float, 10000.0),
        rms_norm_eps=file.value(f"{arch}.attention.layer_norm_rms_epsilon", float),
        tie_word_embeddings=HEAD not in file.shapes,
        rope_factors=tuple(factors),
    )
    file.require(f"{arch}.attention.value_length", config.head_dim)
    file.require(f"{arch}.rope.dimension_count", config.head_dim)
    file.require(f"{arch}.rope.scaling.type", "none")
    file.require(f"{arch}.rope.scaling.factor", 1.0)
    file.require(f"{arch}.rope.scale_linear", 1.0)
    file.require(f"{arch}.attention.sliding_window", 0)
    file.require(f"{arch}.attention.causal", True)
    file.require(f"{arch}.expert_count", 0)
    stated = file.value(f"{arch}.vocab_size", int, vocab_size)
    if stated != vocab_size:
        raise file.error(f"{arch}.vocab_size is {stated}, the tokenizer has {vocab_size} tokens")
    return config


def undo_interleave(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k from the file's rotary order into the decoder's.

    The decoder turns the pairs (i, i + head_dim / 2) of a head; the file stores the two rows of a
    pair next to each other. ``num_heads`` is the number of heads in ``weight``: the query heads
    for q, but the KV heads for k. weight and result: [num_heads * head_dim, d_model].
    """
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)
