"""`engine new`: a spec, an environment, scripted replies and a test, to start from.

Invariant: nothing that is there already is written over, and a scaffold that cannot be written whole is
not left half done.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from engine.terminal import echo

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
_TEMPLATES = Path(__file__).parent / "scaffold"


def new(
    name: Annotated[str, typer.Argument(help="Names the folder and the spec: letters, digits, . _ -")],
    dir: Annotated[Path, typer.Option("--dir", help="Where the folder is made.")] = Path(),
) -> None:
    """Start a task of your own: NAME/ with a spec, an environment, replies and a test that passes.

    It runs as it stands, without a model: the scripted backend says what replies.yaml holds.
    Exits with 1 where NAME/ is there already, or the name cannot be one.
    """
    try:
        files = scaffold(name, dir)
    except (OSError, ValueError) as error:
        echo(str(error), err=True)
        raise typer.Exit(1) from None
    folder = dir / name
    echo(f"Made {folder}/:")
    for file in files:
        echo(f"  {file.name}")
    echo("\nNext:")
    for command in (
        f"engine validate --import {folder}/spec.yaml",
        f"engine run {folder}/spec.yaml",
        f"pytest {folder}",
    ):
        echo(f"  {command}")


def scaffold(name: str, parent: Path) -> list[Path]:
    """Write the folder `parent/name`; the files, in the order in which to read them.

    Raises:
        ValueError: The name cannot be one.
        FileExistsError: Something of that name is there.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a task: begin with a letter, and go on with letters, digits, . _ or -")
    folder = parent / name
    if folder.exists() or folder.is_symlink():
        raise FileExistsError(f"{folder} is there already, and nothing was changed. Choose another name, or --dir.")
    texts = _render(name, folder)
    parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    try:
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError:
        shutil.rmtree(folder)
        raise
    return [folder / file for file in texts]


def _render(name: str, folder: Path) -> dict[str, str]:
    """File name -> text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    words = re.split(r"[._-]+", name)
    values = {
        "name": name,
        "folder": folder.as_posix(),
        "title": "".join(word[:1].upper() + word[1:] for word in words),
        "schema": _schema(),
    }
    templates = Environment(
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    module = "test_" + re.sub(r"\W", "_", name)
    sources = {
        "spec.yaml": "spec.yaml.jinja",
        "environment.py": "environment.py.jinja",
        "replies.yaml": "replies.yaml.jinja",
        f"{module}.py": "test.py.jinja",
    }
    return {file: templates.get_template(source).render(values) for file, source in sources.items()}


def _schema() -> str:
    """Where an editor finds the spec's JSON schema: beside the installed contracts."""
    from engine import schemas

    return (Path(schemas.__file__).parent / "json" / "episode.schema.json").as_posix()
