"""A Hugging Face model on our pages: an attention function and a cache class for ``transformers``.

    from pagedattn.hugging_face import PagedCache

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="pagedattn")
    cache = PagedCache(model.config, num_blocks=1000)
    model.generate(**tokenizer(prompts, padding=True, ...), past_key_values=cache)

In every layer a decoder of ``transformers`` hands new K and V to ``cache.update``, and what that
returns to the attention function that the configuration names. Its own caches return K and V of the
whole batch as one tensor, [batch, heads, longest sequence, head_dim]. Ours returns the new ones
alone, with a note of the cache. The attention function stores them in pages and attends through
the block tables: chapter 05's kernels on a GPU, chapter 02's torch code elsewhere.

A row of the batch is a sequence. Padding takes no slot: what the attention mask hides is not
stored.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from .attention import padding_mask, paged_attention_forward
from .cache import NAME, PagedCache

__all__ = ["NAME", "PagedCache", "padding_mask", "paged_attention_forward"]

AttentionInterface.register(NAME, paged_attention_forward)
AttentionMaskInterface.register(NAME, padding_mask)
