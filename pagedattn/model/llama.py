"""A decoder of the Llama family over a flat batch of tokens.

The model knows nothing of sequences or caches. It takes the tokens of a whole batch in one row,
each with its position, and leaves attention, the only step in which tokens meet, to ``attend``.

Sources: Touvron et al., "LLaMA" (2023), section 2.2, and the papers it names: RMSNorm (Zhang and
Sennrich, 2019), SwiGLU (Shazeer, 2020), rotary embedding (Su et al., 2021); grouped-query
attention (Ainslie et al., 2023); normed queries and keys (Henry et al., 2020). Names of
modules follow vllm/model_executor/models/llama.py and its neighbours qwen2.py and qwen3.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_TOKENS = 64  # up to here ``linear`` puts the weights first

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q, k, v)``: stores k and v of these tokens, and returns what q attends to.

q and the result: [num_tokens, num_heads, head_dim]; k and v: [num_tokens, num_kv_heads, head_dim].
"""


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that fix a model's shapes and its arithmetic.

    ``num_kv_heads`` divides ``num_heads``: so many query heads share one key head.
    ``rope_factors``, head_dim / 2 numbers, divide the rotary frequencies (Llama 3.1 and later).
    ``qkv_bias``: q, k and v have biases (Qwen2). ``qk_norm``: an RMSNorm over the head_dim numbers
    of each q and k head, before they are turned (Qwen3).
    Raises ValueError for sizes that are no whole numbers or fit no model, and for numbers that are
    not finite and above 0.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_model: int
    d_ff: int
    vocab_size: int
    max_seq_len: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope_factors: tuple[float, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        sizes = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "d_model", "d_ff")
        for name in (*sizes, "vocab_size", "max_seq_len"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise ValueError(f"{name} must be a whole number, at least 1, got {size!r}")
        numbers = [("rope_theta", self.rope_theta), ("rms_norm_eps", self.rms_norm_eps)]
        numbers += [("each of rope_factors", factor) for factor in self.rope_factors]
        for name, number in numbers:
            if not 0 < number < math.inf:
                raise ValueError(f"{name} must be finite and above 0, got {number}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary pairs, got {self.head_dim}")
        if self.rope_factors and len(self.rope_factors) != self.head_dim // 2:
            raise ValueError(
                f"rope_factors must be {self.head_dim // 2} numbers, got {len(self.rope_factors)}"
            )


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        variance = x32.square().mean(dim=-1, keepdim=True)
        return (x32 * torch.rsqrt(variance + self.eps)).to(x.dtype) * self.weight


@lru_cache(maxsize=8)
def rotary_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """The angle by which pair i turns for each position: theta^(-2i / head_dim), [head_dim / 2]."""
    pair = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / config.rope_theta ** (pair / config.head_dim)
    if config.rope_factors:
        frequencies = frequencies / torch.tensor(config.rope_factors, device=device)
    return frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its token's angle.

    x [num_tokens, heads, head_dim]; cos and sin [num_tokens, 1, head_dim / 2].
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Linear(nn.Linear):
    """``linear`` with weights of its own, and a bias if asked for."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: [num_tokens, in_features] -> [num_tokens, out_features].

    A CPU library shares a product among threads by the rows of its first factor. The weights have
    many rows, the tokens of a decode step are few: there the weights stand first, so that each
    thread has enough to do. The result is the same, stored column by column.
    """
    if x.is_cpu and x.dim() == 2 and len(x) <= FEW_TOKENS:
        product = (weight @ x.T).T
        return product if bias is None else product + bias
    return F.linear(x, weight, bias)


class Attention(nn.Module):
    """Queries, keys and values of a layer, and what is made of the attended values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.head_dim = config.head_dim
        rows = sum(self.heads) * self.head_dim
        self.qkv_proj = Linear(config.d_model, rows, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_heads * self.head_dim, config.d_model)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        qkv = self.qkv_proj(x).view(len(x), sum(self.heads), self.head_dim)
        q, k, v = qkv.split(self.heads, dim=1)  # [num_tokens, heads of each, head_dim]
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(out.reshape(len(x), -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up in one multiplication."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.d_model, 2 * config.d_ff)
        self.down_proj = Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # [num_tokens, d_ff] each
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The decoder: ``hidden = model(token_ids, positions, attend)``, then ``compute_logits``.

    It never trains: both calls run under ``torch.inference_mode``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.d_model, config.vocab_size)
        self.requires_grad_(False)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run a batch of tokens through all layers.

        token_ids, positions: [num_tokens] int64, the tokens of all sequences one after another;
        positions are 0-based within each sequence. Returns the hidden states after the final
        norm, [num_tokens, d_model].
        """
        angles = positions[:, None].float() * rotary_frequencies(self.config, positions.device)
        x = self.embed_tokens(token_ids)  # [num_tokens, d_model]
        cos = angles.cos()[:, None].to(x.dtype)  # [num_tokens, 1, head_dim / 2]
        sin = angles.sin()[:, None].to(x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, index, attend)
        return self.norm(x)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: [..., d_model] -> [..., vocab_size].

        The head is as wide as the vocabulary, so pass only the rows that are sampled from.
        """
        tied = self.config.tie_word_embeddings
        head = self.embed_tokens.weight if tied else self.lm_head.weight
        return linear(hidden, head)
