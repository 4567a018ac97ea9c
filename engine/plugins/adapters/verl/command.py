"""`engine import verl`: converts a configuration of verl to a spec."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from engine.terminal import echo


def verl(
    config: Annotated[Path, typer.Argument(help="A verl configuration, or only an interaction YAML file.")],
    out: Annotated[
        Path | None, typer.Option(help="The spec to write; by default CONFIG.spec.yaml beside CONFIG.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model, if the configuration names none.")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="The rows (.parquet or .jsonl), if the configuration names none.")
    ] = None,
    interactions: Annotated[
        str | None, typer.Option(help="The interaction YAML file, if the configuration names none.")
    ] = None,
) -> None:
    """Convert a verl multi-turn configuration with interactions or tools to a spec; its classes run unchanged.

    Rollout, actor and trainer become `backend` and `train`, turns and lengths limits, and a turn's score its reward.
    Keys that are not converted are listed at the top of the spec. Exits with 1 if no model, no rows, or neither
    interactions nor tools are given, or if the output file exists.
    """
    import yaml

    from engine.plugins.adapters.verl.config import as_yaml, spec_of

    target = out or config.with_suffix(".spec.yaml")
    try:
        data: Any = yaml.safe_load(config.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"{config} is not a YAML mapping")
        if "interaction" in data and interactions is None:
            interactions = config.name
        spec, notes = spec_of(data, name=config.stem, interactions=interactions, model=model, tasks=tasks)
        if target.exists():
            raise ValueError(f"{target} exists already, and nothing was changed; choose another file with --out")
        target.write_text(as_yaml(spec, notes, config.name), encoding="utf-8")
    except (OSError, ValueError, yaml.YAMLError) as error:
        echo(str(error), err=True)
        raise typer.Exit(1) from None
    for note in notes:
        echo(f"note: {note}")
    echo(f"Made {target}\nNext: engine validate {target}")
