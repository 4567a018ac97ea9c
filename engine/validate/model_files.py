"""A model's sizes, chat template and special tokens, read from its files without torch and transformers.

Only local files are read: a folder, the catalogue's cache, the hub's cache. Nothing is downloaded.
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
"""Maximum size of a file that is read, in bytes."""
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_VISION_KEYS = ("vision_config", "image_token_id", "vision_tower", "mm_vision_tower")


@dataclass(frozen=True)
class ModelFiles:
    """The files of a spec's model."""

    folder: Path
    """Folder of config and weights."""
    source: Path
    """Folder of the tokenizer."""
    own_template: Path | None
    """A Jinja file that replaces the tokenizer's chat template."""
    access: Access
    """The files that may be opened, including those in the model's folders."""
    template_access: Access
    """The files that may be opened for `own_template`, which the spec names."""
    trusted: bool
    """Whether the template may be rendered in this process: it is from the catalogue, or the spec is trusted."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json`, merged with its part for the text model; empty if there is none."""
        config = read_json(self.folder / "config.json", self.access)
        text = config.get("text_config")
        return {**(text if isinstance(text, dict) else {}), **config}

    @cached_property
    def tokenizer(self) -> dict[str, Any]:
        """`tokenizer_config.json`."""
        return read_json(self.source / "tokenizer_config.json", self.access)

    @cached_property
    def context(self) -> int | None:
        """The model's maximum context, in tokens."""
        length = self.config.get("max_position_embeddings") or self.tokenizer.get("model_max_length")
        return int(length) if isinstance(length, int | float) and 0 < length < 1 << 24 else None

    @cached_property
    def template(self) -> str | None:
        """The chat template; None if there is none."""
        if self.own_template is not None:
            return _text(self.own_template, self.template_access)
        beside = _text(self.source / "chat_template.jinja", self.access)
        if beside is not None:
            return beside
        template = self.tokenizer.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
            template = named.get("tool_use") or named.get("default")
        if template is None:
            template = read_json(self.source / "chat_template.json", self.access).get("chat_template")
        return template if isinstance(template, str) else None

    @cached_property
    def special(self) -> dict[str, str]:
        """The named special tokens that templates get as variables."""
        tokens = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = self.tokenizer.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
        return tokens

    @cached_property
    def added(self) -> list[str]:
        """Texts of the added tokens."""
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
        """Whether the model takes images; None without a config."""
        if not self.config:
            return None
        return any(self.config.get(key) is not None for key in _VISION_KEYS)


def model_files(loaded: LoadedSpec) -> ModelFiles | None:
    """Return the files of a spec's model; None if they are not on this computer."""
    spec = loaded.spec.model
    folder = _at_hand(loaded, spec.path, ("model", "path"), spec.revision)
    source = folder
    if spec.tokenizer is not None:
        source = _at_hand(loaded, spec.tokenizer, ("model", "tokenizer"), None)
    if folder is None or source is None:
        return None
    template = None if spec.chat_template is None else loaded.resolve(spec.chat_template, ("model", "chat_template"))
    trusted = loaded.access.roots is None or (template is None and _in_catalogue(source.name) == source)
    return _files(folder, source, template, loaded.access.below(_whole(folder), _whole(source)), loaded.access, trusted)


_files = lru_cache(maxsize=64)(ModelFiles)


def _whole(folder: Path) -> Path:
    """The folder with all files of a model: a snapshot in the hub's cache links to blobs outside the snapshot."""
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


def may_exist(loaded: LoadedSpec) -> bool:
    """Whether a spec's model is on this computer, in the catalogue, or may be on the hub; True where that may not be
    looked up."""
    from engine.tokens.catalogue import named_models

    name = loaded.spec.model.path
    if name in named_models() or _HUB_ID.fullmatch(name):
        return True
    try:
        return loaded.resolve(name, ("model", "path")).exists() or _in_catalogue(name) is not None
    except (OSError, ValueError, SpecError):
        return True


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


def read_json(path: Path, access: Access) -> dict[str, Any]:
    """Read a JSON file that contains a mapping; empty if it does not, does not exist, or may not be opened."""
    text = _text(path, access)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_bytes(path: Path, access: Access) -> bytes | None:
    """Read a regular file; None if it does not exist, is larger than `LARGEST`, or may not be opened."""
    try:
        return access.read(path, LARGEST) if access.is_file(path) else None
    except (OSError, ValueError):
        return None


def _text(path: Path, access: Access) -> str | None:
    data = read_bytes(path, access)
    try:
        return None if data is None else data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except ValueError:
        return None
