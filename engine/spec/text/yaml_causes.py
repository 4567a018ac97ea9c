"""The likely cause of a YAML syntax error, and its own line, which is often not the line where the parser stopped.

Each suspicion is a repair of one place: a quote is closed, a line is moved to the indentation of its neighbours, a
colon or a comma is added. The text with the repair is parsed again. The first repair after which the error is gone, or
occurs further down, is the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import yaml

from engine.schemas.base import Struct

MAX_CHARACTERS = 100_000
"""Maximum size of a text in which causes are looked for."""
MAX_REPAIRS = 60
"""Maximum number of repairs that are tried."""
MAX_LINES = 25
"""Maximum number of lines above the error that are suspected."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_KEY = re.compile(r"^(\s*(?:- +)?)([\w.-]+):(?=\s|$)")
_GLUED = re.compile(r"^(\s*(?:- +)?[A-Za-z_][\w-]*):(?=[^\s/:\\])")
_NO_COLON = re.compile(r"^(\s*(?:- +)?[A-Za-z_][\w-]*)(?: +(\S.*))?$")
_VALUE = re.compile(r"^(\s*(?:- +)?(?:[\w.-]+: +)?)(\S.*?)\s*$")
_MISSING_COMMA = re.compile(r"""(?<=[\w"'\]}])( +)(?=[A-Za-z_][\w-]*: )""")
_QUOTED = re.compile(
    r"""(?:^|(?<=\s))\#.*|(?:^|(?<=[:\-,\[{]))\s*"""
    r"""(?P<value>"(?:\\.|[^"\\])*(?P<double>"?)|'(?:''|[^'])*(?P<single>'?))"""
)
"""A comment, or a quoted value with the quote that ends it; the latter is empty where the line does not end the
value."""
_OPENERS = {"{": "}", "[": "]"}


class YamlRepair(Struct, frozen=True, kw_only=True):
    """A probable mistake: where it is, what it is, and how to correct it."""

    message: str
    fix: str
    line: int
    """From 1."""
    column: int
    """From 1."""
    lines: dict[int, str]
    """The lines that the correction replaces, by index."""
    usual: bool = True
    """Whether the result is usual: indented by a multiple of 2. Another repair is preferred to one that is not."""


def likely_cause(lines: list[str], failed: int) -> YamlRepair | None:
    """Return the likely cause of a syntax error at the line of index `failed`; None if no repair helps."""
    if sum(map(len, lines)) > MAX_CHARACTERS:
        return None
    unusual: YamlRepair | None = None
    further: YamlRepair | None = None
    for repair in islice(_repairs(lines, failed), MAX_REPAIRS):
        stopped = _stops([repair.lines.get(at, line) for at, line in enumerate(lines)])
        if stopped is None and repair.usual:
            return repair
        if stopped is None:
            unusual = unusual or repair
        elif stopped > failed + 1 and further is None:
            further = repair
    return unusual or further


def _stops(lines: list[str]) -> int | None:
    """The index of the line where the parser stops; None if it reads everything."""
    loader = _LOADER("\n".join(lines))
    try:
        while loader.check_event():
            loader.get_event()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        return int(mark.line) if mark else 0
    except (yaml.YAMLError, UnicodeError):
        return 0
    finally:
        loader.dispose()
    return None


def _repairs(lines: list[str], failed: int) -> Iterator[YamlRepair]:
    last = min(failed, len(lines) - 1)
    near = range(last, max(-1, last - MAX_LINES), -1)
    for at in near:
        yield from _quotes(lines, at)
    for at in near:
        yield from _brackets(lines, at)
    for at in (item for item in near if item >= last - 5):
        yield from _within_line(lines, at)
    for at in sorted(near, key=lambda item: _depth(lines[item]) % 2 == 0):  # an odd indentation is suspected first
        yield from _indentation(lines, at)
    for at in range(last):  # an open quote swallows lines, however many
        if at < last - MAX_LINES + 1:
            yield from _quotes(lines, at)


def _quotes(lines: list[str], at: int) -> Iterator[YamlRepair]:
    """A quote that is not closed in its line."""
    values = (match for match in _QUOTED.finditer(lines[at]) if match["value"])
    opened = next((match for match in values if not (match["double"] or match["single"])), None)
    if opened is None:
        return
    column, quote, line = opened.start("value"), opened["value"][0], lines[at].rstrip()
    for end in (len(line), *(index for index in range(len(line) - 1, column, -1) if line[index] in ",}]")):
        yield YamlRepair(
            message="a quote is opened here and not closed",
            fix=f"close it with {quote} in the same line",
            line=at + 1,
            column=column + 1,
            lines={at: line[:end] + quote + line[end:]},
        )


def _brackets(lines: list[str], at: int) -> Iterator[YamlRepair]:
    """A `{` or `[` that is not closed in its line, and a bracket that closes nothing."""
    stack: list[tuple[int, str]] = []
    quote = ""
    line = lines[at].rstrip()
    for index, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "#" and (index == 0 or line[index - 1].isspace()):
            break
        elif char in _OPENERS and not (
            stack == [] and line[:index].strip() and line[:index].rstrip()[-1:] not in ":-,[{"
        ):
            stack.append((index, char))
        elif stack and char == _OPENERS[stack[-1][1]]:
            stack.pop()
        elif char in "}]":
            yield YamlRepair(
                message=f"`{char}` closes nothing here",
                fix="remove it, or open it before",
                line=at + 1,
                column=index + 1,
                lines={at: line[:index] + line[index + 1 :]},
            )
            return
    if stack:
        column, char = stack[-1]
        closers = "".join(_OPENERS[item] for _, item in reversed(stack))
        ends = (index for index in range(len(line) - 1, column, -1) if line[index] in "}],")
        for closed in (line + closers, *(line[:end] + _OPENERS[char] + line[end:] for end in ends)):
            yield YamlRepair(
                message=f"`{char}` is opened here and not closed",
                fix=f"close it with `{_OPENERS[char]}`",
                line=at + 1,
                column=column + 1,
                lines={at: closed},
            )


def _within_line(lines: list[str], at: int) -> Iterator[YamlRepair]:
    """A colon, a space or a comma that is missing, and a value that needs quotes."""
    line = lines[at]
    if glued := _GLUED.match(line):
        key = glued[1].strip().removeprefix("- ")
        yield YamlRepair(
            message=f"there is no space after `{key}:`",
            fix=f"write `{key}: …`",
            line=at + 1,
            column=glued.end(1) + 1,
            lines={at: f"{glued[1]}: {line[glued.end() :]}"},
        )
    if (bare := _NO_COLON.match(line)) and not _KEY.match(line):
        key = bare[1].strip().removeprefix("- ")
        yield YamlRepair(
            message=f"there is no colon after `{key}`",
            fix=f"write `{key}:`",
            line=at + 1,
            column=bare.end(1) + 1,
            lines={at: f"{bare[1]}: {bare[2] or ''}".rstrip()},
        )
    for comma in _MISSING_COMMA.finditer(line):
        yield YamlRepair(
            message="a comma is missing here",
            fix="separate the entries of {…} and […] by commas",
            line=at + 1,
            column=comma.start() + 1,
            lines={at: line[: comma.start()] + "," + line[comma.start() :]},
        )
    value = _VALUE.match(line)
    if value and (": " in value[2] or value[2][0] in "%@`*&!|>{[") and value[2][0] not in "\"'":
        quoted = '"' + value[2].replace("\\", "\\\\").replace('"', '\\"') + '"'
        why = "contains `: `" if ": " in value[2] else f"begins with `{value[2][0]}`"
        yield YamlRepair(
            message=f"the value {why}, so it needs quotes",
            fix=f"write {quoted}" if len(quoted) < 60 else "quote it",
            line=at + 1,
            column=value.start(2) + 1,
            lines={at: value[1] + quoted},
        )


def _indentation(lines: list[str], at: int) -> Iterator[YamlRepair]:
    """A line, with the lines below it that are deeper, at the indentation of a line above."""
    line = lines[at]
    indent = _depth(line)
    if not line.strip() or line.lstrip().startswith("#"):
        return
    what = _what(line)
    block = [at]
    for below in range(at + 1, len(lines)):
        depth = _depth(lines[below])
        if (
            lines[below].strip()
            and depth <= indent
            and not (what == "-" and depth == indent and lines[below].lstrip().startswith("-"))
        ):
            break
        block.append(below)
    wanted: dict[int, tuple[str, int]] = {}  # depth -> the entry at this depth, and its line number
    for above in range(at - 1, -1, -1):
        if not lines[above].strip() or lines[above].lstrip().startswith("#"):
            continue
        depth = _depth(lines[above])
        wanted.setdefault(depth, (_what(lines[above]), above + 1))
        if lines[above].rstrip().endswith(":"):
            wanted.setdefault(depth + 2, (_what(lines[above]), above + 1))
        if depth == 0:
            break
    for depth, (name, number) in sorted(wanted.items(), key=lambda item: abs(item[0] - indent)):
        if depth != indent:
            relation = "as" if depth == _depth(lines[number - 1]) else "below"
            moved = {
                item: " " * max(0, depth - indent + _depth(lines[item])) + lines[item].lstrip(" ") for item in block
            }
            for changed in (moved, {at: moved[at]}) if len(block) > 1 else (moved,):
                yield YamlRepair(
                    message=f"the indentation of `{what}` is wrong: {indent} space{'s' * (indent != 1)}",
                    fix=f"indent it by {depth}, {relation} `{name}` in line {number}",
                    line=at + 1,
                    column=indent + 1,
                    lines=changed,
                    usual=depth % 2 == 0,
                )


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _what(line: str) -> str:
    key = _KEY.match(line)
    text = line.strip()
    if key:
        return f"{key[2]}:"
    return "-" if text.startswith("-") else text[:20]
