"""Text on a terminal: control characters of a model, a tool or a file are printed as escapes, never sent.

A terminal executes control sequences in its output: ESC and C1 sequences move the cursor, write to the clipboard
(OSC 52) and set titles. Bidirectional controls and invisible characters make text look different from its content
(CVE-2021-42574). Every command prints through `engine.console`, `echo` or `echo_json`, and logs go through
`visible` too. All of them replace such a character by its escape, such as `\\x1b` or `\\u202e`. Line feeds and tabs
stay.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from engine.masking import mask, mask_credentials

_UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f"  # C0 without tab and line feed: ESC, BEL, backspace, carriage return
    "\x7f-\x9f"  # DEL and C1: CSI, OSC and DCS as one character
    "\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb"  # bidi, invisible
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e00ff\U000e01f0-\U000e0fff"  # tags: invisible ASCII
    "\ud800-\udfff"  # lone surrogates, which cannot be encoded
    "]"
)
"""Characters that a terminal executes or does not show. Joiners and variation selectors stay: scripts and emoji need
them."""

_COMMAND = re.compile(r"##(?=[\w.-]*\[)")
"""The beginnings of commands to CI systems, anywhere in a line."""

MAX_LINE = 1_200
"""Characters of one line of a message that quotes an input."""
_MAX_QUOTE = 300
_LONG_QUOTE = re.compile(rf"`[^`\n]{{{_MAX_QUOTE},}}`|'[^'\n]{{{_MAX_QUOTE},}}'|\"[^\"\n]{{{_MAX_QUOTE},}}\"")
_LONG_WORD = re.compile(rf"\S{{{_MAX_QUOTE},}}")


def visible(text: str, *, newlines: bool = True) -> str:
    """Replace each character that a terminal would execute or hide by its escape.

    Args:
        text: Any text; lone surrogates are allowed.
        newlines: Keep line feeds. False for text that must stay on one line, such as a finding in a CI log, where a
            separate line could be read as a command.

    Returns:
        Text that can be encoded as UTF-8.
    """
    if text.isascii() and text.isprintable():
        return text
    text = _UNSAFE.sub(_escaped, text)
    return text if newlines else text.replace("\n", "\\n")


def one_line(text: str) -> str:
    """Escape a text so that it stays on one line and is not a command to a terminal or CI system."""
    return no_command(visible(text, newlines=False))


def no_command(text: str) -> str:
    """Escape `##[error]` and similar commands in a text."""
    return _COMMAND.sub(r"#\\x23", text)


def visible_json(text: str) -> str:
    """Like `visible`, for a JSON document: with JSON's escapes, so that a parser still reads the same values."""
    return _UNSAFE.sub(lambda match: json.dumps(match[0])[1:-1], text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def brief(message: str) -> str:
    """A message in which long inputs are cut in the middle: quoted ones, words, and then lines of more than `MAX_LINE`
    characters."""
    if len(message) <= _MAX_QUOTE:
        return message
    lines = message.split("\n")
    for at, line in enumerate(lines):
        if len(line) > _MAX_QUOTE:
            line = _LONG_QUOTE.sub(lambda match: match[0][0] + _cut(match[0][1:-1], 120) + match[0][0], line)
            lines[at] = _cut(_LONG_WORD.sub(lambda match: _cut(match[0], 120), line), MAX_LINE - 300)
    return "\n".join(lines)


def _cut(text: str, most: int) -> str:
    """The beginning and the end of a text, with its length; at most `most` of its characters."""
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end]}… ({len(text):,} characters) …{text[-end:]}"


def around(text: str, at: int, most: int = 160) -> str:
    """The part of a text around one of its characters."""
    start = max(min(at - most // 2, len(text) - most), 0)
    part = text[start : start + most]
    return f"{'…' * (start > 0)}{part}{'…' * (start + most < len(text))}"


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a line of plain text without secrets, on stderr if `err`, where long inputs are cut; `nl=False` leaves out
    the line feed at the end."""
    stream = sys.stderr if err else sys.stdout
    stream.write(visible(mask_credentials(brief(text)) if err else mask(text)) + ("\n" if nl else ""))
    stream.flush()


def echo_json(data: Any, *, indent: int | None = 2) -> None:
    """Print a value as JSON on stdout."""
    sys.stdout.write(visible_json(mask(json.dumps(data, indent=indent, ensure_ascii=False))) + "\n")
    sys.stdout.flush()


def size_words(size: float) -> str:
    """A number of bytes, for people: `1.50 MB`."""
    for name, unit in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} B"
