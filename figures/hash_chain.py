"""Two prompts with one word between them: their digests, the map, and the blocks they share."""

from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.prefix import build_cache
from pagedattn.viz.scenes import compute, small_config
from pagedattn.viz.script import run_script

PROMPTS = {
    "A": "You are a good cook . Tell me in one line how to boil an egg if I have no pan",
    "B": "You are a good cook . Tell me in one line how to fry an egg if I have no pan",
}


def draw() -> Figure:
    vocabulary = dict.fromkeys(" ".join(PROMPTS.values()).split())
    token_ids = {word: number for number, word in enumerate(vocabulary)}
    cache = build_cache(small_config(num_blocks=12), seed="a figure")
    for seq_id, prompt in PROMPTS.items():
        tokens = [token_ids[word] for word in prompt.split()]
        known = cache.add(seq_id, tokens)
        compute(cache, {seq_id: len(tokens) - known})
    words = {number: word for word, number in token_ids.items()}
    title = "One word differs, and from its block on every digest"
    return viz.draw_hash_chain(cache, "A", "B", words, title)


if __name__ == "__main__":
    run_script(__file__, draw)
