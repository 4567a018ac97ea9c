"""What the tokens of a conversation depend on, besides its messages and tools: as one digest, for caches on disk."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import inspect
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from engine import tokens
from engine.spec.code.entry import load_entry
from engine.tokens.loading import model_folders

if TYPE_CHECKING:
    from engine.schemas.model import ModelSpec

_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
"""Suffixes of the files of tokenizers, templates, configs and processors."""
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "renderers")
_DATE = "strftime_now"
"""A template that calls it writes another text on another day."""


def rendering_digest(model: ModelSpec, base: Path) -> str:
    """Digest of the files of the model's tokenizer, template and processor, the spec's `model`, and the code that
    renders.

    Raises:
        ModelError: The model's files are not there and cannot be fetched.
    """
    folder, source = model_folders(model, base)
    files = sorted(
        file for parent in dict.fromkeys((folder, source)) for file in parent.iterdir() if file.suffix in _SUFFIXES
    )
    if model.chat_template is not None:
        files.append(base / model.chat_template)
    parts = [
        model.model_dump_json(exclude={"path", "revision", "tokenizer"}),
        digest_of_files(files),
        digest_of_files(sorted(Path(str(tokens.__file__)).resolve().parent.rglob("*.py"))),
    ]
    parts += [f"{name} {_version(name)}" for name in _LIBRARIES]
    if ":" in model.tool_calls:
        parts.append(digest_of_files([Path(inspect.getfile(load_entry(model.tool_calls, base)))]))
    dated = any(_DATE in file.read_text("utf-8", "ignore") for file in files if file.suffix in (".json", ".jinja"))
    if dated or model.renderer not in ("auto", "template"):
        parts.append(datetime.date.today().isoformat())
    return digest_of_parts(*parts)


@functools.cache  # finding a library's metadata looks through the whole import path, 30 ms
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def digest_of_parts(*parts: str | bytes) -> str:
    """Digest of several texts, as 32 hexadecimal digits. Their borders count: `("ab", "c")` is not `("a", "bc")`."""
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


def digest_of_files(files: Iterable[Path]) -> str:
    """Digest of the names and contents of files, in their order. A file that does not exist counts as such."""
    digest = blake2b(digest_size=16)
    for file in files:
        digest.update(file.name.encode("utf-8", "surrogateescape") + b"\0")
        try:
            with file.open("rb") as stream:
                while piece := stream.read(1 << 20):
                    digest.update(b"%d:" % len(piece))
                    digest.update(piece)
        except (FileNotFoundError, IsADirectoryError):
            digest.update(b"absent")
        digest.update(b"\0")
    return digest.hexdigest()
