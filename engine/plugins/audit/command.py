"""`engine audit`: judges training rows that another framework made, and stores them for looking at and re-scoring."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from engine.cli.exits import USAGE, errors_exit, wrong_usage
from engine.cli.options import Json, RunsFolder
from engine.terminal import echo_json

if TYPE_CHECKING:
    from engine.plugins.audit.audit import AuditReport
    from engine.schemas.model import ModelSpec

_SHOWN = 5
"""Findings of one rule that are printed without `--all`."""


def audit(
    rows: Annotated[list[Path], typer.Argument(metavar="ROWS…", help="Files of rows, or folders of them.")],
    source: Annotated[
        Literal["verl", "trl", "slime", "skyrl", "areal"],
        typer.Option("--from", help="The framework that made the rows."),
    ],
    model: Annotated[
        str, typer.Option(help="The model that sampled them: a folder, a hub id, or a name of `engine models`.")
    ],
    chat_template: Annotated[
        str | None, typer.Option(help="A Jinja file that was used in place of the tokenizer's chat template.")
    ] = None,
    template_kwargs: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="Variables of the chat template: --template-kwargs '{\"enable_thinking\": false}'"
        ),
    ] = None,
    sampled: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The sampler's own record: JSON lines with the `output_ids` of each reply. With it, changed ids are "
            "proved.",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A text at which sampling ended without a stop token.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 on warnings too.")] = False,
    store: Annotated[
        bool, typer.Option("--store", help="Store the rows as a run in --out, for show, view, export and rescore.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Print every finding; --json always does.")] = False,
    out: RunsFolder = Path("runs"),
    json: Json = False,
) -> None:
    """Judge training rows of verl, TRL, slime, SkyRL or AReaL: ids, masks, prompts, rewards, groups and versions.

    Each finding names the row, the token and the rule; docs/rows.md describes the rules and the files that are read.
    The exit status is 0 without errors, 1 with an error (--strict: or a warning), 2 if a file could not be read. Files
    may come from strangers: nothing in them is executed.
    """
    import asyncio

    from engine.plugins.audit.audit import audit as judge
    from engine.plugins.audit.audit import read_rows, read_sampled
    from engine.plugins.audit.store import store_rows
    from engine.tokens.loading import load_format

    folder: Path | None = None
    with errors_exit(USAGE):
        spec = _model(model, chat_template, template_kwargs)
        template = load_format(spec, Path())
        stored = read_rows(source, rows)
        record = None if sampled is None else read_sampled(sampled)
        report, examined = judge(stored, source, template, sampled=record, stops=stop or ())
        if store:
            folder = asyncio.run(store_rows(examined, report, spec, template, out)).folder
    if json:
        echo_json(report.plain() | {"run": None if folder is None else str(folder)})
    else:
        _print(report, folder, everything=everything)
    severities = {finding.severity for finding in report.findings}
    raise typer.Exit(int("error" in severities or (strict and "warning" in severities)))


def _model(path: str, chat_template: str | None, template_kwargs: str | None) -> ModelSpec:
    from pydantic import ValidationError
    from pydantic_core import from_json

    from engine.schemas.model import ModelSpec

    try:
        kwargs: Any = {} if template_kwargs is None else from_json(template_kwargs)
        if not isinstance(kwargs, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        wrong_usage(f"--template-kwargs must be a JSON object, such as '{{\"enable_thinking\": false}}': {error}")
    jinja_file = None if chat_template is None else str(Path(chat_template).absolute())
    folder = Path(path)
    try:
        return ModelSpec(
            path=str(folder.absolute()) if folder.is_dir() else path,
            chat_template=jinja_file,
            template_kwargs=kwargs,
            allow_special=True,
        )
    except ValidationError as error:
        wrong_usage(f"--model: {error}")


def _print(report: AuditReport, folder: Path | None, *, everything: bool) -> None:
    from engine.console import make_console
    from engine.plugins.audit.rules import RULES

    console = make_console(soft_wrap=True)
    shown: Counter[str] = Counter()
    for finding in report.findings:
        shown[finding.rule] += 1
        if everything or shown[finding.rule] <= _SHOWN:
            console.print(str(finding), style=_STYLES[finding.severity])
    for rule, count in shown.items():
        if not everything and count > _SHOWN:
            console.print(f"… and {count - _SHOWN} more of {rule}; --all prints them")
    if report.findings:
        console.print()
    console.print(f"{report.rows} rows of {report.framework}: {report.tokens:,} tokens, {report.trained:,} trained")
    counts = report.counts()
    width = max(map(len, RULES))
    for rule in RULES:
        of_rule = counts.get(rule, {})
        words = [f"{severity} in {of_rule[severity]}" for severity in _STYLES if severity in of_rule]
        if not words and report.judged[rule]:
            words = ["nothing found"]
        words += [f"{count} not judged: {reason}" for reason, count in report.not_judged[rule].items()]
        console.print(f"  {rule.ljust(width)}  {' · '.join(words)}")
    if report.replies:
        sign = _NONE_UNUSUAL if not report.unusual and report.replies >= _MANY else ""
        console.print(
            f"{report.unusual} of {report.replies} replies have ids that the tokenizer would not make of their "
            f"text{sign}"
        )
    if folder is not None:
        console.print(f"Stored as {folder}")
        console.print(f"To show it: engine show {folder} · engine view {folder}")
        console.print(
            f"To re-score it: a spec with `extends: {folder / 'spec.yaml'}` and its own `rewards`, for engine rescore"
        )


_STYLES = {"error": "red", "warning": "yellow", "info": "dim"}
_MANY = 200
"""Replies from which on it is worth a note that none has unusual ids."""
_NONE_UNUSUAL = (
    ". Sampled replies sometimes have such ids: none at all may mean that they were encoded again, which --sampled can "
    "prove"
)
