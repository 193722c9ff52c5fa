"""Record beam searches of ``transformers`` with the default model, into beam_search.json.

    python tests/data/record_beam_search.py

Ten prompts, three widths, three length penalties, the three modes of early stopping. The ten
prompts of a setting are one batch, padded on the left; a search ends for itself, whatever its
neighbours do. A prompt's hypotheses are many times the same: they are kept once, in ``answers``,
and a run is a list of [index of the answer, score], the best first.
"""

import itertools
import json
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from record_transformers import load_reference  # type: ignore[import-not-found]

from pagedattn.model import default_model_path

NEW_TOKENS = 24
END_TOKEN = 2
WIDTHS = (2, 4, 8)
PENALTIES = (0.6, 1.0, 1.4)
MODES: tuple[bool | str, ...] = (True, False, "never")
FILE = Path(__file__).with_name("beam_search.json")
QUESTIONS = (
    "What is 2+2?",
    "What is the capital of France?",
    "Say hello.",
    "Is water wet? Answer yes or no.",
    "Name a colour.",
    "Which animal says meow? Answer in one word.",
    "Finish this: one, two, three,",
    "Who wrote Hamlet?",
    "Thanks!",
)
TEXT = "The old bridge was closed"


def all_prompts() -> list[str]:
    """Questions in a chat, whose answers may end early, and a text that runs on."""
    chats = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
    return [*chats, TEXT]


@torch.inference_mode()
def search(
    model: Any, prompts: list[list[int]], width: int, length_penalty: float, mode: bool | str
) -> list[list[tuple[list[int], float]]]:
    """For each prompt its hypotheses, the best first: their tokens and scores."""
    from transformers import GenerationConfig

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=length_penalty,
        early_stopping=mode,
        do_sample=False,
        eos_token_id=END_TOKEN,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    out = model.generate(ids, attention_mask=mask, generation_config=settings)
    # Behind its end a sequence is filled up; its beam indices are -1 there.
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    rows = [
        (tokens[longest : longest + length], score)
        for tokens, length, score in zip(
            out.sequences.tolist(), lengths, out.sequences_scores.tolist(), strict=True
        )
    ]
    return [rows[i * width : (i + 1) * width] for i in range(len(prompts))]


def main() -> None:
    model, tokenizer = load_reference()
    texts = all_prompts()
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    answers: list[list[list[int]]] = [[] for _ in prompts]
    runs = []
    for width, length_penalty, mode in itertools.product(WIDTHS, PENALTIES, MODES):
        found = search(model, prompts, width, length_penalty, mode)
        for index, hypotheses in enumerate(found):
            listed = []
            for tokens, score in hypotheses:
                if tokens not in answers[index]:
                    answers[index].append(tokens)
                listed.append([answers[index].index(tokens), round(score, 6)])
            runs.append(
                {
                    "prompt": index,
                    "width": width,
                    "length_penalty": length_penalty,
                    "early_stopping": mode,
                    "hypotheses": listed,
                }
            )
        print(f"width {width}, length penalty {length_penalty}, early stopping {mode}", flush=True)
    recorded = {
        "command": "python tests/data/record_beam_search.py",
        "date": date.today().isoformat(),
        "model": default_model_path().name,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "accelerate", "gguf")},
        },
        "max_new_tokens": NEW_TOKENS,
        "end_token": END_TOKEN,
        "prompts": [
            {"text": text, "token_ids": token_ids, "answers": listed}
            for text, token_ids, listed in zip(texts, prompts, answers, strict=True)
        ],
        "runs": runs,
    }
    FILE.write_text(json.dumps(recorded, ensure_ascii=False, indent=None) + "\n")


if __name__ == "__main__":
    main()
