"""Bytes of K and V against the number of tokens, for three models."""

import torch
from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.contiguous import kv_bytes_per_token
from pagedattn.viz.script import run_script

# Layers, KV heads, head_dim and dtype, from each model's published configuration.
MODELS = {
    "Llama 2 7B, 32 KV heads, fp16": (32, 32, 128, torch.float16),
    "Llama 3 8B, 8 KV heads, bf16": (32, 8, 128, torch.bfloat16),
    "SmolLM2 135M, 3 KV heads, fp32": (30, 3, 64, torch.float32),
}


def draw() -> Figure:
    sizes = {name: kv_bytes_per_token(*shape) for name, shape in MODELS.items()}
    return viz.draw_kv_growth(sizes, 4096, "The KV cache of one sequence grows with every token")


if __name__ == "__main__":
    run_script(__file__, draw)
