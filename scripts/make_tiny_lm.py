"""Make a tiny language model in a folder: with random weights, or taught to answer in a sorting office.

    python scripts/make_tiny_lm.py models/tiny-lm
    python scripts/make_tiny_lm.py models/tiny-lm --teach 200      ten seconds on one core
    engine train specs/train_credit.yaml --set model.path=models/tiny-lm

The first is what the catalogue makes by itself where a spec names `tiny-qwen2`. The second has learned to read and to
answer from conversations of `engine.environments.parcels`: it names the parcel's town, then a gate at random, for the lessons
name gates at random. Which gate is right it learns from rewards alone.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from engine.environments.parcels import GATES, said
from engine.plugins.local.tiny_lm import build

LETTERS = sorted(set(GATES.values()))


class Lessons:
    """Batches of conversations about parcels, as a model's inputs and labels."""

    def __init__(self, folder: Path, seed: int) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._random = random.Random(seed)

    def batch(self, size: int, turns: int) -> dict[str, Any]:
        """`size` conversations of `turns` turns; labels are on the model's own words alone."""
        import torch

        rows = [self._conversation(turns) for _ in range(size)]
        longest = max(len(ids) for ids, _ in rows)
        fill = self._tokenizer.pad_token_id
        return {
            "input_ids": torch.tensor([ids + [fill] * (longest - len(ids)) for ids, _ in rows]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
            "labels": torch.tensor([own + [-100] * (longest - len(own)) for _, own in rows]),
        }

    def _conversation(self, turns: int) -> tuple[list[int], list[int]]:
        """One conversation's tokens, and the same with -100 where they are not the model's own."""
        ids: list[int] = []
        own: list[int] = []
        for turn in range(turns):
            town = self._random.choice(list(GATES))
            words = said(town) if turn == 0 else f"{self._random.choice(['Sent', 'Lost'])}. {said(town)}"
            for text, mine in (
                (f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n", False),
                (f"{town} {self._random.choice(LETTERS)}<|im_end|>", True),
                ("\n", False),
            ):
                tokens = self._tokenizer.encode(text, add_special_tokens=False)
                ids += tokens
                own += tokens if mine else [-100] * len(tokens)
        return ids, own


def teach(folder: Path, steps: int, seed: int) -> float:
    """Teach the folder's model, and save it there; the part of unseen parcels whose town it then names."""
    import torch
    from transformers import Qwen2ForCausalLM, get_cosine_schedule_with_warmup

    torch.manual_seed(seed)
    model = Qwen2ForCausalLM.from_pretrained(folder)
    lessons = Lessons(folder, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    for step in range(steps):
        loss = model(**lessons.batch(32, 1 + step % 4)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            sys.stderr.write(f"step {step + 1}: loss {loss.item():.3f}\n")
    model.save_pretrained(folder)
    unseen = Lessons(folder, seed + 1).batch(128, 4)
    with torch.no_grad():
        guessed = model.eval()(**unseen).logits[:, :-1].argmax(-1)
    wanted = unseen["labels"][:, 1:]
    towns = (wanted != -100) & (unseen["labels"][:, :-1] == -100)  # the first word of each reply
    return float((guessed[towns] == wanted[towns]).float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to; it is made")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the lessons (default: 0)")
    parser.add_argument(
        "--teach", type=int, default=0, metavar="STEPS", help="steps of 32 conversations (default: none)"
    )
    options = parser.parse_args()
    build(options.folder, options.seed)
    if options.teach:
        sys.stderr.write(f"towns named: {teach(options.folder, options.teach, options.seed):.3f}\n")
