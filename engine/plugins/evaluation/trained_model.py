"""Finds the model that a training produced: in a checkpoint, an adapter or a training's folder.

Only `merged` imports torch and peft.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from engine.errors import TrainError

_WEIGHTS = ("*.safetensors", "*.bin")


def trained_model(given: Path, base: Callable[[], Path]) -> Path:
    """The folder of the full model that `given` names.

    Args:
        given: A model's folder; a checkpoint (its `model` or `adapter` is used); a LoRA adapter in peft's format, which
            is merged into a copy of the base model; or a training's folder, whose best checkpoint is used, or its
            newest if none was evaluated.
        base: Returns the folder of the base model. Called only for an adapter.

    Raises:
        TrainError: kind `checkpoint`: `given` holds no model; the message lists what it can be.
    """
    folder = _checkpoint(given) if (given / "checkpoints").is_dir() else given
    if (folder / "config.json").is_file():
        return folder.resolve()
    if (folder / "model" / "config.json").is_file():
        return (folder / "model").resolve()
    for adapter in (folder, folder / "adapter"):
        if (adapter / "adapter_config.json").is_file():
            return merged(adapter, base())
    raise TrainError(
        f"{given} holds no model: name a folder with config.json and safetensors, a checkpoint of `engine train` "
        "(with model/ or adapter/), a LoRA adapter (adapter_config.json), or a training's folder",
        kind="checkpoint",
    )


def _checkpoint(training: Path) -> Path:
    """The best checkpoint of a training, or the newest if none was evaluated."""
    found = sorted(path for path in (training / "checkpoints").glob("step-*") if (path / "state.json").is_file())
    if not found:
        raise TrainError(f"{training} has no checkpoint yet", kind="checkpoint")
    try:
        best = json.loads((found[-1] / "state.json").read_text(encoding="utf-8")).get("best_step")
    except (OSError, ValueError) as error:
        raise TrainError(f"{found[-1] / 'state.json'} cannot be read: {error}", kind="checkpoint") from error
    return next((path for path in found if best is not None and path.name == f"step-{int(best):06d}"), found[-1])


def merged(adapter: Path, base: Path) -> Path:
    """The folder of a float32 copy of the base model with the adapter merged in. It is made once and kept in the cache.

    W' = W + (alpha / rank) B A for each adapted layer (Hu et al., arXiv 2106.09685, section 4.1), by peft.

    Args:
        adapter: Folder of the adapter, in peft's format.
        base: Folder of the base model.

    Raises:
        TrainError: kind `train_setup`: peft is not installed; kind `checkpoint`: the adapter belongs to another model.
    """
    from filelock import FileLock

    from engine.tokens.catalogue import cache_root

    target = cache_root() / "merged" / f"{adapter.resolve().parent.name}-{_digest(adapter, base)}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(target) + ".lock"):
        if not (target / "config.json").is_file():
            draft = Path(tempfile.mkdtemp(prefix=".merging-", dir=target.parent))
            try:
                _merge(adapter, base, draft / "model")
                shutil.rmtree(target, ignore_errors=True)
                (draft / "model").rename(target)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return target


def _merge(adapter: Path, base: Path, target: Path) -> None:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise TrainError(
            f"{adapter} is a LoRA adapter; merging it needs peft ({error}): pip install 'episode-engine[train]'",
            kind="train_setup",
        ) from error
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from engine.tokens.catalogue import no_bars

    sees = getattr(AutoConfig.from_pretrained(base, trust_remote_code=False), "vision_config", None) is not None
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    try:
        with no_bars():
            model = kind.from_pretrained(
                base, dtype=torch.float32, trust_remote_code=False
            )  # bfloat16 would round small changes away
            wrapped = PeftModel.from_pretrained(model, str(adapter))
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise TrainError(
            f"the adapter {adapter} does not fit the spec's model {base}: {str(error).partition(chr(10))[0]}",
            kind="checkpoint",
        ) from error
    _check_adapter_fits(wrapped, adapter)
    with no_bars():
        wrapped.merge_and_unload(safe_merge=True).save_pretrained(target)
    for file in base.iterdir():  # tokenizer, chat template, processor
        if file.is_file() and not (target / file.name).exists() and not any(map(file.match, _WEIGHTS)):
            if file.name.endswith(".index.json") or file.name.startswith("."):
                continue
            shutil.copy(file, target / file.name)


def _check_adapter_fits(wrapped: object, adapter: Path) -> None:
    """Check that all tensors of the adapter were loaded: peft ignores names that the model does not have.

    Raises:
        TrainError: kind `checkpoint`: the adapter belongs to another model.
    """
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    file = adapter / "adapter_model.safetensors"
    if not file.is_file():
        return
    own = set(get_peft_model_state_dict(wrapped))
    with safe_open(file, framework="pt") as tensors:
        strange = [name for name in tensors.keys() if name not in own]  # noqa: SIM118  not a mapping
    if strange:
        raise TrainError(
            f"the adapter {adapter} belongs to another model: {len(strange)} of its tensors are not in the spec's "
            f"model, for example {strange[0]!r}",
            kind="checkpoint",
        )


def _digest(adapter: Path, base: Path) -> str:
    """Digest of the adapter's bytes and of name, size and time of the base model's files."""
    digest = hashlib.sha256()
    for file in sorted(adapter.glob("adapter_*")):
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        with file.open("rb") as data:
            while block := data.read(1 << 20):
                digest.update(block)
    for file in sorted(path for path in base.iterdir() if path.is_file()):
        about = file.stat()
        digest.update(f"{file.name}:{about.st_size}:{about.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
