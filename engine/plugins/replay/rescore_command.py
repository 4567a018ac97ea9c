"""`engine rescore`: applies other reward rules and another credit method to stored episodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.options import RunsFolder, StoredRun
from engine.terminal import echo

if TYPE_CHECKING:
    from rich.console import Console

    from engine.plugins.replay.rescore import Rescored


def rescore(
    run: StoredRun,
    spec: Annotated[Path, typer.Option("--spec", help="The spec whose `rewards` are used.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value of that spec.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Label of the score; by default the spec file's name.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace an existing score with this label.")] = False,
    out: RunsFolder = Path("runs"),
) -> None:
    """Score stored episodes with another spec's rewards. No model is called: the rules are applied to the journals.

    The results of the run's own rules are kept; `engine show` and `engine export` take --score LABEL. A rule that cannot
    be applied to an episode, or that would have led to another event, is a failure of that episode's score. Runs code that the run
    names, as `engine replay` does.
    """
    import asyncio

    from engine.cli.console import make_console
    from engine.errors import EngineError
    from engine.logs import configure_logging

    configure_logging()
    console = make_console(soft_wrap=True)
    try:
        result, folder, dropped = asyncio.run(
            _rescore(run, spec, list(overrides or ()), label or spec.stem, out, replace)
        )
    except EngineError as error:
        echo(str(error), err=True)
        raise typer.Exit(1) from None
    _report(console, result, folder)
    if dropped:
        console.print(dropped, style="yellow")


async def _rescore(
    run: str, path: Path, overrides: list[str], label: str, out: Path, replace: bool
) -> tuple[Rescored, Path, str]:
    from engine.cli.run_report import dropped_words
    from engine.errors import StoreError
    from engine.plugins.replay.rescore import rescore as score
    from engine.spec.load import load_spec
    from engine.store import RunStore, find_run
    from engine.store.find import is_divided
    from engine.tokens.loading import load_format
    from engine.validate import refuse_errors

    loaded = load_spec(path, overrides)
    refuse_errors(loaded)
    folder = find_run(run, out=out)
    if is_divided(folder):
        raise StoreError(
            f"{run} is a sharded run: a score is written into the store of a run, and this one has many. Export its rows with "
            "another `rewards.credit` by `engine export --credit`, or run it with one driver"
        )
    with RunStore.open(folder) as store:
        own = store.header.loaded_spec()
        chat_format = load_format(own.spec.model, own.base)
        result = await score(store, loaded, chat_format, label, replace_label=replace)
        return result, store.folder, dropped_words(store)


def _report(console: Console, result: Rescored, folder: Path) -> None:
    failed = sum(result.failures.values())
    count = max(result.episodes, 1)
    console.print(
        f"{result.episodes} episodes scored as `{result.label}`: {result.changed} changed, {failed} failed · "
        f"mean reward {result.before / count:+.3f} -> {result.after / count:+.3f}"
    )
    for kind, number in result.failures.most_common():
        console.print(f"  {kind}: {number}, such as {result.examples[kind]}")
    console.print(f"To show it: engine show {folder} --score {result.label}")
