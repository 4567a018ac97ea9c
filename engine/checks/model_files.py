"""What a model's files say without its weights: sizes, chat template, special tokens. Imports neither torch nor transformers.

Only files that are at hand are read: a folder, the catalogue's cache, the hub's cache. Nothing is fetched.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from engine.errors import SpecError
from engine.spec.access import Access
from engine.spec.load import LoadedSpec

LARGEST = 64 * 2**20
"""Bytes of a file that is read."""
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_VISION_KEYS = ("vision_config", "image_token_id", "vision_tower", "mm_vision_tower")


@dataclass(frozen=True)
class ModelFiles:
    """The files of a spec's model."""

    folder: Path
    """Config and weights."""
    source: Path
    """Tokenizer."""
    own_template: Path | None
    """A Jinja file that replaces the tokenizer's."""
    access: Access
    """Which files may be opened: below the model's folders too."""
    template_access: Access
    """The same for `own_template`, which the spec names by itself."""
    trusted: bool
    """The template is rendered without precautions: it is the catalogue's, or the spec is not a stranger's."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json`, the text model's part merged in; empty where there is none."""
        found = read_json(self.folder / "config.json", self.access)
        text = found.get("text_config")
        return {**(text if isinstance(text, dict) else {}), **found}

    @cached_property
    def tokenizer(self) -> dict[str, Any]:
        """`tokenizer_config.json`."""
        return read_json(self.source / "tokenizer_config.json", self.access)

    @cached_property
    def context(self) -> int | None:
        """Most tokens that the model attends to."""
        found = self.config.get("max_position_embeddings") or self.tokenizer.get("model_max_length")
        return int(found) if isinstance(found, int | float) and 0 < found < 1 << 24 else None

    @cached_property
    def template(self) -> str | None:
        """The chat template; None where there is none."""
        if self.own_template is not None:
            return _text(self.own_template, self.template_access)
        beside = _text(self.source / "chat_template.jinja", self.access)
        if beside is not None:
            return beside
        found = self.tokenizer.get("chat_template")
        if isinstance(found, list):  # several, by name
            named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
            found = named.get("tool_use") or named.get("default")
        if found is None:
            found = read_json(self.source / "chat_template.json", self.access).get("chat_template")
        return found if isinstance(found, str) else None

    @cached_property
    def special(self) -> dict[str, str]:
        """Named special tokens, as templates are handed them."""
        found = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = self.tokenizer.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
        return found

    @cached_property
    def added(self) -> list[str]:
        """Texts of the tokens that stand apart from the vocabulary."""
        listed = self.tokenizer.get("added_tokens_decoder")
        items = (
            list(listed.values())
            if isinstance(listed, dict)
            else read_json(self.source / "added_tokens.json", self.access)
        )
        texts = [item.get("content") if isinstance(item, dict) else item for item in items]
        return [text for text in texts if isinstance(text, str) and text]

    @cached_property
    def sees(self) -> bool | None:
        """Whether the model takes images; None where its config is not there."""
        if not self.config:
            return None
        return any(self.config.get(key) is not None for key in _VISION_KEYS)


def model_files(loaded: LoadedSpec) -> ModelFiles | None:
    """A spec's model, where its files are at hand."""
    spec = loaded.spec.model
    folder = _at_hand(loaded, spec.path, ("model", "path"), spec.revision)
    if folder is None:
        return None
    source = folder
    if spec.tokenizer is not None:
        found = _at_hand(loaded, spec.tokenizer, ("model", "tokenizer"), None)
        if found is None:
            return None
        source = found
    template = None if spec.chat_template is None else loaded.resolve(spec.chat_template, ("model", "chat_template"))
    trusted = loaded.access.roots is None or (template is None and _in_catalogue(source.name) == source)
    access = loaded.access.below(_whole(folder), _whole(source))
    return _files(folder, source, template, access, loaded.access, trusted)


@lru_cache(maxsize=64)
def _files(
    folder: Path, source: Path, template: Path | None, access: Access, template_access: Access, trusted: bool
) -> ModelFiles:
    return ModelFiles(folder, source, template, access, template_access, trusted)


def _whole(folder: Path) -> Path:
    """The folder that a model's files lie in: a snapshot of the hub's cache links to the blobs beside it."""
    above = folder.parent.parent
    return above if folder.parent.name == "snapshots" and above.name.startswith("models--") else folder


def _at_hand(loaded: LoadedSpec, name: str, path: tuple[str, str], revision: str | None) -> Path | None:
    try:
        for folder in (loaded.resolve(name, path), loaded.base / name):
            if folder.is_dir():
                return folder
    except (OSError, ValueError, SpecError):
        return None
    return _in_catalogue(name) or _in_hub_cache(name, revision)


def _in_catalogue(name: str) -> Path | None:
    if "/" in name or name in ("", ".", ".."):
        return None
    from engine.tokens.catalogue import cached

    return cached(name)


def _in_hub_cache(name: str, revision: str | None) -> Path | None:
    """The newest snapshot in the hub's cache, by its documented layout."""
    if not _HUB_ID.fullmatch(name) or ".." in (revision or ""):
        return None
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    root = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    folder = root / f"models--{name.replace('/', '--')}"
    commit = _text(folder / "refs" / (revision or "main"), Access((folder.resolve(),)))
    snapshot = folder / "snapshots" / (commit or revision or "").strip()
    return snapshot if (commit or revision) and snapshot.is_dir() else None


def read_json(path: Path, access: Access | None = None) -> dict[str, Any]:
    """A JSON file that holds a mapping; empty where it does not, is not there, or may not be opened."""
    text = _text(path, access)
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_bytes(path: Path, access: Access | None = None) -> bytes | None:
    """A regular file's bytes; None where it is not there, larger than `LARGEST`, or may not be opened."""
    try:
        access = access or Access()
        return access.read(path, LARGEST) if access.is_file(path) else None
    except (OSError, ValueError):
        return None


def _text(path: Path, access: Access | None) -> str | None:
    data = read_bytes(path, access)
    try:
        return None if data is None else data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except ValueError:
        return None
