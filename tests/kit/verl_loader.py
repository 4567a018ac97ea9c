"""verl's own data set over a file, as JSON: run by the Python that has verl, this one or the one that `VERL_PYTHON` names."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def load_with_verl(path: Path, model: Path, *, images: bool = False) -> dict[str, Any]:
    """What `RLHFDataset` and `collate_fn` make of a file; the test is skipped where there is no verl.

    Args:
        path: The file.
        model: The folder of the tokenizer.
        images: Whether the rows hold images. Images become the digests of their pixels.
    """
    from verl_python import run_verl  # it needs pytest, which the Python that has verl may lack

    found: dict[str, Any] = run_verl(
        Path(__file__), str(path), str(model), str(path.parent / "cache"), str(int(images))
    )
    return found


def digest(pixels: bytes) -> str:
    """The digest of an image's pixels."""
    return hashlib.sha256(pixels).hexdigest()


def _plain(value: Any) -> Any:
    return digest(value.tobytes()) if hasattr(value, "tobytes") else str(value)


def _main(path: str, model: str, cache: str, images: str) -> None:
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    processor = SimpleNamespace(image_processor=None) if images == "1" else None
    settings = {"cache_dir": cache, "max_prompt_length": 200, "filter_overlong_prompts": images == "0"}
    config = OmegaConf.create({**settings, "filter_overlong_prompts_workers": None})
    rows = RLHFDataset(path, AutoTokenizer.from_pretrained(model), config, processor=processor)
    batch = collate_fn([rows[index] for index in range(len(rows))])
    batch.pop("dummy_tensor")
    print(json.dumps({name: list(values) for name, values in batch.items()}, default=_plain))


if __name__ == "__main__":
    _main(*sys.argv[1:])
