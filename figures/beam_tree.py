"""Four beams and nine steps of a real search: the tree of tokens, and the blocks under it."""

from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.sharing import Heir, build_cache
from pagedattn.viz.scenes import compute, small_config, start
from pagedattn.viz.script import run_script

PROMPT, NUM_PROMPT_TOKENS = "Once upon a time,", 5
# What SmolLM2-135M-Instruct chooses after it with four beams (pagedattn.model.beam_search): for
# each step, for each beam from the best on, the beam of the step before that it continues, and its
# token.
STEPS = (
    ("0000", ("the", "I", "a", "there")),
    ("3111", ("was", "was", "had", "used")),
    ("0321", ("a", "to", "a", "a")),
    ("0001", ("small", "town", "woman", "love")),
    ("2011", ("named", "town", "called", "named")),
    ("1011", ("nestled", "El", "called", "in")),
    ("0130", ("in", "ara", "the", "between")),
    ("0312", ("the", "two", "S", "Midwest")),
    ("0010", ("heart", "mountains", "great", "rolling")),
)


def draw() -> Figure:
    cache = build_cache(small_config(num_blocks=24))
    start(cache, PROMPT, NUM_PROMPT_TOKENS)
    tree = viz.BeamTree(PROMPT, NUM_PROMPT_TOKENS)
    for step, (parents, words) in enumerate(STEPS):
        names = "ABCD" if step == len(STEPS) - 1 else [f"{step}.{beam}" for beam in range(4)]
        heirs = [Heir(tree.alive[int(p)], name, 0) for p, name in zip(parents, names, strict=True)]
        cache.replace(tree.alive, heirs)
        compute(cache, dict.fromkeys(names, 1))
        tree.grow(heirs, words)
    return viz.draw_beam_tree(cache, tree, "Four beams share what they agree on")


if __name__ == "__main__":
    run_script(__file__, draw)
