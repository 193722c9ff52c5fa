"""The manager: which blocks a request gets, keeps and gives back, in all groups at once.

A scheduler asks two things about each request. How much of it is in the cache already
(``get_computed_blocks``)? Is there room for its next tokens (``allocate_slots``)? What differs
between kinds of layers is in the single-type managers, which the coordinator asks in the order of
the groups.

Blocks are registered when slots are given, before the model has run, so a request that is scheduled
later in the same step shares them already. If the step then runs without the first request, the
others have a hole in their tables; ``abort`` undoes both.

Source: ``vllm/v1/core/kv_cache_manager.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import gcd

from pagedattn.prefix import KVCacheBlock
from pagedattn.whole_number import at_least_1, whole_number

from .abort import abort
from .blocks import KVCacheBlocks
from .config import KVCacheConfig
from .coordinator import get_kv_cache_coordinator
from .events import KVCacheEvent
from .invariants import check_invariants
from .limits import Limits
from .pool import BlockPool
from .request import Request
from .residency import BlockMetricsCollector
from .slot_checks import check_request, check_slots, check_tokens_to_register
from .specs import CrossAttentionSpec, FullAttentionSpec, MambaSpec
from .statistics import PrefixCacheStats

_NO_OTHERS = 0, 0, 0, 0


class KVCacheManager:
    """Block tables of all requests, by group, over one pool.

    ``hash_block_size`` (tokens) is that of the requests' hashers; by default the greatest that
    divides the blocks of all groups. With ``use_eagle`` a hit is one block shorter, because the
    draft model needs hidden states of its last tokens: in ``eagle_groups``, or in all groups if
    none is named. ``log_stats`` counts hits, ``metrics`` watches blocks, ``enable_events`` collects
    events. ``collect_new_block_ids`` is for models whose new blocks must be cleared; by default
    these are the ones with Mamba layers.

    Raises ValueError for groups that cannot be managed together.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        limits: Limits,
        *,
        hash_block_size: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        eagle_groups: Collection[int] = (),
        enable_events: bool = False,
        log_stats: bool = True,
        metrics: BlockMetricsCollector | None = None,
        collect_new_block_ids: bool | None = None,
    ) -> None:
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        if hash_block_size is None:
            hash_block_size = gcd(*(s.block_size * limits.context_parallel_size for s in specs))
        else:
            at_least_1(hash_block_size, "hash_block_size")
        self.hash_block_size = hash_block_size
        self.enable_caching = enable_caching
        self.max_model_len = limits.max_model_len
        self.pool = BlockPool(
            config.num_blocks,
            enable_caching=enable_caching,
            enable_events=enable_events,
            metrics=metrics,
        )
        if collect_new_block_ids is None:
            collect_new_block_ids = any(isinstance(spec, MambaSpec) for spec in specs)
        self.collect_new_block_ids = collect_new_block_ids
        self.coordinator = get_kv_cache_coordinator(
            config,
            self.pool,
            limits,
            enable_caching=enable_caching,
            hash_block_size=hash_block_size,
            use_eagle=use_eagle,
            eagle_groups=eagle_groups,
            collect_new_block_ids=collect_new_block_ids,
        )
        self._managers = self.coordinator.single_type_managers
        # Whose tables tell how many slots a request has; those of cross-attention do not.
        self._positional = next((m for m in self._managers if not m.is_cross_attention), None)
        # Of full and cross-attention no token is ever out of reach.
        self._managers_that_skip = [
            manager
            for manager in self._managers
            if not isinstance(manager.spec, FullAttentionSpec | CrossAttentionSpec)
        ]
        self.stats = PrefixCacheStats() if log_stats else None
        self._no_blocks = KVCacheBlocks(tuple(() for _ in specs))

    # A step of a request.

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The blocks of the longest beginning that is cached, and how many tokens they hold.

        At least the last token is left to compute, because the model must give scores for it.
        Nothing changes but the statistics. What is found may be evicted by the next allocation, so
        it belongs into the next call of ``allocate_slots``.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self._no_blocks, 0
        hits, num_hits = self.coordinator.find_longest_cache_hit(
            request.block_hashes, max(request.num_tokens - 1, 0)
        )
        if self.stats is not None:
            preempted = request.num_preemptions > 0
            self.stats.record(request.num_tokens, num_hits, preempted=preempted)
        return (KVCacheBlocks(hits) if num_hits else self._no_blocks), num_hits

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
    ) -> KVCacheBlocks | None:
        """Slots for the next tokens of a request. Five kinds of tokens follow one another::

            computed | new computed | external | new | lookahead

        ``new computed`` tokens are a hit, as ``get_computed_blocks`` found it. ``external`` ones
        are computed elsewhere, and loaded into slots that they get here. ``new`` ones are computed
        in this step, drafts among them; behind them the draft model writes ``lookahead`` tokens.

        Returns the new blocks by group: without hits, and without blocks of external tokens. Full
        blocks are registered up to the last new token that the request knows, so drafts never are.
        With ``delay_cache_blocks`` nothing is, until ``cache_blocks`` is called.

        Returns None if too few blocks are free for these tokens, or, with ``full_sequence_must_
        fit``, for all tokens of the request. Then everything is as before, except that blocks which
        have left a window may be free: the request does not need them any more, refused or not.

        Raises ValueError if there is nothing to give slots for, for a number below 0, for external
        tokens behind ``max_model_len``, for computed tokens that have no slots, and for hits that
        cannot be taken: of another number of groups or tokens, of other tokens, evicted, or for a
        request that has blocks; and, with caching on, for a request without digests. Then nothing
        has changed.
        """
        hits: Sequence[Sequence[KVCacheBlock]] = ()
        if new_computed_blocks is not None and new_computed_blocks is not self._no_blocks:
            hits = new_computed_blocks.blocks
        num_hits, num_external = num_new_computed_tokens, num_external_computed_tokens
        others = num_hits, num_external, num_lookahead_tokens, num_encoder_tokens
        if type(num_new_tokens) is not int or num_new_tokens < 1 or hits or others != _NO_OTHERS:
            check_slots(request, self._managers, hits, self.max_model_len, num_new_tokens, *others)
        coordinator, request_id = self.coordinator, request.request_id
        num_before = request.num_computed_tokens
        if self._positional is not None:
            table = self._positional.req_to_blocks.get(request_id, ())
            num_held = len(table) * self._positional.block_size
            if type(num_before) is not int or not 0 <= num_before <= num_held or not table:
                hash_block_size = self.hash_block_size if self.enable_caching else None
                check_request(request, num_held, hash_block_size)
        free_queue, max_model_len = self.pool.free_queue, self.max_model_len

        # Where each kind of tokens ends. To compare is quicker than min().
        num_local = num_before + num_new_computed_tokens
        num_computed = num_local + num_external_computed_tokens
        if num_computed > max_model_len:
            num_computed = max_model_len
        num_main = num_computed + num_new_tokens
        num_slots = num_main + num_lookahead_tokens
        if num_slots > max_model_len:
            num_slots = max_model_len
        num_to_cache = 0
        if self.enable_caching and not delay_cache_blocks:
            num_to_cache = len(request.token_ids)
            if num_to_cache > num_main or num_to_cache > max_model_len:
                num_to_cache = min(num_main, max_model_len)

        if full_sequence_must_fit:
            num_all = min(len(request.token_ids), max_model_len)
            all_needed = (request_id, num_all, hits, num_encoder_tokens, num_computed, num_all)
            num_needed = coordinator.get_num_blocks_to_allocate(
                *all_needed, apply_admission_cap=True
            )
            if num_needed > len(free_queue):
                return None
        for manager in self._managers_that_skip:
            manager.remove_skipped_blocks(request_id, num_computed)
        num_needed = coordinator.get_num_blocks_to_allocate(
            request_id, num_slots, hits, num_encoder_tokens, num_computed, num_main
        )
        if num_needed > len(free_queue):
            return None

        if num_external_computed_tokens or any(hits):
            coordinator.allocate_new_computed_blocks(
                request_id, hits, num_local, num_external_computed_tokens
            )
        new_blocks = self._no_blocks
        if num_needed:
            new_blocks = KVCacheBlocks(
                coordinator.allocate_new_blocks(request_id, num_slots, num_main, num_encoder_tokens)
            )
        if num_to_cache:
            for manager in self._managers:
                manager.cache_blocks(request, num_to_cache)
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Register the full blocks of the first ``num_tokens`` tokens, which are computed or
        loaded. Does nothing with caching off. Raises ValueError for tokens that have no slots or
        no digests."""
        if self.enable_caching:
            check_tokens_to_register(request, self._managers, num_tokens)
            registered, request_id = self.pool.registered_in_step, request.request_id
            num_before = len(registered.get(request_id, ()))
            self.coordinator.cache_blocks(request, num_tokens)
            del registered.get(request_id, [])[num_before:]  # an abort has nothing to undo here

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Free the blocks that no token behind ``num_computed_tokens`` attends to."""
        whole_number(num_computed_tokens, "num_computed_tokens")
        self.coordinator.remove_skipped_blocks(request_id, num_computed_tokens)

    def free(self, request: Request) -> None:
        """Give back all blocks of a request, the last one first; they can still be found.

        Does nothing for a request that has none. For a request that was given slots in a step which
        has not run there is ``abort``.
        """
        self.pool.registered_in_step.pop(request.request_id, None)
        for manager in self._managers:
            manager.free(request.request_id)

    def abort(self, request: Request) -> list[str]:
        """Give back all blocks of a request that leaves the step before it has run.

        It is cancelled, or preempted for another one, after it was given slots. What it registered
        in this step holds nothing and never will, so these digests are forgotten; older ones stay.
        A request that hit them in this step has blocks that nobody computes. It loses all its
        blocks, too, and so do those that hit its own: they start anew, with 0 computed tokens.

        Returns the ids of these others. A step is what lies between two calls of ``new_step_
        starts``; hits that were found and not used yet must be looked up again.
        """
        return abort(request.request_id, self.pool, self._managers)

    def new_step_starts(self) -> None:
        """What was registered in the step before is computed now."""
        self.pool.registered_in_step.clear()
        self.coordinator.new_step_starts()

    # Digests.

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the digests of these blocks, in use or free. Raises ValueError for an id outside
        the pool; then nothing has changed."""
        self.pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> None:
        """Forget every digest, as one must when the weights change. Raises ValueError while a block
        is in use; then nothing has changed."""
        self.pool.reset_prefix_cache()
        if self.stats is not None:
            self.stats.reset = True

    # What can be asked.

    @property
    def usage(self) -> float:
        """The share of the usable blocks that is in use, 0 to 1."""
        return self.pool.usage

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The tables of a request; empty ones if it has none."""
        return KVCacheBlocks(self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The ids in the tables of a request, 0 for the null block."""
        return self.get_blocks(request_id).get_block_ids()

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """By group: how many blocks at the beginning of its table all requests share that have
        blocks. Only full attention makes use of it; other groups say 0."""
        return self.coordinator.get_num_common_prefix_blocks(request_id)

    def take_new_block_ids(self) -> list[int]:
        """The ids that full-attention groups took since the last call.

        Raises ValueError where they are not collected: they would pile up for ever in a model whose
        blocks need no clearing.
        """
        if not self.collect_new_block_ids:
            raise ValueError("ids of new blocks are not collected; collect_new_block_ids is off")
        return self.coordinator.take_new_block_ids()

    def take_events(self) -> list[KVCacheEvent]:
        """What happened to digests since the last call; nothing if events are off."""
        return self.pool.take_events()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """The look-ups since the last call; None if they are not counted."""
        stats = self.stats
        if stats is not None:
            self.stats = PrefixCacheStats()
        return stats

    def check_invariants(self) -> None:
        """Raises InvariantError if pool, tables and groups contradict one another; what is checked
        stands in ``invariants``."""
        check_invariants(self.pool, self._managers)
