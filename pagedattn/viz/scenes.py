"""Small caches for pictures, driven through the verbs. K and V are random: places are the point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from pagedattn.cache import Config, KVCache, OutOfBlocks, SeqId

CHUNK = 256  # a long prompt is computed in pieces: its scores are quadratic in the piece


def small_config(num_blocks: int, block_size: int = 4, max_seq_len: int = 32) -> Config:
    """One layer with one KV head of 8 numbers: a cache whose memory fits on a page."""
    return Config(
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        num_blocks=num_blocks,
        max_seq_len=max_seq_len,
        block_size=block_size,
    )


def compute(cache: KVCache, num_new_tokens: Mapping[SeqId, int]) -> None:
    """Reserve slots for the next tokens of each sequence, attend over them, commit."""
    batch = cache.reserve(num_new_tokens)
    config = cache.config
    shape = (len(batch.token_ids), config.num_kv_heads, config.head_dim)
    generator = torch.Generator().manual_seed(0)
    for layer in range(config.num_layers):
        q, k, v = (torch.randn(shape, generator=generator).to(config.dtype) for _ in range(3))
        batch.attend(layer, q, k, v)
    batch.commit()


def start(cache: KVCache, seq_id: SeqId, num_tokens: int, max_tokens: int | None = None) -> None:
    """A sequence with a prompt of so many tokens, all of them computed."""
    known = cache.add(seq_id, range(num_tokens), max_tokens)
    compute(cache, {seq_id: num_tokens - known})


def grow(cache: KVCache, num_tokens: Mapping[SeqId, int]) -> None:
    """Generate: so many tokens more for each sequence, one at a time, all sequences in step."""
    for step in range(max(num_tokens.values(), default=0)):
        running = [seq_id for seq_id, n in num_tokens.items() if step < n]
        for seq_id in running:
            cache.append(seq_id, [0])
        compute(cache, dict.fromkeys(running, 1))


def serve(cache: KVCache, requests: Mapping[str, tuple[int, int]]) -> list[str]:
    """Start the requests that fit, by (tokens of the prompt, tokens to generate), and let them
    generate; returns those that were refused."""
    refused = []
    for seq_id, (prompt, _) in requests.items():
        try:
            start(cache, seq_id, prompt)
        except OutOfBlocks:
            refused.append(seq_id)
    grow(cache, {seq_id: n for seq_id, (_, n) in requests.items() if seq_id not in refused})
    return refused


def fill(cache: KVCache, lengths: Iterable[int]) -> int:
    """Start sequences with prompts of these lengths, named 0, 1, 2, …, until one does not fit;
    returns how many run."""
    for number, length in enumerate(lengths):
        try:
            known = cache.add(number, range(length))
            while known < length:
                n = min(CHUNK, length - known)
                compute(cache, {number: n})
                known += n
        except OutOfBlocks:
            if number in cache.seq_ids:  # pages are taken after the sequence was added
                cache.free(number)
            break
    return len(cache.seq_ids)
