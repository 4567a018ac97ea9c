"""`engine run`: runs the episodes of a spec with its backend, and stores them in a run's folder."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from engine.cli.exits import ERROR, FAILED, errors_exit, wrong_usage
from engine.cli.options import KeepGoing, Limit, Out, Overrides, Quiet, Resume, SpecPath
from engine.terminal import echo

if TYPE_CHECKING:
    from engine import ConsoleProgress, Launch, Run


def run(
    spec: SpecPath = None,
    overrides: Overrides = None,
    limit: Limit = None,
    out: Out = None,
    resume: Resume = None,
    retry_failed: Annotated[
        Literal["backend", "environment", "tool", "user", "all"] | None,
        typer.Option(
            help="With --resume: run again the episodes whose failure has this blame; `all`: every blame but the "
            "policy's. The old attempts are kept in the store."
        ),
    ] = None,
    keep_going: KeepGoing = False,
    quiet: Quiet = False,
) -> None:
    """Run episodes, and store every token, reward and event.

    Exit status: 0 when every episode came to an end (a failed episode is data); 1 when the spec is invalid, an episode
    could not be finished, or every episode failed; 2 when the command line is wrong; 3 when no server can be reached at
    the start, none replies for `backend.wait`, the run has cost `rollout.max_cost`, the first 16 episodes all fail in
    one way, or the backend fails more than 10 % of them; 130 after Ctrl-C; 143 after SIGTERM.
    """
    from engine import ConsoleProgress, Launch
    from engine.console import make_console

    if resume is None:
        if retry_failed is not None:
            raise typer.BadParameter(
                "it says what to do again in a run: give --resume RUN too", param_hint="--retry-failed"
            )
        if spec is None:
            wrong_usage("give a spec to run, or --resume RUN")
    elif spec is not None or limit is not None:
        wrong_usage("--resume continues a run with its own spec; leave out SPEC and --limit")
    progress = ConsoleProgress(make_console(), quiet=quiet)
    with errors_exit(ERROR):
        launch = Launch.of(
            spec, overrides or (), limit=limit, out=out, resume=resume, retry_failed=retry_failed, progress=progress
        )
        if resume is not None:
            launch.refuse_processes()
    conclude(launch, progress, keep_going=keep_going)


def conclude(launch: Launch, progress: ConsoleProgress, *, keep_going: bool = False) -> None:
    """Run a run to its end, print the result, and exit with its status."""
    import asyncio

    from engine import EngineError
    from engine.cli.exits import interrupted, until_signal
    from engine.cli.run_report import print_summary

    console, folder = progress.console, launch.store.folder
    again = f"To finish it: engine run --resume {folder}"
    try:
        run = asyncio.run(until_signal(partial(launch.run, progress=progress, keep_going=keep_going), again))
    except EngineError as error:
        echo(str(error), err=True)
        if folder.exists():
            console.print(f"Stored so far: {folder}\nTo continue: engine run --resume {folder}")
        raise typer.Exit(FAILED if error.stops_run else ERROR) from None
    result = run.result
    assert result is not None
    print_summary(console, result.summary, seconds=result.seconds, tokens=result.tokens)
    for note in result.notes:
        console.print(note)
    console.print(f"Run: {folder}")
    for fault in result.faults:
        console.print(f"could not be finished: {fault}", style="red")
    if result.interrupted:
        console.print(f"Interrupted. {again}")
        raise typer.Exit(interrupted())
    print_stopped(run)
    if result.faults:
        raise typer.Exit(ERROR)
    console.print(f"To show it: engine show {folder}")


def print_stopped(run: Run) -> None:
    """Print why a run stopped or failed as a whole, if it did.

    Raises:
        typer.Exit: if it did; with status 1 if every episode failed and nothing stopped the run, else with 3.
    """
    from engine.console import make_console
    from engine.errors import FailingError

    assert run.result is not None
    stopped, summary = run.result.stopped, run.result.summary
    if stopped is None and not summary.backend_failed and not summary.all_failed:
        return
    stderr = make_console(stderr=True, soft_wrap=True)
    resume = f"engine run --resume {run.folder}"
    if stopped is not None:
        stderr.print(f"Stopped: {stopped}", style="red")
    if summary.all_failed or isinstance(stopped, FailingError):
        stderr.print(summary.causes.words(summary.episodes), style="red")
        first = stopped.cause if isinstance(stopped, FailingError) else f"The first one: {summary.causes.example()}"
        echo(first, err=True)
    elif summary.backend_failed:
        failed = summary.causes.blamed("backend")
        stderr.print(f"The backend failed {failed} of {summary.episodes} episodes", style="red")
    if stopped is not None and not isinstance(stopped, FailingError):
        echo(f"To continue: {resume} {stopped.resume_words}".rstrip(), err=True)
    elif run.store.divided:  # a run of several drivers does not run failed episodes again
        echo("Correct it, and run the spec again", err=True)
    else:
        keep = " (--keep-going ignores this)" if stopped is not None else ""
        blame = "all" if summary.all_failed or stopped is not None else "backend"
        echo(f"Correct it, then: {resume} --retry-failed {blame}{keep}", err=True)
    raise typer.Exit(FAILED if stopped is not None or summary.backend_failed else ERROR)
