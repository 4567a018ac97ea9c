"""Values that environment variables gave: stored by reference, and filled in again when a run is taken up.

A header keeps `${NAME}` in place of such a value, and a digest that says whether the variable still holds it. The
digest is scrypt's (RFC 7914; n = 2^14, r = 8, p = 1: 16 MiB and some 50 ms a guess) under a salt of the run's own, cut
to 32 bits: it says next to nothing about a key of 128 bits, and enough to notice that a value has changed. A short
password can be guessed from it.

A spec can name any variable (`limits: {user_turns: ${CI_SECRET}}`), and a message that quotes the value would print it
in a public log. So every diagnostic of a spec passes through `mask`: whole values, long parts of them (messages cut
long values short) and the forms in which messages write them become the variable's name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from engine.errors import StoreError
from engine.masking import is_secret, mask_values, remember_variable
from engine.schemas.base import Struct
from engine.spec.text.diagnostic import DataPath, Diagnostic, Origin, show_path
from engine.spec.text.tree import read_scalar

VARIABLE = re.compile(r"\$(\$?)\{([^{}]*)(\}?)")
"""`${NAME}`, `${NAME:default}` and `$${`, which is a literal `${`: (escape, inside, closing brace)."""
MISSING = object()
"""No value: a path leads nowhere."""


class Reference(Struct, frozen=True, kw_only=True):
    """A value that is kept as it was written."""

    path: DataPath
    """Of the value, in the spec."""
    text: str
    """As it was written: `Bearer ${TOKEN}`."""
    typed: bool
    """The text is a variable alone, and what it holds is read as YAML: a number, say."""


def names_in(text: str) -> dict[str, str | None]:
    """The variables that a text names, and their defaults."""
    held: dict[str, str | None] = {}
    for escaped, inside, _ in VARIABLE.findall(text):
        if not escaped:
            name, colon, default = inside.partition(":")
            held[name] = default if colon else None
    return held


def kept_by_reference(path: DataPath, text: str) -> bool:
    """Whether a value is a secret: it is in a `with`, or a variable in it is one by its name or content."""
    return "with" in path or any(is_secret(name, os.environ.get(name, "")) for name in names_in(text))


def remember_secrets(references: Mapping[DataPath, str]) -> None:
    """Mask, from now on, what the variables of these values hold."""
    for path, text in references.items():
        if kept_by_reference(path, text):
            for name in names_in(text):
                remember_variable(name, os.environ.get(name, ""))


def digests(texts: Sequence[str], salt: str) -> dict[str, str]:
    """Every variable that the texts name -> a digest of what it holds; empty where it is not set."""
    names = dict.fromkeys(name for text in texts for name in names_in(text))
    return {name: digest(os.environ[name], salt) if name in os.environ else "" for name in names}


@lru_cache(maxsize=256)  # a command asks for the same one several times, and each costs about 40 ms
def digest(value: str, salt: str) -> str:
    """32 bits of a slow, salted digest of a value, in hex."""
    return hashlib.scrypt(
        value.encode(errors="surrogatepass"), salt=bytes.fromhex(salt), n=2**14, r=8, p=1, dklen=4
    ).hex()


def with_references(document: Any, references: Sequence[Reference]) -> Any:
    """A copy of a document with the texts in place of the values; what else holds a remembered value is masked."""
    masked = mask_values(document)
    for reference in references:
        if value_at(document, reference.path) is not MISSING:
            masked = _put(masked, reference.path, reference.text)
    return masked


def filled(
    document: Any, references: Sequence[Reference], stored: Mapping[str, str], salt: str, *, strict: bool
) -> Any:
    """A copy of a document with what the variables hold now in place of the texts. `stored`: digests, under `salt`, of
    what they held; empty for one that was not set. Texts of others stay, unless it is `strict`.

    Raises: StoreError: a variable holds something else now, by its name and the place that uses it.
    """
    changed = {name: problem for name, held in stored.items() if (problem := _changed(name, held, salt))}
    for reference in references:
        names = names_in(reference.text)
        bad = next((name for name in names if name in changed), None)
        if bad is not None and strict:
            raise StoreError(
                f"the environment variable `{bad}`, which `{show_path(reference.path)}` uses, {changed[bad]}; "
                "set it to what it was when the run began (the run stores no values of variables that may be secret)"
            )
        if bad is None and value_at(document, reference.path) is not MISSING:
            for name in names:
                remember_variable(name, os.environ.get(name, ""))
            document = _put(document, reference.path, _filled(reference))
    return document


def _changed(name: str, held: str, salt: str) -> str:
    """How a variable differs from what it was; empty where it does not."""
    if name not in os.environ:
        return "is not set now" if held else ""
    if not held:
        return "was not set when the run began, and is set now"
    return "" if digest(os.environ[name], salt) == held else "holds another value now than when the run began"


def _filled(reference: Reference) -> Any:
    def value_of(match: re.Match[str]) -> str:
        escaped, inside, _ = match.groups()
        name, _, default = inside.partition(":")
        return match[0][1:] if escaped else os.environ.get(name, default)

    text = VARIABLE.sub(value_of, reference.text)
    return read_scalar(text) if reference.typed else text


def value_at(document: Any, path: DataPath) -> Any:
    """The value at `path`, or `MISSING`."""
    for key in path:
        try:
            document = document[key]
        except (LookupError, TypeError):
            return MISSING
    return document


def _put(document: Any, path: DataPath, value: Any) -> Any:
    """A copy with another value at `path`."""
    if not path:
        return value
    copy: Any = list(document) if isinstance(document, list) else dict(document)
    copy[path[0]] = _put(document[path[0]], path[1:], value)
    return copy


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
    hide = partial(mask, variables=variables, here=here)
    place = origin and Origin(mask(origin.file, variables), origin.line, origin.column, hide(origin.via))
    path = tuple(hide(key) if isinstance(key, str) else key for key in item.path)
    fix = None if item.fix is None else hide(item.fix)
    return replace(item, message=hide(item.message), fix=fix, origin=place, path=path)


def mask(text: str, variables: Mapping[str, str], here: Iterable[str] = ()) -> str:
    """A text without the values of these variables. Of those that the value is made of that the text is about (`here`),
    short values and words are masked too.
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
    variable = re.escape(names[0]) + r"(?::[^{}]*)?\}"
    return re.sub(f"({variable})|{pattern}", lambda match: match[1] or hidden, text)


def _without_parts(text: str, value: str, size: int, hidden: str) -> str:
    """Replace every run of a text that stands in the value too, of this size or longer."""
    if len(value) < size or len(text) < size:
        return text
    value_parts = {value[index : index + size] for index in range(len(value) - size + 1)}
    pieces: list[str] = []
    index = copied = 0
    while index <= len(text) - size:
        if text[index : index + size] not in value_parts:
            index += 1
            continue
        end = index + size
        while end < len(text) and text[end - size + 1 : end + 1] in value_parts:
            end += 1
        pieces += [text[copied:index], hidden]
        index = copied = end
    return "".join([*pieces, text[copied:]]) if pieces else text
