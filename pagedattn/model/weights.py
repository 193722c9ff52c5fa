"""The decoder's numbers and weights from a GGUF file, checked before any of them is used.

Sources: tensor and key names of the GGUF format (github.com/ggml-org/ggml, docs/gguf.md); the
order of q and k rows from ``LlamaModel.permute`` in llama.cpp's convert_hf_to_gguf.py.
"""

import torch
from torch import Tensor

from pagedattn.model.gguf_file import ModelFile
from pagedattn.model.llama import Llama, ModelConfig

SUPPORTED_ARCHITECTURE = "llama"


def read_config(file: ModelFile) -> ModelConfig:
    """The model's numbers from the file's metadata, held against the file's tensors.

    Raises ModelFileError for another architecture, a missing or impossible number, what this
    decoder does not compute (scaled or partial rotary embedding, experts), and a tensor that is
    missing, unexpected or of another shape.
    """
    architecture = file.value("general.architecture", str)
    if architecture != SUPPORTED_ARCHITECTURE:
        raise file.error(
            f"architecture {architecture!r} is not supported, only {SUPPORTED_ARCHITECTURE!r}"
        )
    num_heads = file.value("llama.attention.head_count", int)
    d_model = file.value("llama.embedding_length", int)
    if num_heads < 1 or (d_model % num_heads and not file.has("llama.attention.key_length")):
        raise file.error(f"{num_heads} heads (llama.attention.head_count) in {d_model} dimensions")
    head_dim = file.value("llama.attention.key_length", int, d_model // num_heads)
    _refuse_unknown_arithmetic(file, head_dim)
    factors: list[float] = []
    if "rope_freqs.weight" in file.tensors:
        factors = file.tensor("rope_freqs.weight").flatten().tolist()
    try:
        config = ModelConfig(
            num_layers=file.value("llama.block_count", int),
            num_heads=num_heads,
            num_kv_heads=file.value("llama.attention.head_count_kv", int, num_heads),
            head_dim=head_dim,
            d_model=d_model,
            d_ff=file.value("llama.feed_forward_length", int),
            vocab_size=len(file.value("tokenizer.ggml.tokens", list)),
            max_seq_len=file.value("llama.context_length", int),
            rope_theta=file.value("llama.rope.freq_base", float, 10000.0),
            rms_norm_eps=file.value("llama.attention.layer_norm_rms_epsilon", float),
            tie_word_embeddings="output.weight" not in file.tensors,
            rope_factors=tuple(factors),
        )
    except ValueError as reason:
        raise file.error(str(reason).removeprefix(f"{file.path}: ")) from reason
    check_tensors(file, config)
    return config


def _refuse_unknown_arithmetic(file: ModelFile, head_dim: int) -> None:
    """Raise for metadata that would change results and that this decoder does not follow."""
    required = {
        "llama.attention.value_length": head_dim,
        "llama.rope.dimension_count": head_dim,
        "llama.expert_count": 0,
        "llama.rope.scale_linear": 1.0,
        "llama.rope.scaling.factor": 1.0,
    }
    scaling = file.value("llama.rope.scaling.type", str, "none")
    if scaling != "none":
        raise file.error(f"rotary scaling llama.rope.scaling.type = {scaling!r} is not supported")
    for key, only in required.items():
        value = file.value(key, float, only)
        if value != only:
            raise file.error(f"{key} = {value} is not supported by this decoder, only {only}")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the file of such a model holds, with its shape, rows first."""
    d_model, d_ff = config.d_model, config.d_ff
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, d_model),
        "output_norm.weight": (d_model,),
    }
    if not config.tie_word_embeddings:
        shapes["output.weight"] = (config.vocab_size, d_model)
    if config.rope_factors:
        shapes["rope_freqs.weight"] = (config.head_dim // 2,)
    for layer in range(config.num_layers):
        of_layer = {
            "attn_norm": (d_model,),
            "attn_q": (q_rows, d_model),
            "attn_k": (kv_rows, d_model),
            "attn_v": (kv_rows, d_model),
            "attn_output": (d_model, q_rows),
            "ffn_norm": (d_model,),
            "ffn_gate": (d_ff, d_model),
            "ffn_up": (d_ff, d_model),
            "ffn_down": (d_model, d_ff),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


def check_tensors(file: ModelFile, config: ModelConfig) -> None:
    """Raise ModelFileError unless the file holds exactly the tensors that ``config`` asks for."""
    if config.num_layers > len(file.tensors):
        raise file.error(
            f"llama.block_count is {config.num_layers}, "
            f"but the file has only {len(file.tensors)} tensors"
        )
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in file.tensors:
            raise file.error(f"tensor {name} is missing")
        if file.shape(name) != shape:
            raise file.error(
                f"tensor {name} has shape {list(file.shape(name))}, expected {list(shape)}"
            )
    unexpected = sorted(file.tensors.keys() - expected.keys())
    if unexpected:
        raise file.error(f"unexpected tensor {unexpected[0]} ({len(unexpected)} in all)")
    vocab_size = file.value("llama.vocab_size", int, config.vocab_size)
    if vocab_size != config.vocab_size:
        raise file.error(
            f"llama.vocab_size is {vocab_size}, the tokenizer has {config.vocab_size} tokens"
        )


def undo_interleave(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k from the file's rotary order into the decoder's.

    The decoder turns the pairs (i, i + head_dim / 2) of a head; the file stores the two rows of a
    pair next to each other. ``num_heads`` is the number of heads in ``weight``: the query heads
    for q, but the KV heads for k. weight and result: [num_heads * head_dim, d_model].
    """
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def read_weights(file: ModelFile, config: ModelConfig) -> dict[str, Tensor]:
    """The decoder's parameters by name, float32; q, k, v and gate, up are joined."""
    weights = {
        "embed_tokens.weight": file.tensor("token_embd.weight"),
        "norm.weight": file.tensor("output_norm.weight"),
    }
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = file.tensor("output.weight")
    for layer in range(config.num_layers):
        blk = f"blk.{layer}"
        q = undo_interleave(file.tensor(f"{blk}.attn_q.weight"), config.num_heads)
        k = undo_interleave(file.tensor(f"{blk}.attn_k.weight"), config.num_kv_heads)
        v = file.tensor(f"{blk}.attn_v.weight")
        gate, up = file.tensor(f"{blk}.ffn_gate.weight"), file.tensor(f"{blk}.ffn_up.weight")
        of_layer = {
            "input_layernorm": file.tensor(f"{blk}.attn_norm.weight"),
            "self_attn.qkv_proj": torch.cat((q, k, v)),
            "self_attn.o_proj": file.tensor(f"{blk}.attn_output.weight"),
            "post_attention_layernorm": file.tensor(f"{blk}.ffn_norm.weight"),
            "mlp.gate_up_proj": torch.cat((gate, up)),
            "mlp.down_proj": file.tensor(f"{blk}.ffn_down.weight"),
        }
        weights |= {f"layers.{layer}.{name}.weight": value for name, value in of_layer.items()}
    return weights


def read_model(file: ModelFile, config: ModelConfig) -> Llama:
    """The decoder with the file's weights, float32, on torch's default device.

    ``config`` comes from ``read_config``.
    """
    weights = read_weights(file, config)
    with torch.device("meta"):
        model = Llama(config)
    model.load_state_dict(weights, strict=True, assign=True)
    return model.requires_grad_(False).to(torch.get_default_device())
