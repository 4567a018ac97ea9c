"""`engine import`: what is written for other engines, as a spec."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from engine.terminal import echo

import_app = typer.Typer(help="Make a spec of what is written for another engine.", no_args_is_help=True)


@import_app.callback()
def _group() -> None:
    """Make a spec of what is written for another engine."""


@import_app.command()
def verl(
    config: Annotated[Path, typer.Argument(help="A configuration of verl's, or an interaction YAML alone.")],
    out: Annotated[Path | None, typer.Option(help="The spec; CONFIG.spec.yaml beside it when left out.")] = None,
    model: Annotated[str | None, typer.Option(help="The model, where the configuration names none.")] = None,
    tasks: Annotated[str | None, typer.Option(help="The rows (.parquet or .jsonl), likewise.")] = None,
    interactions: Annotated[str | None, typer.Option(help="The interaction YAML, likewise.")] = None,
) -> None:
    """verl's multi-turn configuration with interactions as a spec: its classes run unchanged.

    `max_assistant_turns` and `max_user_turns` become limits, a turn's score its reward. What is not taken over is said
    at the top of the spec. Exits with 1 where a model, rows or interactions are named nowhere, or the file is there.
    """
    import yaml

    from engine.integrations.verl_config import as_yaml, spec_of

    target = out or config.with_suffix(".spec.yaml")
    try:
        data: Any = yaml.safe_load(config.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"{config} holds no mapping")
        if "interaction" in data and interactions is None:
            interactions = config.name
        spec, notes = spec_of(data, name=config.stem, interactions=interactions, model=model, tasks=tasks)
        if target.exists():
            raise ValueError(f"{target} is there already, and nothing was changed; choose another with --out")
        target.write_text(as_yaml(spec, notes, config.name), encoding="utf-8")
    except (OSError, ValueError, yaml.YAMLError) as error:
        echo(str(error), err=True)
        raise typer.Exit(1) from None
    for note in notes:
        echo(f"note: {note}")
    echo(f"Made {target}\nNext: engine validate {target}")
