"""The length of a sequence is worked out from the number of its blocks.

A kernel wants to know how many tokens the last block holds, and derives the length as (blocks - 1)
* block_size + that number. In the field, a block reserved ahead for the next token already stood in
the list. Every 16th step the kernel saw 16 tokens too many, and as long as memory was fresh nobody
noticed: pegainfer-project/pegainfer#350.
"""

SYMPTOM = "16 slots of a block reserved ahead take part in the answer without a token in them"
KILLED_BY = ("test_paged_attention.py::test_a_block_reserved_ahead_is_not_attended_to",)


def apply(stage):
    library_attention = stage.paged_attention

    def paged_attention(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, spec):
        block_size = k_cache.shape[1]
        num_blocks = (block_table != 0).sum(1)
        in_last_block = (seq_lens - 1) % block_size + 1
        lengths = (num_blocks - 1) * block_size + in_last_block
        return library_attention(q, k_cache, v_cache, block_table, lengths, query_start_loc, spec)

    stage.paged_attention = paged_attention
