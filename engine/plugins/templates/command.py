"""`engine template`: what is checked about a model's chat template: rendering, parsing of replies, turns, masks,
patches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from engine.cli.options import Json

if TYPE_CHECKING:
    from pathlib import Path

    from engine.tokens.template import ChatTemplate


_LONG = 320
"""Characters of a text that is not trained beyond which its middle is left out; `--json` has all of it."""


def template(
    model: str = typer.Argument(help="A folder, a hub id, or a name of `engine models`."),
    chat_template: str = typer.Option(None, "--chat-template", help="A Jinja file that replaces the tokenizer's."),
    renderer: str = typer.Option("auto", "--renderer", help="As `model.renderer` of a spec."),
    tool_calls: str = typer.Option("auto", "--tool-calls", help="As `model.tool_calls` of a spec."),
    patches: bool = typer.Option(
        False, "--patches", help="With all patches that are known for it, as `model.template_patches: true`."
    ),
    history: str = typer.Option("branch", "--history", help="As `model.history` of a spec: branch or keep."),
    write: str = typer.Option(
        None, "--write", metavar="FILE", help="Write the chat template, with its patches, to a new file."
    ),
    as_json: Json = False,
) -> None:
    """Show what is checked about a model's chat template: which reader parses replies, which turns continue the tape or
    begin a branch and where the two renderings part, which tokens are trained, and which patches there are.
    """
    import json
    from pathlib import Path

    from engine.errors import EngineError
    from engine.plugins.templates.report import plain
    from engine.schemas.model import ModelSpec
    from engine.terminal import echo
    from engine.tokens.loading import load_format

    if history not in ("branch", "keep"):
        echo(f"error: --history {history}: write branch or keep", err=True)
        raise typer.Exit(2)
    spec = ModelSpec(
        path=model,
        chat_template=chat_template,
        renderer=renderer,
        tool_calls=tool_calls,
        template_patches=patches,
        history="keep" if history == "keep" else "branch",
    )
    try:
        template = load_format(spec, Path())
        if write is not None:
            _write(template, Path(write))
    except EngineError as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    facts = describe(template, spec)
    if as_json:
        echo(json.dumps(facts, ensure_ascii=False, default=plain))
        return
    _echo(facts)


def _echo(facts: dict[str, Any]) -> None:
    from engine.terminal import echo

    turns, rows = facts.pop("turns"), facts.pop("trained")
    for key, value in facts.items():
        if isinstance(value, dict):
            echo(f"{key}:" if value else f"{key}: none")
            for name, text in value.items():
                echo(f"  {name}: {text}")
        else:
            echo(f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
    echo("turns:")
    for name, turn in turns.items():
        echo(f"  {name}: {'goes on' if turn.goes_on else f'a branch: {turn.why}'}")
        if turn.was or turn.now:
            echo(f"    before: {turn.was!r}")
            echo(f"    now:    {turn.now!r}")
    if isinstance(rows, str):
        echo(f"trained: not shown, because {rows}")
        return
    echo("trained in a short episode:")
    for number, row in enumerate(rows):
        echo(f"  row {number}:")
        for piece in row:
            text = piece.text
            if len(text) > _LONG and not piece.trained:
                text = f"{text[: _LONG // 2]} […] {text[-_LONG // 2 :]}"
            echo(f"    {'trained' if piece.trained else 'masked '} {text!r}")


def _write(template: ChatTemplate, path: Path) -> None:
    """Write a template to a new file.

    Raises:
        RenderError: The file exists or cannot be written, or the model has no template of this kind.
    """
    from engine.errors import RenderError
    from engine.tokens.jinja_template import JinjaTemplate

    if not isinstance(template, JinjaTemplate) or len(template.source.sources) > 1:
        raise RenderError("--write needs a model with one chat template, and `--renderer auto`")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(template.source.sources[0])
    except OSError as error:
        raise RenderError(f"--write {path}: {error.strerror}; name a new file") from error


def describe(template: ChatTemplate, spec: Any) -> dict[str, Any]:
    """Return facts about a chat format, by name."""
    from engine.errors import EngineError, RenderError
    from engine.plugins.templates.report import branch_rule, how_prompts_are_made, masks, usual_turns
    from engine.tokens.choosing import chosen_reader, failures
    from engine.tokens.jinja_template import JinjaTemplate
    from engine.tokens.patches import patches_of, template_hash

    facts: dict[str, Any] = {"renders": "the model's chat template" if template.name == "template" else template.name}
    if isinstance(template, JinjaTemplate):
        facts["template"] = " ".join(map(template_hash, template.source.sources))
        patches = {patch.name: patch.about for source in template.source.sources for patch in patches_of(source)}
        facts["patches"] = "all that are known are applied" if spec.template_patches else patches
    reader = template.reader.name if template.reader is not None and template.call_format is None else None
    auto = (
        isinstance(template, JinjaTemplate)
        and spec.tool_calls == "auto"
        and (template.knows_tools or template.calls_shown)
    )
    if auto and isinstance(template, JinjaTemplate):
        chosen = chosen_reader(template, spec)
        facts["replies read by"] = chosen.reader or "no parser: tools are refused with this model"
        facts["not read back"] = chosen.unread
        facts["readers refused"] = chosen.tried
    else:
        facts["replies read by"] = reader or (spec.tool_calls if spec.tool_calls != "auto" else "plain")
        facts["not read back"] = failures(template) if template.calls_shown else {}
    facts["shows"] = [
        name
        for name, shown in (
            ("tools", template.knows_tools),
            ("tool results", template.knows_tool_results),
            ("one call a reply" if template.calls_shown == 1 else "calls", template.calls_shown),
            ("reasoning", template.knows_reasoning),
        )
        if shown
    ]
    facts["ends replies with"] = template.stops
    if template.vision is not None:
        ways = ("tokens from the image's size", "tokens from the processor, which runs for each image")
        try:
            facts["images"] = ways[template.vision.processing.sized is None]
        except RenderError as error:
            facts["images"] = f"none: {error}"
    facts["prompts"] = ": ".join(how_prompts_are_made(template))
    facts["turns"] = turns = usual_turns(template)
    facts["branch rule"] = branch_rule(turns, spec.history)
    try:
        facts["trained"] = masks(template)
    except EngineError as error:
        facts["trained"] = str(error)
    return facts
