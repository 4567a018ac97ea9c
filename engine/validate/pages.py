"""The pages of rules: the only place where a rule is explained. They are docs/rules/<id>.md, and pages/<id>.md of a plugin.

A page has a title (the id), a line with the severity and what the rule finds, then the reason, a bad and a good example.
Examples are YAML. Other files of an example are fenced too, with their name after the language.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from engine import plugin
from engine.spec.text.diagnostic import Severity

_HEAD = re.compile(r"\A# `(?P<id>[a-z0-9_.-]+)`\n\n\*(?P<severity>error|warning|info)\*: (?P<about>.+)\n")
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_FOLDER = files("engine.validate") / "rules"
"""A link to docs/rules in a checkout, a folder in a wheel."""
_FENCE = re.compile(r"^```(?P<language>\w+)(?: (?P<name>\S+))?\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Example:
    """An example spec and its other files."""

    spec: str
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Page:
    """The page of one rule."""

    id: str
    severity: Severity
    about: str
    text: str
    """The whole page."""
    arguments: tuple[str, ...] = ()
    """Arguments of `engine validate` that the rule needs."""

    def example(self, name: str) -> Example | None:
        """Return the example under `## Bad` or `## Good`; files of `Bad` also belong to `Good`, unless it replaces them."""
        parts = _SECTION.split(self.text)
        sections = dict(zip(parts[1::2], parts[2::2], strict=True))
        if name not in sections:
            return None
        fences = list(_FENCE.finditer(sections[name]))
        specs = [fence["body"] for fence in fences if fence["language"] == "yaml" and not fence["name"]]
        beside = {} if name == "Bad" else _named(sections.get("Bad", ""))
        return Example(specs[0], {**beside, **_named(sections[name])}) if specs else None


def _named(section: str) -> dict[str, str]:
    return {fence["name"]: fence["body"] for fence in _FENCE.finditer(section) if fence["name"]}


@lru_cache(maxsize=256)
def page_of(rule: str) -> Page | None:
    """Return the page of a rule; None if it has none.

    Raises:
        ValueError: the page does not have the required form.
    """
    if not re.fullmatch(r"[a-z0-9_]{1,60}\.[a-z0-9_-]{1,60}", rule):
        return None
    file = next((file for folder in _folders() if (file := folder / f"{rule}.md").is_file()), None)
    if file is None:
        return None
    text = file.read_text(encoding="utf-8")
    head = _HEAD.match(text)
    if head is None:
        raise ValueError(f"{rule}.md does not begin with its id, its severity and a line that says what it finds")
    called = re.search(r"^    engine validate SPEC (.+)$", text, re.MULTILINE)
    arguments = tuple(called[1].split()) if called else ()
    severity: Severity = (
        "error" if head["severity"] == "error" else "warning" if head["severity"] == "warning" else "info"
    )
    return Page(head["id"], severity, head["about"], text, arguments)


def page_ids() -> list[str]:
    """Return the ids of all rules that have a page."""
    names = {file.name for folder in _folders() for file in folder.iterdir()}
    return sorted(name[:-3] for name in names if re.fullmatch(r"[a-z]+\.[a-z-]+\.md", name))


def _folders() -> list[Traversable]:
    """The folder of the core's pages, then that of each package with rules of a plugin."""
    found = [_FOLDER]
    for each in list(plugin.installed().plugins.values()):
        with plugin.guarded(each):
            for package in dict.fromkeys(module.rpartition(".")[0] for module in each.rules):
                found += [folder] if (folder := files(package) / "pages").is_dir() else []
    return found
