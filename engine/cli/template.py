"""`engine template`: what is checked about a model's chat template: rendering, parsing of replies, bridges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from engine.tokens.format import ChatFormat


def template(
    model: str = typer.Argument(help="A folder, a hub id, or a name of `engine models`."),
    chat_template: str = typer.Option(None, "--chat-template", help="A Jinja file that replaces the tokenizer's."),
    renderer: str = typer.Option("auto", "--renderer", help="As `model.renderer` of a spec."),
    tool_calls: str = typer.Option("auto", "--tool-calls", help="As `model.tool_calls` of a spec."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object, for programs."),
) -> None:
    """Show what is checked about a model's chat template: which reader parses replies, and which turns continue the tape or branch."""
    import json
    from pathlib import Path

    from engine.errors import EngineError
    from engine.schemas.model import ModelSpec
    from engine.terminal import echo
    from engine.tokens.loading import load_format

    spec = ModelSpec(path=model, chat_template=chat_template, renderer=renderer, tool_calls=tool_calls)
    try:
        form = load_format(spec, Path())
    except EngineError as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    found = describe(form, spec)
    if as_json:
        echo(json.dumps(found, ensure_ascii=False))
        return
    for key, value in found.items():
        if isinstance(value, dict):
            echo(f"{key}:" if value else f"{key}: none")
            for name, text in value.items():
                echo(f"  {name}: {text}")
        else:
            echo(f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}")


def describe(form: ChatFormat, spec: Any) -> dict[str, Any]:
    """Return facts about a chat format, by name."""
    import hashlib

    from engine.tokens.choosing import chosen_reader, failures
    from engine.tokens.template import TemplateFormat

    found: dict[str, Any] = {"renders": "the model's chat template" if form.name == "template" else form.name}
    if isinstance(form, TemplateFormat):
        found["template"] = hashlib.sha256("\n".join(form.sources).encode()).hexdigest()[:16]
    reader = form.reader.name if form.reader is not None and form.call_format is None else None
    auto = isinstance(form, TemplateFormat) and spec.tool_calls == "auto" and (form.knows_tools or form.calls_shown)
    if auto and isinstance(form, TemplateFormat):
        chosen = chosen_reader(form, spec)
        found["replies read by"] = chosen.reader or "no parser: tools are refused with this model"
        found["not read back"] = chosen.unread
        found["readers refused"] = chosen.tried
    else:
        found["replies read by"] = reader or (spec.tool_calls if spec.tool_calls != "auto" else "plain")
        found["not read back"] = failures(form) if form.calls_shown else {}
    found["shows"] = [
        name
        for name, shown in (
            ("tools", form.knows_tools),
            ("tool results", form.knows_tool_results),
            ("one call a reply" if form.calls_shown == 1 else "calls", form.calls_shown),
            ("reasoning", form.knows_reasoning),
        )
        if shown
    ]
    found["ends replies with"] = form.stops
    found["turns"] = _turns(form)
    return found


def _turns(form: ChatFormat) -> dict[str, str]:
    """Return whether the tape continues or a branch begins, for the usual turns."""
    from engine.tokens.proof import ASSISTANT, BLANK, CALLS, REASONS, TOOL, USER, prove

    cases = {
        "user after an answer": ([USER, ASSISTANT], USER),
        "user after reasoning": ([USER, ASSISTANT + REASONS], USER),
        "tool after a call": ([USER, ASSISTANT + CALLS + BLANK], TOOL),
        "tool after reasoning and a call": ([USER, ASSISTANT + REASONS + CALLS], TOOL),
        "user after calls and an answer": ([USER, ASSISTANT + CALLS, TOOL, ASSISTANT], USER),
    }
    found = {}
    for name, (kinds, new) in cases.items():
        if any(kind >= ASSISTANT + CALLS for kind in kinds) and not form.calls_shown:
            continue
        if (
            any((kind - ASSISTANT) % CALLS == REASONS for kind in kinds if kind >= ASSISTANT)
            and not form.knows_reasoning
        ):
            continue
        verdict = prove(form, bytes(kinds), bytes([new]), None)
        found[name] = "goes on" if verdict.bridged and not verdict.rewrites else f"a branch: {verdict.why}"
    return found
