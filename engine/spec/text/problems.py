"""Pydantic's errors -> diagnostics: position, stable rule, plain words, and the fix.

A message about an unknown key names the key that replaced it; an old key is never accepted. The tables say which class
held the key, so that a key of the same name in another section is not touched.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from engine.plugin import missing
from engine.schemas.base import Bytes, Seconds, Struct, description_of
from engine.schemas.sections import NameOf, OneOf, mark_of, sections_of
from engine.schemas.train import MemorySpec, TrainSpec, WeightSyncSpec
from engine.spec.references import MISSING, value_at
from engine.spec.text.diagnostic import DataPath, Diagnostic, show_path
from engine.spec.text.near import nearest_name, short
from engine.spec.text.places import (
    Spot,
    bare,
    branches,
    discriminator_of,
    fields_by_key,
    homes,
    is_model,
    literals,
    locate,
    tagged,
)
from engine.spec.text.tree import read_scalar

if TYPE_CHECKING:
    from engine.spec.document import Document


_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_EXPECTED = {
    "finite_number": "a finite number",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "text that is not empty",
    "too_short": "a list of at least {min_length}",
}
_TYPES = frozenset(
    (
        *("string_type", "int_type", "int_from_float", "float_type", "bool_type", "list_type", "dict_type"),
        *("model_type", "tuple_type", "model_attributes_type", "int_parsing", "float_parsing", "bool_parsing"),
    )
)
_WANTED = {
    "string": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
}
"""What an error of a type asks for, where the contract says no more."""
_YES = frozenset({"yes", "on", "y", "True", "TRUE"})
_NO = frozenset({"no", "off", "n", "False", "FALSE"})

MAX_ERRORS = 200
"""Errors that are explained; of the others only the number is told."""


class _Fault(Struct, frozen=True, kw_only=True):
    """One of Pydantic's errors, placed."""

    kind: str
    spot: Spot
    context: Mapping[str, Any]
    words: str


def diagnose(
    error: ValidationError,
    model: type[BaseModel],
    document: Document,
    at: DataPath = (),
    root: type[BaseModel] | None = None,
) -> tuple[list[Diagnostic], list[DataPath]]:
    """Every error of a validation as a diagnostic, in the order of the document; `at` is where the part is that was
    validated, and `root` the class of the whole document, if that is another one.

    Returns also the paths of values that failed only because they were read as numbers or booleans where a
    string is wanted, and whose text is known: the caller may take the text and try again.
    """
    grouped: dict[DataPath, list[_Fault]] = {}
    errors = error.errors(include_url=False)
    for item in errors[:MAX_ERRORS]:
        spot = locate(model, item["loc"])
        words = item["msg"].removeprefix("Value error, ")
        path = (*at, *spot.path)
        fault = _Fault(kind=item["type"], spot=replace(spot, path=path), context=item.get("ctx") or {}, words=words)
        grouped.setdefault(path, []).append(fault)
    as_text = [
        path
        for path, faults in grouped.items()
        if path in document.rereads and any(fault.kind == "string_type" for fault in faults)
    ]
    findings = [
        _EXPLAINED.get(faults[0].kind, _wrong)(root or model, faults, document)
        for path, faults in grouped.items()
        # of the branches of a union, the one that got further says more
        if not (
            all(fault.spot.branch for fault in faults)
            and any(len(other) > len(path) and other[: len(path)] == path for other in grouped)
        )
    ]
    findings.sort(key=lambda item: item.place)
    if len(errors) > MAX_ERRORS:
        more = f"and {len(errors) - MAX_ERRORS:,} more errors of form"
        findings.append(Diagnostic("spec.more", "error", more, "correct these first", document.origin(())))
    return findings, as_text


def _unknown_key(model: type[BaseModel], faults: list[_Fault], document: Document) -> Diagnostic:
    path, owner = faults[0].spot.path, faults[0].spot.owner
    key, fields = str(path[-1]), fields_by_key(owner) if owner else {}
    names = [*fields, "extends"] if owner is model and len(path) == 1 else list(fields)
    near = new_key(owner, key) or nearest_name(key.replace("-", "_"), names)
    elsewhere = [place for place in homes(model).get(key, []) if place != ".".join(map(str, path[:-1]))]
    highest = min((place.count(".") for place in elsewhere), default=0)
    elsewhere = [place for place in elsewhere if place.count(".") == highest]  # not each part's own sampling, say
    if missing_plugin := missing("sections", ".".join(map(str, path))):
        fix = missing_plugin
    elif place := MOVED.get(owner, {}).get(key):
        fix = f"write `{place}:` at the top level of the spec"
    elif near:
        fix = f"did you mean `{near}`?"
    elif elsewhere:
        fix = f"`{key}` belongs under {' or '.join(f'`{place}`' for place in elsewhere[:3])}"
    else:
        fix = f"known here: {', '.join(names)}"
    message = f"unknown key `{short(key)}`"
    return Diagnostic("spec.unknown-key", "error", message, fix, document.origin(path, key=True), path)


def _missing_key(model: type[BaseModel], faults: list[_Fault], document: Document) -> Diagnostic:
    path, owner = faults[0].spot.path, faults[0].spot.owner
    key = str(path[-1])
    summary = (description_of(owner, key) or "").partition("\n")[0].strip() if owner else ""
    fix = f"add `{key}: …`" + (f" ({summary.rstrip('.')})" if summary else "")
    holder = "the spec" if len(path) == 1 else f"`{show_path(path[:-1])}`"
    origin = document.origin(path[:-1], key=True)
    return Diagnostic("spec.missing-key", "error", f"{holder} needs `{key}`", fix, origin, path)


def _tag(model: type[BaseModel], faults: list[_Fault], document: Document) -> Diagnostic:
    fault = faults[0]
    path, key = fault.spot.path, str(fault.context["discriminator"]).strip("'")
    place = (*path, key)
    tags = list(tagged(fault.spot.wanted, key)) or [
        tag for part in str(fault.context.get("expected_tags", "")).split(",") if (tag := part.strip(" '"))
    ]
    listed = ", ".join(tags) or "none: no plugin that adds one is installed"
    if fault.kind == "union_tag_not_found":
        message, fix = f"`{show_path(path)}` needs `{key}`", f"add `{key}: …`, one of {listed}"
        return Diagnostic("spec.missing-key", "error", message, fix, document.origin(path, key=True), place)
    value = str(fault.context["tag"])
    message = f"`{show_path(place)}` must be one of {listed}; it is {_show(value_at(document.data, place))}"
    opened = mark_of(fault.spot.wanted, OneOf)
    near = (missing(opened.point, value) if opened else None) or _nearest(value, tags)
    return Diagnostic("spec.bad-value", "error", message, near, document.origin(place), place)


def _value_error(model: type[BaseModel], faults: list[_Fault], document: Document) -> Diagnostic:
    """A rule of the contract's own. Its words name keys in backticks: the first that is there gives the position."""
    path, said = faults[0].spot.path, faults[0].words
    value = value_at(document.data, path)
    at = path
    if isinstance(value, dict):
        named = (word.partition(":")[0] for word in said.split("`")[1::2])
        at = (*path, *[word for word in named if word in value][:1])
    origin = document.origin(at, key=isinstance(value, dict))
    words, _, fix = said.partition("; ")
    return Diagnostic(
        "spec.bad-value", "error", f"`{show_path(path)}`: {words}" if path else words, fix or None, origin, at
    )


def _wrong(model: type[BaseModel], faults: list[_Fault], document: Document) -> Diagnostic:
    path = faults[0].spot.path
    value = value_at(document.data, path)
    if value is MISSING and isinstance(short := value_at(document.data, path[:-1]), str):
        path, value = path[:-1], short  # `isolation: process` for `isolation: {mode: process}`
    only_types = all(fault.kind in _TYPES for fault in faults)
    expected = list(dict.fromkeys(_expected(fault) for fault in faults))
    options = [option for fault in faults if fault.kind == "literal_error" for option in literals(fault.spot.wanted)]
    rule = "spec.wrong-type" if only_types else "spec.bad-value"
    shown = f"`{show_path(path)}`" if path else "the spec"
    if faults[0].spot.key:
        shown = f"the key {shown}"
    message = f"{shown} must be {', or '.join(expected)}; it is {_show(value)}"
    name = mark_of(faults[0].spot.wanted, NameOf)  # without its plugins an open set may have no name
    fix: str | None = None
    if isinstance(value, str) and (options or name is not None):
        fix = (missing(name.point, value) if name is not None else None) or _nearest(value, options)
    key = str(path[-1]) if path else ""
    fix = fix or next((words for fault in faults for words in _type_fixes(fault, value, key) if words), None)
    return Diagnostic(rule, "error", message, fix, document.origin(path, key=faults[0].spot.key), path)


_EXPLAINED: Mapping[str, Callable[[type[BaseModel], list[_Fault], Document], Diagnostic]] = {
    "extra_forbidden": _unknown_key,
    "missing": _missing_key,
    "union_tag_not_found": _tag,
    "union_tag_invalid": _tag,
    "value_error": _value_error,
    "assertion_error": _value_error,
}
"""What explains the errors of a kind; others are wrong values."""


def _expected(fault: _Fault) -> str:
    """What would have been right, in words that follow `must be`."""
    context = fault.context
    if fault.kind in _BOUNDS:
        name, words = _BOUNDS[fault.kind]
        bound = context[name]
        return f"{words} {int(bound) if isinstance(bound, float) and bound.is_integer() else bound}"
    if fault.kind == "literal_error":
        options = literals(fault.spot.wanted)
        return options[0] if len(options) == 1 else f"one of {', '.join(options) or 'no names'}"
    if fault.kind in _EXPECTED:
        return _EXPECTED[fault.kind].format(**context)
    if fault.kind in _TYPES:
        return describe(fault.spot.wanted) or _WANTED.get(fault.kind.partition("_")[0], "a mapping")
    return f"valid ({fault.words[:1].lower()}{fault.words[1:]})"


def describe(annotation: Any, *, plural: bool = False) -> str:
    """A type in words: `a list of strings`."""
    if annotation == Seconds:
        return "durations" if plural else "a duration"
    if annotation == Bytes:
        return "sizes" if plural else "a size"
    simple = {
        str: ("a string", "strings"),
        int: ("a whole number", "whole numbers"),
        float: ("a number", "numbers"),
        bool: ("true or false", "booleans"),
        dict: ("a mapping", "mappings"),
        list: ("a list", "lists"),
        Any: ("anything", "anything"),
    }
    members = branches(annotation)
    if len(members) > 1:
        if all(is_model(bare(member)) for member in members):
            return "mappings" if plural else "a mapping"
        return " or ".join(dict.fromkeys(describe(member, plural=plural) for member in members))
    inner = bare(annotation)
    if inner in simple:
        return simple[inner][plural]
    origin, args = typing.get_origin(inner), typing.get_args(inner)
    if origin is list:
        return f"{'lists' if plural else 'a list'} of {describe(args[0], plural=True)}"
    if origin is dict or is_model(inner):
        return "mappings" if plural else "a mapping"
    if origin is typing.Literal:
        return " or ".join(map(str, args))
    return ""


def _type_fixes(fault: _Fault, value: Any, key: str) -> Iterator[str | None]:
    kind = fault.kind.partition("_")[0]
    if kind == "bool" and isinstance(value, str):
        yield "write true" if value.lower() in _YES else "write false" if value.lower() in _NO else None
    if kind == "int" and isinstance(value, float) and value.is_integer():
        yield f"write {int(value)}"
    if kind in ("int", "float") and isinstance(value, str) and type(read_scalar(value.strip())) in (int, float):
        yield f"write {value.strip()} without quotes"
    if kind == "string" and isinstance(value, bool | int | float):
        yield f'quote it: "{_show(value)}"'
    if kind == "list" and value is not None and not isinstance(value, dict | list):
        yield f"write it as a list: [{_show(value).strip('`')}]"
    if kind == "model" and isinstance(value, str) and is_model(bare(fault.spot.wanted)):
        fields = fields_by_key(bare(fault.spot.wanted))
        main = next((name for name, info in fields.items() if info.is_required() and info.annotation is str), None)
        main = main or ("use" if "use" in fields else None)  # a user or scorer may be a model instead
        prefix = f"{key}: " if key and not key.isdigit() else ""
        yield f"write `{prefix}{{{main}: {value}}}`" if main else None
    if kind == "model" and fault.spot.wanted is not None:
        discriminator = discriminator_of(fault.spot.wanted, None)
        yield f"write a mapping with `{discriminator}`" if discriminator else None


def _nearest(value: str, options: list[str]) -> str | None:
    near = nearest_name(value, options, cutoff=0.5)
    return f"did you mean `{near}`?" if near else None


def _show(value: Any) -> str:
    """A value as it would be written, kept short."""
    if value is MISSING:
        return "missing"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = str(value)
    shown = text if len(text) <= 60 else f"{text[:57]}…"
    return f"`{shown}`" if isinstance(value, str) else shown


RENAMED: Mapping[type[BaseModel], Mapping[str, str]] = {
    TrainSpec: {
        "passes": "update_epochs",
        "normalise": "advantage_norm",
        "filter_equal": "dynamic_sampling",
        "refill": "max_sampling_rounds",
        "correction": "rollout_correction",
        "proximal": "proximal_logprobs",
        "entropy": "entropy_coefficient",
        "bonuses": "advantage_bonuses",
        "weights": "weight_sync",
    },
    MemorySpec: {
        "micro_tokens": "max_tokens_per_microbatch",
        "logit_cells": "logits_chunk_elements",
        "checkpointing": "gradient_checkpointing",
    },
    WeightSyncSpec: {"via": "method", "pause": "pause_generation"},
}
"""Class of a section -> old key -> new key; it also holds for the classes that inherit from it. A plugin's class has
them as `RENAMED`."""

MOVED: Mapping[type[BaseModel] | None, Mapping[str, str]] = {TrainSpec: {"notify": "notify"}}
"""Class of a section -> key -> path from the top level of the spec at which the key is now."""


def new_key(owner: type[BaseModel] | None, key: str) -> str | None:
    """The key that replaced `key` in a section of the class `owner`; None if `key` was not renamed."""
    if owner is None:
        return None
    inherited: tuple[Any, ...] = (*owner.__mro__, *(model for section, model in sections_of(owner) if section.inline))
    renamed = ({**RENAMED.get(cls, {}), **vars(cls).get("RENAMED", {})} for cls in inherited)
    return next((keys[key] for keys in renamed if key in keys), None)


def renamed_keys(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """The renamed keys among the unknown keys of a failed validation, each as `` `train.passes` is now `update_epochs`
    ``."""
    changes = []
    for item in error.errors(include_url=False):
        if item["type"] == "extra_forbidden":
            spot = locate(model, item["loc"])
            key = str(spot.path[-1])
            if new := new_key(spot.owner, key):
                changes.append(f"`{show_path(spot.path)}` is now `{new}`")
            elif place := MOVED.get(spot.owner, {}).get(key):
                changes.append(f"`{show_path(spot.path)}` is now `{place}` at the top level")
    return changes
