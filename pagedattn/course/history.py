"""What a cache should remember of one sequence: its tokens, and Q, K and V of each of them."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import torch
from torch import Tensor

from pagedattn.cache import Config
from pagedattn.prefix.hashing import ExtraKeys


class History:
    """All tokens of one sequence: ids, and Q, K, V [num_layers, num_tokens, heads, head_dim].

    The numbers of a token look random, but they follow from it and from all that stands before it,
    as in a model: its prefix, the adapter, the images that have begun, the embeddings. The salt
    enters, too, though no model knows of it: who must not share then has other numbers.
    """

    def __init__(
        self,
        config: Config,
        num_heads: int,
        *,
        salt: str | bytes | None = None,
        extra_keys: ExtraKeys | None = None,
    ) -> None:
        self.config = config
        self.heads = [num_heads, config.num_kv_heads, config.num_kv_heads]
        self.salt = salt
        self.extra_keys = extra_keys or ExtraKeys()
        self.prefix = repr((salt, self.extra_keys.adapter)).encode()  # from it the next token
        self.token_ids: list[int] = []
        self.num_computed = 0
        self.q, self.k, self.v = (
            torch.empty(config.num_layers, 0, n, config.head_dim).to(config.device, config.dtype)
            for n in self.heads
        )

    def extend(self, token_ids: Iterable[int]) -> None:
        """The next tokens."""
        config, rows = self.config, []
        for token_id in token_ids:
            self.prefix = sha256(self.prefix + self._content(token_id)).digest()
            random = torch.Generator().manual_seed(int.from_bytes(self.prefix[:7], "big"))
            shape = (config.num_layers, 1, sum(self.heads), config.head_dim)
            rows.append(torch.randn(shape, generator=random, dtype=torch.float64))
            self.token_ids.append(token_id)
        if rows:
            more = torch.cat(rows, dim=1).to(config.device, config.dtype).split(self.heads, dim=2)
            self.q, self.k, self.v = (
                torch.cat(pair, dim=1) for pair in zip((self.q, self.k, self.v), more, strict=True)
            )

    def _content(self, token_id: int) -> bytes:
        """What comes in with the next token."""
        keys, position = self.extra_keys, len(self.token_ids)
        images = [image.identifier for image in keys.images if image.offset == position]
        embeds: list[Tensor | list[float]] = []
        if keys.prompt_embeds is not None:
            embeds = keys.prompt_embeds[position : position + 1].tolist()
        return repr((token_id, images, embeds)).encode()
