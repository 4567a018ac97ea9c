"""Findings as SARIF 2.1.0 for code scanning, and as annotations by GitHub's workflow commands.

SARIF: OASIS Standard, "Static Analysis Results Interchange Format Version 2.1.0". Columns are counted in characters.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from engine import __version__
from engine.cli.validate.report import json_text, skipped_words
from engine.spec.text.diagnostic import SET_FILE, Diagnostic, show_path
from engine.terminal import no_command, visible

if TYPE_CHECKING:
    from engine.validate.report import Report

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}


def as_sarif(reports: Sequence[Report]) -> str:
    """Return one SARIF run with a result for each finding."""
    found = [item for report in reports for item in report.diagnostics]
    rules = sorted({item.rule for item in found})
    driver = {
        "name": "engine validate",
        "semanticVersion": __version__,
        "rules": [_rule(rule) for rule in rules],
    }
    invocation: dict[str, Any] = {"executionSuccessful": not any(report.unreadable for report in reports)}
    if skipped := _skipped(reports):
        invocation["toolExecutionNotifications"] = [{"level": "note", "message": {"text": skipped}}]
    return json_text(
        {
            "$schema": SCHEMA,
            "version": "2.1.0",
            "runs": [
                {
                    "tool": {"driver": driver},
                    "columnKind": "unicodeCodePoints",
                    "results": [
                        {
                            "ruleId": item.rule,
                            "ruleIndex": rules.index(item.rule),
                            "level": _LEVELS[item.severity],
                            "message": {"text": _plain(item.message + (f"\n{item.fix}" if item.fix else ""))},
                            "locations": [_location(item)],
                        }
                        for item in found
                    ],
                    "invocations": [invocation],
                }
            ],
        }
    )


def _skipped(reports: Sequence[Report]) -> str:
    return skipped_words(sum(len(report.skipped) for report in reports))


def _rule(rule: str) -> dict[str, Any]:
    from engine.validate.registry import page_of

    page = page_of(rule)
    if page is None:
        return {"id": rule}
    return {
        "id": rule,
        "shortDescription": {"text": page.about},
        "help": {"text": page.text, "markdown": page.text},
        "defaultConfiguration": {"level": _LEVELS[page.severity]},
    }


def _location(item: Diagnostic) -> dict[str, Any]:
    logical = [{"fullyQualifiedName": show_path(item.path)}]
    origin = item.origin
    if origin is None or origin.file == SET_FILE:
        return {"logicalLocations": logical, **({"message": {"text": _plain(origin.via)}} if origin else {})}
    path = Path(origin.file)
    uri = path.as_uri() if path.is_absolute() else quote(os.fsencode(path.as_posix()))
    physical = {
        "artifactLocation": {"uri": uri},
        "region": {"startLine": origin.line, "startColumn": origin.column},
    }
    via = {"message": {"text": _plain(origin.via)}} if origin.via else {}
    return {"physicalLocation": physical, "logicalLocations": logical, **via}


def _plain(text: str) -> str:
    """A text without links (section 3.11.6) and without invisible characters."""
    text = visible(text)
    return text.replace("[", "\\[").replace("]", "\\]") if "](" in text else text


def as_github(reports: Sequence[Report]) -> str:
    """Return one workflow command for each finding; GitHub shows it beside the line."""
    commands: list[str] = []
    if skipped := _skipped(reports):
        commands.append(f"::notice title=check.skipped::{_message(skipped)}")
    for report in reports:
        for item in report.diagnostics:
            place = {"title": item.rule}
            origin = item.origin
            if origin is not None and origin.file != SET_FILE:
                place = {"file": origin.file, "line": str(origin.line), "col": str(origin.column), **place}
            escaped = {key: _message(text).replace(":", "%3A").replace(",", "%2C") for key, text in place.items()}
            properties = ",".join(f"{key}={text}" for key, text in escaped.items())
            via = f" ({origin.via})" if origin is not None and origin.via else ""
            fix = f"\n{item.fix}" if item.fix else ""
            commands.append(f"::{_COMMANDS[item.severity]} {properties}::{_message(item.message + via + fix)}")
    return "\n".join(commands)


def _message(text: str) -> str:
    return no_command(visible(text)).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
