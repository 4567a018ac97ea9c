"""What the rows of all frameworks share: tasks, a scripted sampler that records what it gave, and a tiny model's files.

The sampler stands where a server would: it gets prompt ids and gives ids with log-probs. Its replies are the same for every framework:

- sample 0: the right answer, as the tokenizer encodes it;
- sample 1: the right answer with one word in two tokens, as samplers give them at times;
- sample 2: a reply that is cut at the length limit, without a stop token;
- sample 3: a wrong answer.

In a setting with several turns, replies before the last one are `asks` (a tool call, or a first wrong answer), with the same four kinds.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

TASKS = [("17 + 25", "42"), ("8 * 7", "56")]
SAMPLES = 4
OPENINGS = ("Adding carefully", "Counting slowly", "Thinking aloud", "Guessing quickly")
"""How the replies of each sample begin, so that no two samples have the same text."""
STOPS = {"qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3_1": "<|eot_id|>", "gemma3": "<end_of_turn>"}
"""The token that ends a reply, by the name of the template."""
PADS = {"qwen2_5": "<|endoftext|>", "qwen3": "<|endoftext|>", "llama3_1": "<|end_of_text|>", "gemma3": "<pad>"}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_5": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 4},
    "llama3_1": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "gemma3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 4,
        "query_pre_attn_scalar": 4,
    },
}
"""Configurations of tiny models; frameworks read the family from them."""


def model_folder(template: str, tokenizers: Path, out: Path) -> Path:
    """A folder with a real tokenizer and the configuration of a tiny model of its family."""
    folder = out / "models" / template
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizers / template / name, folder / name)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings |= {"eos_token": STOPS[template], "pad_token": PADS[template]}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        added = {
            token: int(id_) for id_, each in settings["added_tokens_decoder"].items() for token in [each["content"]]
        }
        size = {"qwen2_5": 151936, "qwen3": 151936, "llama3_1": 128256, "gemma3": 262208}[template]
        config = {
            "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
            "vocab_size": size, "max_position_embeddings": 4096, "eos_token_id": added[STOPS[template]], "pad_token_id": added[PADS[template]],
            "tie_word_embeddings": True, "torch_dtype": "float32",
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config | MODELS[template]))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": added[STOPS[template]]}))
    return folder


def prompt_of(task: int) -> list[dict[str, str]]:
    """The messages of a task."""
    return [
        {"role": "system", "content": "Answer with one number."},
        {"role": "user", "content": f"What is {TASKS[task][0]}?"},
    ]


def right(task: int, text: str) -> float:
    """The reward: 1 for a text that ends with the answer."""
    return float(TASKS[task][1] in text[-40:])


class Sampler:
    """Gives scripted replies, and records them.

    Args:
        tokenizer: The model's tokenizer.
        template: The template's name.
        asks: The texts of the replies before the last one.
        limit: The most tokens of a reply; sample 2 reaches it in its last reply.
        ends: Texts that end a reply in place of the stop token (stop strings).
        final: The last reply.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        asks: list[str] | None = None,
        limit: int = 24,
        ends: tuple[str, ...] = (),
        final: str = "the answer is {answer}.",
    ) -> None:
        self.tokenizer = tokenizer
        self.stop = tokenizer.convert_tokens_to_ids(STOPS[template])
        self.asks = asks or []
        self.limit = limit
        self.ends = ends
        self.final = final
        self.replies: list[dict[str, Any]] = []

    def encode(self, text: str) -> list[int]:
        """Text -> ids, nothing added."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def reply(
        self, prompt_ids: list[int], task: int, sample: int, turn: int
    ) -> tuple[list[int], list[float], str, list[int]]:
        """One reply: ids, log-probs, the reason of its end (`stop` or `length`), and the weight version of each token."""
        last = turn >= len(self.asks)
        if last:
            answer = TASKS[task][1] if sample != 3 else "41"
            text = self.final.format(answer=answer)
        else:
            text = self.asks[turn].format(expression=TASKS[task][0])
        text = f"{OPENINGS[sample]}: {text}"
        ids, finish = self.encode(text), "stop"
        if sample == 1:
            ids = self.unusual(ids)
        if last and sample == 2:
            ids, finish = (ids * self.limit)[: self.limit], "length"
        elif not text.endswith(self.ends or ("\0",)):
            ids = [*ids, self.stop]
        versions = [3 + turn] * len(ids)
        self.replies.append({"prompt_ids": list(prompt_ids), "output_ids": list(ids), "finish": finish})
        return ids, [-0.25 - 0.01 * (at % 10) for at in range(len(ids))], finish, versions

    def unusual(self, ids: list[int]) -> list[int]:
        """The same text, with the first word that allows it in two tokens."""
        for at, id_ in enumerate(ids):
            text = self.tokenizer.decode([id_])
            for cut in range(2, len(text) - 1):
                parts = self.encode(text[:cut]) + self.encode(text[cut:])
                split = [*ids[:at], *parts, *ids[at + 1 :]]
                if len(parts) == 2 and self.tokenizer.decode(split) == self.tokenizer.decode(ids):
                    return split
        raise AssertionError("no token of this reply can be split")

    def write(self, path: Path) -> None:
        """Write the record: JSON lines with `output_ids`."""
        path.write_text("".join(json.dumps(reply) + "\n" for reply in self.replies), encoding="utf-8")


def load(folder: Path) -> Any:
    """The tokenizer of a folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def cli() -> tuple[Path, Path, list[str]]:
    """The arguments of a maker: the folder of tokenizers, the output folder, the names of templates."""
    import sys

    tokenizers, out, *templates = sys.argv[1:]
    return Path(tokenizers), Path(out), templates


def write_about(
    out: Path, framework: str, template: str, settings: dict[str, str], versions: dict[str, str], failed: dict[str, str]
) -> None:
    """Write what was made: the file of each setting, versions, and settings that the framework refused."""
    folder = out / framework / template
    folder.mkdir(parents=True, exist_ok=True)
    about = {"framework": framework, "template": template, "settings": settings, "versions": versions, "failed": failed}
    (folder / "about.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
