"""A witness of a cache whose layers lie in several groups, each with a block table of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pagedattn.attention import AttentionSpec
from pagedattn.cache import SeqId
from pagedattn.course.history import History
from pagedattn.course.witness import Witness


def layers_with_windows(*windows: int | None) -> dict[str, Any]:
    """The options of a cache with one layer for each window; None sees everything."""
    specs = tuple(AttentionSpec(window=window) for window in windows)
    return {"num_layers": len(specs), "layer_specs": specs}


class GroupsWitness(Witness):
    """As `Witness`; a layer with a window needs to find no more than the window."""

    def begin(self, seq_id: SeqId, num_tokens: int, chunk: int = 100) -> None:
        """A sequence of random tokens, all of them found or computed, so many in a step."""
        self.add(seq_id, num_tokens)
        while waiting := self.waiting(seq_id):
            self.step({seq_id: min(chunk, waiting)})

    def check_contents(self) -> None:
        """Through the table of its group every layer finds K and V of all computed tokens that the
        next token can see, bit by bit."""
        for seq_id, history in self.histories.items():
            for layer in range(self.config.num_layers):
                table = self.cache.block_ids(seq_id)[self.cache.group_of_layer[layer]]
                first = self.first_visible(history, layer)
                for position in range(first, history.num_computed):
                    block_id = table[position // self.config.block_size]
                    slot = (block_id, position % self.config.block_size)
                    where = (
                        f"sequence {seq_id!r}, layer {layer}, position {position}, block {block_id}"
                    )
                    assert block_id != 0, f"{where}: a token that can be seen is gone; {self!r}"
                    for name, cache, right in zip(
                        "KV", self.cache.layers[layer], (history.k, history.v), strict=True
                    ):
                        assert torch.equal(cache[slot], right[layer, position]), (
                            f"{where}: {name} is not what was stored there; {self!r}"
                        )

    def first_visible(self, history: History, layer: int) -> int:
        """The first position that the next token of a sequence sees in a layer."""
        window = self.config.layer_specs[layer].window
        return 0 if window is None else max(0, history.num_computed + 1 - window)

    def _num_used_slots(self) -> int:
        return len(set(self._used_slots()))

    def _used_slots(self) -> Iterator[tuple[int, int]]:
        for seq_id, history in self.histories.items():
            for table in self.cache.block_ids(seq_id):
                for position in range(history.num_computed):
                    block, offset = divmod(position, self.config.block_size)
                    if table[block] != 0:
                        yield table[block], offset
