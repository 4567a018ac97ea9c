"""The real tokenizers that ship with the tests."""

from __future__ import annotations

import importlib.resources
import json
import lzma
import shutil
from pathlib import Path

TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"


def unpack(name: str, folder: Path) -> Path:
    """A shipped tokenizer with its chat template, as a folder that transformers loads.

    `qwen2_5_vl` is the tokenizer of `qwen2_5` with the processor and the chat template of Qwen2.5-VL, the latter as the
    package trl ships it.
    """
    made = folder / name
    if made.exists():
        return made
    made.mkdir(parents=True)
    for file in [*(TOKENIZERS / name.removesuffix("_vl")).iterdir(), *(TOKENIZERS / name).iterdir()]:
        if file.suffix == ".xz":
            (made / file.stem).write_bytes(lzma.decompress(file.read_bytes()))
        else:
            shutil.copy(file, made)
    if name.endswith("_vl"):
        config = json.loads((made / "tokenizer_config.json").read_text(encoding="utf-8"))
        config["chat_template"] = (importlib.resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text(
            encoding="utf-8"
        )
        (made / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return made
