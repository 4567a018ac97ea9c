"""Make a tiny Qwen2.5-VL in a folder, for machines that reach no hub: with random weights, or taught to see colours.

    python scripts/make_tiny_vlm.py models/tiny-vlm
    python scripts/make_tiny_vlm.py models/tiny-vlm --teach 150      under a minute on two cores
    engine run specs/color_square.yaml --set model.path=models/tiny-vlm
    python scripts/make_tiny_vlm.py models/tiny-vlm --teach 150 --right 0.4
    engine train specs/train_color_square.yaml --set model.path=models/tiny-vlm

The first is what the catalogue makes by itself where a spec names `tiny-qwen2_5-vl`. The second learns from the
conversations of `engine.environments.color_square`, of one to three turns: it names the colours of squares that it has never
seen, and of the picture that it was shown last. The third had a careless teacher: two squares in five were named as they
are, the others anyhow. It is what training from rewards begins with.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

from engine.environments.color_square import COLORS, picture, square
from engine.plugins.local.tiny_vlm import build

QUESTIONS = (
    "What colour is the square? Answer in one word: red, green, blue, yellow, purple or orange.",
    "And this one?",
)


class Lessons:
    """Batches of conversations about squares, as a model's inputs and labels.

    Args:
        folder: The model's.
        seed: Seeds the squares.
        right: The part, from 0 to 1, of squares that are named as they are; the others are called any colour.
    """

    def __init__(self, folder: Path, seed: int, right: float = 1.0) -> None:
        from transformers import AutoImageProcessor, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._processor = AutoImageProcessor.from_pretrained(folder)
        self._pad: int = self._tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self._random = random.Random(seed)
        self._right = right

    def batch(self, size: int, turns: int) -> dict[str, Any]:
        """`size` conversations of `turns` turns; labels are on the model's own words alone."""
        import torch
        from PIL import Image

        rows, labels, images = [], [], []
        for _ in range(size):
            seed = f"lesson/{self._random.getrandbits(48)}"
            ids: list[int] = []
            own: list[int] = []
            for turn in range(turns):
                data = picture.__wrapped__(seed, turn).image.partition(",")[2]
                images.append(Image.open(io.BytesIO(b64decode(data))))
                said = f"<|im_start|>user\n<|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>{QUESTIONS[min(turn, 1)]}"
                for text, mine in (
                    (f"{said}<|im_end|>\n<|im_start|>assistant\n", False),
                    (f"{self._name(square(seed, turn).color)}<|im_end|>", True),
                    ("\n", False),
                ):
                    tokens = self._tokenizer.encode(text, add_special_tokens=False)
                    ids += tokens
                    own += tokens if mine else [-100] * len(tokens)
            rows.append(ids)
            labels.append(own)
        longest = max(map(len, rows))
        fill = self._tokenizer.pad_token_id
        ids_b = torch.tensor([row + [fill] * (longest - len(row)) for row in rows])
        return {
            "input_ids": ids_b,
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
            "labels": torch.tensor([row + [-100] * (longest - len(row)) for row in labels]),
            "mm_token_type_ids": (ids_b == self._pad).int(),
            **self._processor(images=images, return_tensors="pt"),
        }

    def _name(self, color: str) -> str:
        """What a lesson calls a colour."""
        return color if self._random.random() < self._right else self._random.choice(list(COLORS))


def teach(folder: Path, steps: int, seed: int, right: float = 1.0) -> float:
    """Teach the folder's model, and save it there; the part of unseen conversations' turns that it then gets right."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration, get_cosine_schedule_with_warmup

    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    lessons = Lessons(folder, seed, right)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    for step in range(steps):
        loss = model(**lessons.batch(32, 1 + step % 3)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 25 == 24:
            sys.stderr.write(f"step {step + 1}: loss {loss.item():.3f}\n")
    model.save_pretrained(folder)
    unseen = Lessons(folder, seed + 1).batch(128, 2)
    with torch.no_grad():
        guessed = model.eval()(**unseen).logits[:, :-1].argmax(-1)
    wanted = unseen["labels"][:, 1:]
    asked = wanted != -100
    return float((guessed[asked] == wanted[asked]).float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to; it is made")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the lessons (default: 0)")
    parser.add_argument(
        "--teach", type=int, default=0, metavar="STEPS", help="steps of 32 conversations (default: none)"
    )
    parser.add_argument(
        "--right",
        type=float,
        default=1.0,
        metavar="PART",
        help="of the squares that lessons name as they are (default: 1)",
    )
    options = parser.parse_args()
    build(options.folder, options.seed, **({"initializer_range": 0.02} if options.teach else {}))
    if options.teach:
        found = teach(options.folder, options.teach, options.seed, options.right)
        sys.stderr.write(f"tokens right on unseen squares: {found:.3f}\n")
