"""What each metric of a training means, and when it is bad: the table of `metrics.md`, which is a page of the docs."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

_ROW = re.compile(r"^\| (`.+?) \| (.+?) \|(?: (.+?))? \|$", re.MULTILINE)
_NAME = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_PART = re.compile(r"<\w+>")


@cache
def _table() -> list[tuple[re.Pattern[str], str, str]]:
    """The rows, each with a pattern of names, what they mean, and when they are bad."""
    page = (files("engine.plugins.view") / "metrics.md").read_text("utf-8")
    rows = []
    for names, meaning, bad in _ROW.findall(page):
        texts = [_LINK.sub(r"\1", text).replace("`", "") for text in (meaning, bad)]
        for name in _NAME.findall(names):
            pattern = ".+".join(map(re.escape, _PART.split(name)))
            rows.append((re.compile(pattern), texts[0], texts[1]))
    return rows


def explained(name: str) -> list[str] | None:
    """Return what a metric means and when it is bad; None if no row names it."""
    return next(([meaning, bad] for pattern, meaning, bad in _table() if pattern.fullmatch(name)), None)
