"""The goldens of texts: help of the commands, messages of the rules on their pages' bad examples, JSON Schemas as data."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

from golden_kit import Golden, Record

WIDTH = "120"
"""Columns of the terminal in which help is printed."""


def commands() -> Iterator[list[str]]:
    """The words of `engine` and of each command below it."""
    import typer.main

    from engine.cli.main import app

    def below(command: Any, words: list[str]) -> Iterator[list[str]]:
        yield words
        for name, inner in sorted(getattr(command, "commands", {}).items()):
            yield from below(inner, [*words, name])

    return below(typer.main.get_command(app), [])


def help_texts(folder: Path) -> list[Record]:
    """What `--help` prints, line by line, without the frame's width."""
    from typer.testing import CliRunner

    from engine.cli.main import app

    texts: list[Record] = []
    for words in commands():
        printed = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": WIDTH, "TERM": "dumb"}).stdout
        lines = [line.strip("│ ").rstrip("─╮╯ ") for line in printed.splitlines()]
        texts.append({"at": " ".join(["engine", *words]), "help": [line for line in lines if line]})
    return texts


def messages(folder: Path) -> list[Record]:
    """What each rule says of its page's bad example."""
    from rule_examples import BAD, WHOLE, findings, page, write

    texts: list[Record] = []
    for rule in BAD:
        place = folder / rule
        place.mkdir()
        path = list(sys.path)
        sys.modules.pop("my_code", None)
        importlib.invalidate_caches()
        with chdir(place):
            file = write(page(rule), "Bad", place, whole=rule in WHOLE)
            said = [str(item).replace(str(place), "FOLDER") for item in findings(page(rule), file) if item.rule == rule]
        sys.path[:] = path
        texts.append({"at": rule, "messages": said})
    sys.modules.pop("my_code", None)
    return texts


def schemas(folder: Path) -> list[Record]:
    """Each JSON Schema as data, a record for each definition; the order of keys means nothing."""
    from engine.plugins.schema.json_schema import documents

    definitions: list[Record] = []
    for name, text in sorted(documents().items()):
        schema = json.loads(json.dumps(json.loads(text), sort_keys=True))
        inner = schema.pop("$defs", {})
        definitions.append({"at": name} | schema)
        definitions += [{"at": f"{name} $defs.{definition}"} | inner[definition] for definition in sorted(inner)]
    return definitions


GOLDENS = [
    Golden("texts", "rules", messages),
    Golden("texts", "help", help_texts),
    Golden("texts", "schemas", schemas),
]
