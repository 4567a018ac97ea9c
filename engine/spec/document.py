"""A tree of YAML as plain data that knows where each part was written, and its check against a contract."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from engine.plugin import BELONGS
from engine.schemas.base import Struct
from engine.schemas.sections import SpecSection, attach, split
from engine.spec.references import value_at
from engine.spec.text.diagnostic import DataPath, Diagnostic, Origin
from engine.spec.text.problems import diagnose
from engine.spec.text.tree import Node, Scalar
from engine.spec.text.tree import Sequence as SequenceNode

Model = TypeVar("Model", bound=BaseModel)


class Document(Struct, frozen=True, kw_only=True):
    """Plain data, and where each part of it was written."""

    data: Any
    origins: Mapping[DataPath, Origin]
    """Of every value, by its path."""
    key_origins: Mapping[DataPath, Origin]
    """Of every key, by the path of its value."""
    rereads: Mapping[DataPath, str] = msgspec.field(default_factory=dict)
    """Text of the values that may be read as strings too."""
    variables: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Environment variables that it was filled from, with their values."""
    references: Mapping[DataPath, str] = msgspec.field(default_factory=dict)
    """What was written where environment variables gave the value: `Bearer ${TOKEN}`, by its path in `data`."""

    def origin(self, path: Sequence[str | int], *, key: bool = False) -> Origin | None:
        """Where a value (or its key) was written; of what is not there, the nearest that contains it."""
        place = tuple(path)
        if key and place in self.key_origins:
            return self.key_origins[place]
        while place not in self.origins:
            if not place:
                return None
            place = place[:-1]
        return self.origins[place]


def flatten(tree: Node) -> Document:
    """A tree -> plain data and the places of its parts."""
    origins: dict[DataPath, Origin] = {}
    key_origins: dict[DataPath, Origin] = {}
    rereads: dict[DataPath, str] = {}
    references: dict[DataPath, str] = {}

    def visit(node: Node, path: DataPath) -> Any:
        origins[path] = node.origin
        if isinstance(node, Scalar):
            if node.reread and not isinstance(node.value, str):
                rereads[path] = node.text
            if node.reference:
                references[path] = node.reference
            return node.value
        if isinstance(node, SequenceNode):
            return [visit(item, (*path, index)) for index, item in enumerate(node.items)]
        for key, origin in node.keys.items():
            key_origins[(*path, key)] = origin
        return {key: visit(value, (*path, key)) for key, value in node.entries.items()}

    data = visit(tree, ())
    return Document(data=data, origins=origins, key_origins=key_origins, rereads=rereads, references=references)


def validate(document: Document, model: type[Model]) -> tuple[Model | None, list[Diagnostic]]:
    """Check a document against a contract, strictly: `"5"` is no number and `yes` no boolean.

    Where a string is wanted and `${ENV}` or `--set` gave something that reads as a number, its text is taken.
    """
    rest, parts = split(document.data, model)
    value, problems, as_text = _part(document, model, rest, (), model)
    sections: list[tuple[DataPath, SpecSection]] = []
    for part in parts:
        section, wrong, texts = _part(document, part.model, part.body, part.path, model)
        problems, as_text = [*problems, *wrong], [*as_text, *texts]
        if section is not None:
            sections.append((part.owner, section))
    if value is not None and not problems:
        attach(value, sections)
        return value, []
    if not as_text:
        by_plugin: dict[str | Diagnostic, Diagnostic] = {}  # of a plugin that is not installed, the first key
        for problem in sorted(problems, key=lambda problem: problem.place):
            names_plugin = problem.fix is not None and problem.fix.startswith(BELONGS)
            by_plugin.setdefault(problem.fix if names_plugin and problem.fix else problem, problem)
        return None, list(by_plugin.values())
    for path in as_text:
        value_at(document.data, path[:-1])[path[-1]] = document.rereads[path]
    rest = {path: text for path, text in document.rereads.items() if path not in as_text}
    return validate(replace(document, rereads=rest), model)


def _part(
    document: Document, model: type[Model], body: Any, at: DataPath, root: type[BaseModel]
) -> tuple[Model | None, list[Diagnostic], list[DataPath]]:
    """Validate the part of a document at `at`, strictly: value, problems, and the values to read as text."""
    try:
        text = json.dumps(body, ensure_ascii=False).encode()  # in JSON a mapping may stand for a data class
    except UnicodeEncodeError:  # bytes of an environment variable that are no text; JSON cannot hold them
        text = b""
    try:
        if not text:
            return model.model_validate(body, strict=True, by_alias=True, by_name=False), [], []
        return model.model_validate_json(text, strict=True, by_alias=True, by_name=False), [], []
    except ValidationError as error:
        return None, *diagnose(error, model, document, at, root)


def place_inside(value: str, offset: int, lines: list[str], start: Origin) -> Origin:
    """Where the character at `offset` of a value was written; blanks and breaks match any others."""
    row, column = start.line - 1, start.column - 1
    if row < len(lines) and lines[row][column : column + 1] in ("|", ">"):
        row, column = row + 1, 0
    elif row < len(lines) and lines[row][column : column + 1] in ("'", '"'):
        column += 1
    first_row, first_column = row, column
    places = (
        (number, at)
        for number in range(first_row, len(lines))
        for at in range(first_column if number == first_row else 0, len(lines[number]))
        if not lines[number][at].isspace()
    )
    at_end = offset >= len(value)
    for character in "".join(value[: None if at_end else offset + 1].split()):
        place = next(places, None)
        if place is None or lines[place[0]][place[1]] != character:
            return start  # the source says something else: a variable, an escape
        row, column = place[0], place[1] + 1
    return Origin(start.file, row + 1, column + at_end or 1, start.via)
