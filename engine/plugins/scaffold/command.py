"""`engine new`: writes a spec, an environment, scripted replies, scenarios and a test to start from.

Invariant: existing files are never overwritten, and a scaffold that cannot be written completely is removed. No file
holds a path of this machine, so the folder can be moved and shared.
"""

from __future__ import annotations

import re
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from engine import schemas
from engine.terminal import echo

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
_SCHEMAS = "schemas/json"
"""Where `engine schema` writes too."""
_TEMPLATES = Path(__file__).parent / "templates"


class Kind(StrEnum):
    """What the scaffold is an example of; each has a folder of templates."""

    TOOLS = "tools"
    USER = "user"
    GAME = "game"
    VISION = "vision"
    JUDGE = "judge"
    BLANK = "blank"


def new(
    name: Annotated[str, typer.Argument(help="Name of the folder and the spec: letters, digits, . _ -")],
    kind: Annotated[
        Kind,
        typer.Option(
            metavar="<tools|user|game|vision|judge|blank>",
            help="tools: tools and a score at the end. user: a user who gives feedback, and a tool. game: an "
            "environment of one function that answers each reply. vision: the same with pictures. judge: a model as "
            "judge. blank: the fewest lines.",
        ),
    ] = Kind.USER,
    dir: Annotated[Path, typer.Option("--dir", help="Folder in which NAME/ is created.")] = Path(),
) -> None:
    """Create a task of your own: NAME/ with a spec, an environment, replies, scenarios and a test that passes.

    It runs unchanged and without a model: the scripted backend replies with the content of replies.yaml.
    Exits with 1 if NAME/ exists already, or if the name is invalid.
    """
    try:
        files = scaffold(name, dir, kind)
    except (OSError, ValueError) as error:
        echo(str(error), err=True)
        raise typer.Exit(1) from None
    folder = dir / name
    echo(f"Made {folder}/:")
    for file in files:
        echo(f"  {file.name}")
    echo(f"  {_SCHEMAS}/    for completion and errors in an editor")
    echo("\nNext:")
    for command in (
        f"engine validate --import {folder}/spec.yaml",
        f"engine test {folder}/spec.yaml --require-coverage",
        f"engine run {folder}/spec.yaml",
        f"python -m unittest discover -s {folder}    # or: pytest {folder}",
    ):
        echo(f"  {command}")


def scaffold(name: str, parent: Path, kind: Kind = Kind.USER) -> list[Path]:
    """Write the folder `parent/name`, and return its files in the order in which to read them.

    Raises:
        ValueError: The name is invalid.
        FileExistsError: The folder exists.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a valid name: begin with a letter, followed by letters, digits, . _ or -")
    folder = parent / name
    if folder.exists() or folder.is_symlink():
        raise FileExistsError(f"{folder} exists already, and nothing was changed. Choose another name, or --dir.")
    texts = _render(name, kind)
    parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    try:
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
        (folder / _SCHEMAS).mkdir(parents=True)
        for schema in ("episode", "replies", "scenarios"):  # the first lines of the YAML files name them
            shutil.copy(Path(schemas.__file__).parent / "json" / f"{schema}.schema.json", folder / _SCHEMAS)
    except OSError:
        shutil.rmtree(folder)
        raise
    return [folder / file for file in texts]


def _render(name: str, kind: Kind) -> dict[str, str]:
    """Return the text of each file, by its name."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    values = {
        "name": name,
        "title": "".join(word[:1].upper() + word[1:] for word in re.split(r"[._-]+", name)),
    }
    templates = Environment(
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    module = "test_" + re.sub(r"\W", "_", name)
    sources = {
        "spec.yaml": f"{kind}/spec.yaml.jinja",
        "environment.py": f"{kind}/environment.py.jinja",
        "replies.yaml": f"{kind}/replies.yaml.jinja",
        "spec.scenarios.yaml": f"{kind}/scenarios.yaml.jinja",
        f"{module}.py": "test.py.jinja",
    }
    return {file: templates.get_template(source).render(values) for file, source in sources.items()}
