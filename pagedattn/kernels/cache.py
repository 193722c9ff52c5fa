"""The cache of this stage: chapter 04's, with slots, writes, copies and attention from kernels."""

from __future__ import annotations

from torch import Tensor

from pagedattn import prefix
from pagedattn.cache import Batch, Config, SeqId
from pagedattn.prefix import BlockHasher, BlockPool

from .attention import paged_attention
from .buffers import AttentionPlan
from .checks import check_block_table
from .copy_blocks import copy_blocks
from .plan import new_plan, plan_attention
from .slot_mapping import compute_slot_mapping
from .write_kv import write_kv


class PagedKVCache(prefix.PagedKVCache):
    """Chapter 04's cache on kernels. With poison on, block tables are checked at every layer."""

    def __init__(self, config: Config, pool: BlockPool, hasher: BlockHasher | None = None) -> None:
        super().__init__(config, pool, hasher)
        self.plans: dict[int | None, AttentionPlan] = {}  # of the open batch, by window

    def _address(
        self, seq_ids: list[SeqId], query_start_loc: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.plans.clear()
        rows = [self.sequences[seq_id].row for seq_id in seq_ids]
        table = self.block_table.gather(rows).to(positions.device)
        slots = compute_slot_mapping(table, query_start_loc, positions, self.config.block_size)
        return table, slots

    def _attend(self, batch: Batch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = self.k_cache[layer], self.v_cache[layer]
        spec = self.config.layer_specs[layer]
        if self.config.poison:
            check_block_table(batch.block_table, batch.seq_lens, *k_cache.shape[:2])
        write_kv(k_cache, v_cache, k, v, batch.slot_mapping)
        if spec.window not in self.plans:
            self.plans[spec.window] = _plan(batch, q, k_cache, spec.window)
        return paged_attention(
            q,
            k_cache,
            v_cache,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            spec,
            self.plans[spec.window],
        )

    def _copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        copy_blocks(self.k_cache, self.v_cache, sources, destinations)


def _plan(batch: Batch, q: Tensor, k_cache: Tensor, window: int | None) -> AttentionPlan:
    """The plan of a batch, for all layers with this window. Blocks that forks, beams and prefix
    hits share are read once."""
    _, block_size, num_kv_heads, _ = k_cache.shape
    num_rows, (num_tokens, num_heads, head_dim) = len(batch.seq_lens), q.shape
    only_decodes = num_tokens == num_rows  # each row has at least one token
    plan = new_plan(
        num_rows, num_tokens, num_heads, num_kv_heads, head_dim,
        dtype=q.dtype, window=window, has_prefill=not only_decodes,
        share_block_size=block_size if num_rows > 1 else None, device=q.device,
    )  # fmt: skip
    plan_attention(plan, batch.seq_lens, batch.query_start_loc, batch.block_table)
    return plan


def build_cache(
    config: Config, *, enable_prefix_caching: bool = True, seed: str | bytes | None = None
) -> PagedKVCache:
    """A cache of ``config.num_blocks`` blocks, all free but block 0, which holds no sequence."""
    hasher = BlockHasher(config.block_size, seed) if enable_prefix_caching else None
    return PagedKVCache(config, BlockPool(config.num_blocks), hasher)
