"""A text with `{{field}}` and a task's values -> the filled text, or an error that names the missing field.

Invariant: every field that a template names is filled, or an error says which one is missing. A literal
`{{` is written as `\\{{`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from engine.errors import EngineError
from engine.schemas.message import ContentPart, Message, TextPart
from engine.spec.rows.row import find
from engine.spec.text.near import near_or_known

if TYPE_CHECKING:
    from engine.schemas.model import Words

_FIELD = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
"""Begins with what is rare in a text, so that most of it is skipped at once."""
_REFERENCES = ("sha256:", "data:", "file:", "http:", "https:")
"""Image references that are no paths."""


def fields_of(template: str) -> list[str]:
    """The fields that a template names, each once, in order of first use."""
    matches = _FIELD.finditer(template, 0, _end(template))
    names = (match[1].strip() for match in matches if not _is_literal(template, match.start()))
    return list(dict.fromkeys(names))


def fill(template: str, fields: Mapping[str, Any]) -> str:
    """The template with every `{{field}}` replaced by its value.

    Strings go in as they are, anything else as JSON. `{{a.b}}` is the key `b` of the mapping `a`, unless a
    field is itself called `a.b`.

    Raises:
        EngineError: a field is not there; the nearest one that is there is named.
    """
    return fill_spans(template, fields)[0]


def fill_spans(template: str, fields: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """`fill`, and the characters [start, end) of the result that the template itself wrote.

    Raises:
        EngineError: a field is not there.
    """
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length = at = 0
    for match in _FIELD.finditer(template, 0, _end(template)):
        start, value = match.start(), match[0]
        literal = _is_literal(template, start)
        if not literal:
            name = match[1].strip()
            there, field = find(name, fields)
            if not there:
                hint = near_or_known(name, [str(field) for field in fields], what="fields")
                message = f"the template names `{{{{{name}}}}}`, which is no field here; {hint}"
                raise EngineError(message, kind="template_error", blame="spec")
            value = field if isinstance(field, str) else json.dumps(field, ensure_ascii=False, default=str)
        for piece, of_template in ((template[at : start - literal], True), (value, literal)):
            if of_template and piece:
                spans.append((length, length + len(piece)))
            pieces.append(piece)
            length += len(piece)
        at = match.end()
    if template[at:]:
        spans.append((length, length + len(template) - at))
    return "".join([*pieces, template[at:]]), spans


def own_spans(words: Words, fields: Mapping[str, Any]) -> list[list[tuple[int, int]]]:
    """For each text of filled words, the characters that the template itself wrote: see `fill_spans`."""
    texts = [words] if isinstance(words, str) else [part.text for part in words if isinstance(part, TextPart)]
    return [fill_spans(text, fields)[1] for text in texts]


def _is_literal(template: str, start: int) -> bool:
    """Whether a backslash stands before the `{{` at `start`."""
    return template[start - 1 : start] == "\\"


def _end(template: str) -> int:
    """Behind the last field: what is not closed is not looked through again and again."""
    return template.rfind("}}") + 2 if "}}" in template else 0


def texts_of(words: Words) -> list[tuple[tuple[str | int, ...], str]]:
    """The templates in `words`, each with its path below it."""
    if isinstance(words, str):
        return [((), words)]
    return [
        ((index, "text"), part.text) if isinstance(part, TextPart) else ((index, "image"), part.image)
        for index, part in enumerate(words)
    ]


def fill_words(words: Words, fields: Mapping[str, Any], base: Path) -> list[ContentPart]:
    """What is said, as message parts: every `{{field}}` filled, an image's relative path taken from `base`.

    Raises:
        EngineError: a field is not there.
    """
    if isinstance(words, str):
        return [TextPart(text=fill(words, fields))]
    parts: list[ContentPart] = []
    for part in words:
        if isinstance(part, TextPart):
            parts.append(part.model_copy(update={"text": fill(part.text, fields)}))
        else:
            image = fill(part.image, fields)
            parts.append(part.model_copy(update={"image": image if is_reference(image) else str(base / image)}))
    return parts


def image_folders(files: Sequence[str], base: Path) -> list[Path]:
    """The folders that a row's image paths are relative to: those of the files of rows, then that of the spec."""
    places = [place for file in files for place in (base / file, Path(file))]
    return [*(place if place.is_dir() else place.parent for place in places if place.exists()), base]


def located(message: Message, folders: Sequence[Path]) -> Message:
    """Return a message whose images have absolute paths: in the first folder that has the file, else in the last."""
    if isinstance(message.content, str):
        return message
    parts: list[ContentPart] = []
    for part in message.content:
        if isinstance(part, TextPart) or is_reference(part.image):
            parts.append(part)
        else:
            places = [folder / part.image for folder in folders]
            place = next(filter(os.path.isfile, places), places[-1])  # which never raises
            parts.append(part.model_copy(update={"image": str(place)}))
    return replace(message, content=parts)


def is_reference(image: str) -> bool:
    """Whether an image is named by a digest or a URI, and not by a path."""
    return image.startswith(_REFERENCES)
