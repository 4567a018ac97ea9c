"""Code of the goldens' specs: a book, users, an agent program with two threads, and the weights of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np

from engine.schemas.environment import EpisodeView, UserTurn
from engine.schemas.reward import RewardEvent


def read(page: int) -> str:
    """The text of a page, long enough that a few pages fill the context."""
    return f"page {page}: " + " ".join(f"w{page}x{word}" for word in range(20))


class Teacher:
    """Asks again until a reply has the answer, which it rewards."""

    def respond(self, view: EpisodeView) -> UserTurn:
        if "42" in view.reply:
            return UserTurn(satisfied=True, solved=True, rewards=[RewardEvent(name="correct", value=1.0, turn="last")])
        return UserTurn(content="No. Again?", rewards=[RewardEvent(name="wrong", value=-0.1, turn="last")])


class Broken:
    """A simulator that is down."""

    def respond(self, view: EpisodeView) -> UserTurn:
        raise RuntimeError("the simulator is down")


class Listener:
    """Rewards the share of vowels in each of two replies: a model of random weights learns it in a few steps."""

    def respond(self, view: EpisodeView) -> UserTurn:
        letters = [letter for letter in view.reply.lower() if letter.isalpha()]
        share = sum(letter in "aeiou" for letter in letters) / max(1, len(letters))
        return UserTurn(
            content="More.", satisfied=view.turn > 0, rewards=[RewardEvent(name="vowels", value=share, turn="last")]
        )


async def two_threads(task: dict[str, Any], base_url: str, key: str, model: str) -> dict[str, float]:
    """An agent program with two conversations, of which the first continues after the second has begun."""
    ask = {"role": "user", "content": task["fields"]["question"]}
    check = [{"role": "system", "content": "You check."}, {"role": "user", "content": "Is it 42?"}]
    async with httpx.AsyncClient(base_url=base_url, headers={"authorization": f"Bearer {key}"}) as client:

        async def reply(*messages: dict[str, Any]) -> dict[str, Any]:
            answer = await client.post("/chat/completions", json={"model": model, "messages": messages})
            answer.raise_for_status()
            message: dict[str, Any] = answer.json()["choices"][0]["message"]
            return message

        first = await reply(ask)
        verdict = await reply(*check)
        second = await reply(ask, first, {"role": "user", "content": "Sure?"})
        await reply(*check, verdict, {"role": "user", "content": "And now?"})
    return {"reward": float("42" in second["content"])}


def save_model(tokenizer: Path, folder: Path) -> Path:
    """A two-layer Qwen2 beside a tokenizer, with weights of NumPy's `RandomState`, whose numbers no version changes."""
    import shutil

    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=448, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    numbers = np.random.RandomState(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "norm" not in name:
                weight.copy_(torch.from_numpy(numbers.standard_normal(tuple(weight.shape)).astype(np.float32) * 0.4))
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    for file in tokenizer.iterdir():
        shutil.copy(file, folder)
    return folder
