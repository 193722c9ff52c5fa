"""Record what ``transformers`` answers with the default model, into transformers.json.

    python tests/data/record_transformers.py

transformers reads the GGUF file by itself (it needs ``accelerate`` for that): nothing of the model
under test takes part. Recorded for every prompt: its tokens; 64 greedy tokens; the log-sum-exp of
the logits at every position, which depends on all scores of the row; and of the last row every
64th score.
"""

import json
import platform
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pagedattn.model import default_model_path

NEW_TOKENS = 64
EVERY = 64
FILE = Path(__file__).with_name("transformers.json")
PROMPTS = [
    "The old bridge was closed",
    "Dear Ms. Núñez, your naïve façade of a café — très chic! — has been reviewed by",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Question: what is 17+25? Answer: 17+25=42. Question: what is 123+456? Answer:",
    "<|im_start|>system\nYou answer in one sentence.<|im_end|>\n<|im_start|>user\n"
    "Why is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "日本語の文章とемодзи 🙂🎉 mixed with English words, tabs\tand   several   spaces, because "
    "a vocabulary of bytes must carry them all. The translation of the first three signs is",
    "for (let i = 0; i < items.length; i++) {\n  const item = items[i];\n  if (!item.done) {\n"
    "    queue.push({ id: item.id, cost: item.cost });\n  }\n}\n\n// The loop above walks over all "
    "items and keeps the unfinished ones. The next function takes the cheapest of them out of the "
    "queue, and returns null when the queue is empty.\nfunction takeCheapest(queue) {\n",
    "The harbour master kept two ledgers. In the first he wrote which ship lay at which pier, and "
    "in the second which piers were empty. Every morning he compared them, because a pier that "
    "stood in both, or in neither, meant that somebody had made a mistake during the night. One "
    "winter the river froze, and ships that had planned to stay for a day stayed for a month. The "
    "first ledger grew long and the second one short. Captains who arrived late were sent away, "
    "although half of the piers held boats that were far too small for them: a pier had been "
    "promised to each captain in full, whatever the size of the boat that came. The harbour "
    "master's apprentice, who had nothing to do but to watch the ice, proposed to cut the long "
    "piers into short ones, each wide enough for a rowing boat. A large ship would simply be given "
    "several of them, and they did not even have to lie side by side, since the cargo was carried "
    "ashore in small crates anyway. A third ledger would say, for each ship, which short piers "
    "were hers, and in which order the crates were to be stacked. The harbour master thought "
    "about it for a long time. He asked what would happen if two captains claimed the same pier, "
    "and who would notice a pier that nobody had given back. Then he took his pen, turned to a new "
    "page, and began in his slow, very careful hand to write down the rules of",
]


def load_reference() -> tuple[Any, Any]:
    """The model and the tokenizer as ``transformers`` reads them from the GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = default_model_path()
    options = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
    model.generation_config.eos_token_id = None  # 64 tokens for every prompt
    return model.eval(), AutoTokenizer.from_pretrained(path.parent, **options)


@torch.inference_mode()
def answer(model: Any, token_ids: list[int]) -> dict[str, Any]:
    """What is recorded of one prompt."""
    from transformers import GenerationConfig

    ids = torch.tensor([token_ids])
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    # The mask must be given: without it the padding token, which also ends a turn, hides tokens.
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    logits = model(ids).logits[0]
    return {
        "token_ids": token_ids,
        "greedy": out[0, len(token_ids) :].tolist(),
        "logsumexp": [round(x, 5) for x in logits.double().logsumexp(-1).tolist()],
        "last_row": [round(x, 5) for x in logits[-1, ::EVERY].tolist()],
    }


def main() -> None:
    model, tokenizer = load_reference()
    recorded = {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "model": default_model_path().name,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "accelerate", "gguf")},
        },
        "prompts": [
            {"text": text, **answer(model, tokenizer(text, add_special_tokens=False)["input_ids"])}
            for text in PROMPTS
        ],
    }
    FILE.write_text(json.dumps(recorded, ensure_ascii=False, indent=None) + "\n")


if __name__ == "__main__":
    main()
