"""A message -> the same message, in which each value of an environment variable is replaced by the variable's name.

A spec can name any variable (`limits: {user_turns: ${CI_SECRET}}`), and a message that quotes the value would print it
in a public log. So every diagnostic of a spec passes through `mask`: whole values, long parts of them (messages cut long
values short) and the forms in which messages write them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from engine.spec.text.diagnostic import Diagnostic, Origin
from engine.spec.text.scalars import read_scalar

SHORT = 4
"""A value with fewer characters is masked only in messages about a value that the variable is part of."""
WORD = 8
"""A value with fewer characters is masked where it stands as a word of its own."""
PART = 12
"""Characters of a value that are masked wherever they stand."""
PART_AT_PLACE = 6
"""The same, in messages about a value that the variable is part of."""
LONGEST = 100_000
"""Characters of a value that parts are looked for in."""


def mask_all(found: Iterable[Diagnostic], variables: Mapping[str, str]) -> list[Diagnostic]:
    """Diagnostics without the values of these variables."""
    return [masked(item, variables) for item in found] if variables else list(found)


def masked(item: Diagnostic, variables: Mapping[str, str]) -> Diagnostic:
    """A diagnostic without the values of these variables; itself where it has none."""
    origin = item.origin
    here = {name for name in variables if origin is not None and f"${{{name}}}" in origin.via}

    def hide(text: str) -> str:
        return mask(text, variables, here)

    place = origin and Origin(mask_name(origin.file, variables), origin.line, origin.column, hide(origin.via))
    path = tuple(hide(key) if isinstance(key, str) else key for key in item.path)
    fix = None if item.fix is None else hide(item.fix)
    return replace(item, message=hide(item.message), fix=fix, origin=place, path=path)


def mask_name(file: str, variables: Mapping[str, str]) -> str:
    """A file's name without the values of these variables."""
    return mask(file, variables)


def mask(text: str, variables: Mapping[str, str], here: Iterable[str] = ()) -> str:
    """A text without the values of these variables.

    Args:
        text: Any text.
        variables: Values, by name.
        here: Variables that the value the text is about is made of: of these, short values and words are masked too.
    """
    near = frozenset(here)
    for name, value in sorted(variables.items(), key=lambda item: -len(item[1])):
        if not value.strip():
            continue
        hidden = f"${{{name}}}"
        names = f"${{{name}", hidden  # the variable itself may be named
        for form in _forms(value):
            if len(form) >= WORD:
                text = _outside(text, names, re.escape(form), hidden)
            elif len(form) >= SHORT or name in near:
                text = _outside(text, names, rf"(?<!\w){re.escape(form)}(?!\w)", hidden)
        if name in near:
            for word in re.findall(r"\w{3,}", value[:LONGEST]):
                text = _outside(text, names, rf"(?<!\w){re.escape(word)}(?!\w)", hidden)
        text = _without_parts(text, value[:LONGEST], PART_AT_PLACE if name in near else PART, hidden)
    return text


def _forms(value: str) -> list[str]:
    """The ways in which messages write a value, the longest first."""
    forms = {
        value,
        value.strip(),
        repr(value)[1:-1],
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
    }
    forms |= {value.lower(), value.replace("-", "_")}
    number = read_scalar(value)
    if isinstance(number, int | float) and not isinstance(number, bool):
        forms |= {str(number), f"{number:,}"}
        if isinstance(number, float) and number.is_integer() and abs(number) < 1e18:
            forms |= {str(int(number)), f"{int(number):,}"}
    return sorted((form for form in forms if form.strip()), key=lambda form: -len(form))


def _outside(text: str, names: tuple[str, str], pattern: str, hidden: str) -> str:
    """Replace what a pattern finds, but not inside of the variable's own name."""
    if not re.search(pattern, text):
        return text
    own = re.escape(names[0]) + r"(?::[^{}]*)?\}"
    return re.sub(f"({own})|{pattern}", lambda match: match[1] or hidden, text)


def _without_parts(text: str, value: str, size: int, hidden: str) -> str:
    """Replace every run of a text that stands in the value too, of this size or longer."""
    if len(value) < size or len(text) < size:
        return text
    known = {value[index : index + size] for index in range(len(value) - size + 1)}
    found: list[str] = []
    index = kept = 0
    while index <= len(text) - size:
        if text[index : index + size] not in known:
            index += 1
            continue
        end = index + size
        while end < len(text) and text[end - size + 1 : end + 1] in known:
            end += 1
        found += [text[kept:index], hidden]
        index = kept = end
    return "".join([*found, text[kept:]]) if found else text
