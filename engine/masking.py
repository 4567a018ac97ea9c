"""Secrets in text that is printed, logged or stored: known values are replaced by the names of their variables.

    remember("API_KEY", "sk-1234567890")
    mask("refused: sk-1234567890")                                    # "refused: ${API_KEY}"
    mask_credentials("http://me:pass@host: Bearer abcdefghijk")       # "http://me:***@host: Bearer ***"

A process remembers the values of environment variables whose names say that they are secret, of other variables that a
spec fills into a `with`, and of the API keys that backends use. Values that occur in ordinary text are not masked:
those of fewer than `SHORTEST` characters and, where the name says nothing, paths that exist, words and short numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

SHORTEST = 6
"""Minimum length of a masked value, in characters."""

_NAMES = re.compile(
    r"(?:^|_|(?<=_)API)(?:APIKEY|KEYS?|TOKENS?|SECRETS?|PASS(?:WORD|WD|PHRASE)?|CREDENTIALS?|AUTH|WEBHOOK|DSN)"
    r"(?:\d*$|_)|_PWD$",
    re.IGNORECASE,
)
_USER_INFO = re.compile(r"(://[^\s/:@?#]*):[^\s/@]+@")
_CREDENTIALS = (
    (_USER_INFO, r"\1:***@"),
    (re.compile(r"\b(bearer|basic)\s+(?!realm)[\w.~+/=-]{8,}", re.IGNORECASE), r"\1 ***"),
    (re.compile(r"\b(sk|pk|rk|hf|gh[pousr]|glpat|xox[abprs])([-_])[\w-]{8,}"), r"\1\2***"),
    (re.compile(r"\bAKIA[0-9A-Z]{12,}"), "AKIA***"),
    (
        re.compile(
            r"""((?:api[_-]?key|access[_-]?token|auth[_-]?token|client[_-]?secret|password|passwd)"""
            r"""["']?\s*[:=]\s*["']?)"""
            r"""(?!\*\*\*)[^\s"',;&{}()]{6,}""",
            re.IGNORECASE,
        ),
        r"\1***",
    ),
)
_known: dict[str, str] = {}
_pattern: re.Pattern[str] | None = None


def remember(name: str, value: str) -> None:
    """Mask this value from now on, in each of its written forms, as `${name}`."""
    global _pattern
    if len(value) < SHORTEST:
        return
    quoted = json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]
    for form in {value, *quoted, quote(value, safe="")}:
        _known[form] = f"${{{name}}}"
    _pattern = re.compile("|".join(re.escape(form) for form in sorted(_known, key=len, reverse=True)))


def is_secret(name: str, value: str) -> bool:
    """Whether a variable counts as secret everywhere: by its name, or because it is a URL with a password."""
    return _NAMES.search(name) is not None or _USER_INFO.search(value) is not None


def remember_variable(name: str, value: str) -> None:
    """Call `remember`, unless the value occurs in ordinary text and the name does not mark it as secret."""
    is_word = value.isalpha() and value.islower()
    is_ordinary = value.isascii() and (is_word or (value.isdigit() and len(value) < 9))
    with suppress(OSError, ValueError, RuntimeError):
        is_ordinary = is_ordinary or Path(value).expanduser().exists()
    if is_secret(name, value) or not is_ordinary:
        remember(name, value)


def mask(text: str) -> str:
    """Replace each remembered value in a text by the name of its variable."""
    return text if _pattern is None else _pattern.sub(lambda match: _known[match[0]], text)


def mask_credentials(text: str) -> str:
    """Like `mask`, and also passwords in URLs, bearer tokens and keys of known forms. For messages that quote other
    text."""
    text = mask(text)
    for pattern, replacement in _CREDENTIALS:
        text = pattern.sub(replacement, text)
    return text


def mask_values(value: Any, masked: Callable[[str], str] = mask) -> Any:
    """Mask every string in a JSON value, by `mask` or by `mask_credentials`."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {key: mask_values(item, masked) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [mask_values(item, masked) for item in value]
    return value
