"""`engine schema`: write the JSON Schema files from the data classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from engine.plugin import missing
from engine.terminal import echo

UP_TO_DATE, OUT_OF_DATE = 0, 1
SCHEMAS = Path("schemas/json")


def generated() -> dict[Path, str]:
    """Return the content of every generated file, by its path relative to the project."""
    from engine.plugins.schema.json_schema import documents

    return {SCHEMAS / f"{name}.schema.json": text for name, text in documents().items()}


def stale(root: Path) -> Iterator[Path]:
    """Yield generated files that are missing or out of date, and schema files that should not exist: those of a plugin
    that is not installed may."""
    wanted = generated()
    for path, text in wanted.items():
        file = root / path
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            yield path
    for file in sorted((root / SCHEMAS).glob("*.json")):
        name = file.name.removesuffix(".schema.json")
        if SCHEMAS / file.name not in wanted and missing("schemas", name) is None:
            yield SCHEMAS / file.name


def schema(
    root: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Folder that schemas/json is under.")] = Path(),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 when a file is out of date.")
    ] = False,
) -> None:
    """Write schemas/json/*.schema.json from the data classes.

    In a YAML file that begins with `# yaml-language-server: $schema=…/episode.schema.json`, editors show completion and
    errors.
    """
    outdated = list(stale(root))
    if check:
        for path in outdated:
            echo(f"{path} is out of date")
        if outdated:
            echo("run `engine schema` and commit what it writes")
        raise typer.Exit(OUT_OF_DATE if outdated else UP_TO_DATE)
    files = generated()
    for path in outdated:
        file = root / path
        if path in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(files[path], encoding="utf-8")
            echo(f"wrote {file}")
        else:
            file.unlink()
            echo(f"removed {file}")
    if not outdated:
        echo("everything is up to date")
