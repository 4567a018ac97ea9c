"""`engine run`: runs the episodes of a spec with its backend, and stores them in a run's folder."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.exits import ERROR, FAILED, errors_exit, wrong_usage
from engine.cli.options import KeepGoing, Limit, Out, Overrides, Quiet, Resume, SpecPath
from engine.terminal import echo

if TYPE_CHECKING:
    from rich.console import Console

    from engine.runner.summary import RunResult
    from engine.schemas.trajectory import Blame
    from engine.spec.load import LoadedSpec
    from engine.spec.rows.mix import TaskList
    from engine.store.store import RunStore


class Retry(StrEnum):
    """The failures whose episodes are run again, by blame."""

    BACKEND = "backend"
    ENVIRONMENT = "environment"
    TOOL = "tool"
    USER = "user"
    ALL = "all"

    @property
    def blames(self) -> list[Blame]:
        """The blames; for `all` every blame but `policy`, because a failure of the policy is a result."""
        every: list[Blame] = ["backend", "environment", "tool", "user", "spec", "engine"]
        return [blame for blame in every if self is Retry.ALL or blame == self.value]


def run(
    spec: SpecPath = None,
    overrides: Overrides = None,
    limit: Limit = None,
    out: Out = None,
    resume: Resume = None,
    retry_failed: Annotated[
        Retry | None,
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
    from engine.console import make_console
    from engine.runner.processes import processes_of

    console = make_console()
    with errors_exit(ERROR):
        if retry_failed is not None and resume is None:
            raise typer.BadParameter(
                "it says what to do again in a run: give --resume RUN too", param_hint="--retry-failed"
            )
        loaded, tasks, store = prepare(console, spec, list(overrides or ()), limit, out, resume)
        if resume is not None and (processes := processes_of(loaded, store.folder)) is not None:
            processes.refuse_resume(store, retry=retry_failed is not None)
    blames = retry_failed.blames if retry_failed is not None else []
    conclude(loaded, tasks, store, console, quiet=quiet, again=blames, keep_going=keep_going)


def conclude(
    loaded: LoadedSpec,
    tasks: TaskList,
    store: RunStore,
    console: Console,
    *,
    quiet: bool,
    again: Sequence[Blame] = (),
    keep_going: bool = False,
) -> None:
    """Run a run to its end, print the result, and exit with its status."""
    import asyncio

    from engine.cli.exits import interrupted
    from engine.errors import EngineError

    try:
        work = drive(loaded, tasks, store, console, quiet=quiet, again=again, keep_going=keep_going)
        result = asyncio.run(work)
    except EngineError as error:
        echo(str(error), err=True)
        if not store.discard():
            console.print(f"Stored so far: {store.folder}\nTo continue: engine run --resume {store.folder}")
        raise typer.Exit(FAILED if error.stops_run else ERROR) from None
    finally:
        store.close()
    console.print(f"Run: {store.folder}")
    for fault in result.faults:
        console.print(f"could not be finished: {fault}", style="red")
    if result.interrupted:
        console.print(f"Interrupted. To finish it: engine run --resume {store.folder}")
        raise typer.Exit(interrupted())
    print_stopped(result, store.folder)
    if result.faults:
        raise typer.Exit(ERROR)
    console.print(f"To show it: engine show {store.folder}")


def print_stopped(result: RunResult, folder: Path) -> None:
    """Print why a run stopped or failed as a whole, if it did.

    Raises:
        typer.Exit: if it did; with status 1 if every episode failed and nothing stopped the run, else with 3.
    """
    from engine.console import make_console
    from engine.errors import FailingError
    from engine.runner.failure_causes import with_trace
    from engine.store.find import is_divided

    stopped, summary = result.stopped, result.summary
    if stopped is None and not summary.backend_failed and not summary.all_failed:
        return
    stderr = make_console(stderr=True, soft_wrap=True)
    resume = f"engine run --resume {folder}"
    if stopped is not None:
        stderr.print(f"Stopped: {stopped}", style="red")
    if summary.all_failed or isinstance(stopped, FailingError):
        stderr.print(summary.causes.words(summary.episodes), style="red")
        first = with_trace(next(iter(summary.causes.first.values())))
        echo(stopped.cause if isinstance(stopped, FailingError) else f"The first one: {first}", err=True)
    elif summary.backend_failed:
        failed = summary.causes.blamed("backend")
        stderr.print(f"The backend failed {failed} of {summary.episodes} episodes", style="red")
    if stopped is not None and not isinstance(stopped, FailingError):
        echo(f"To continue: {resume} {stopped.resume_words}".rstrip(), err=True)
    elif is_divided(folder):  # a run of several drivers does not run failed episodes again
        echo("Correct it, and run the spec again", err=True)
    else:
        keep = " (--keep-going ignores this)" if stopped is not None else ""
        blame = "all" if summary.all_failed or stopped is not None else "backend"
        echo(f"Correct it, then: {resume} --retry-failed {blame}{keep}", err=True)
    raise typer.Exit(FAILED if stopped is not None or summary.backend_failed else ERROR)


def prepare(
    console: Console,
    spec: Path | None,
    overrides: list[str],
    limit: int | None,
    out: Path | None,
    resume: str | None,
    *,
    evaluation: bool = False,
) -> tuple[LoadedSpec, TaskList, RunStore]:
    """Load and check the spec, read its tasks, and open the store.

    Raises:
        SpecError: the spec has errors.
        StoreError: the run to resume cannot be opened, or the new one cannot be created.
    """
    from engine.spec.load import load_spec
    from engine.spec.tasks import load_tasks
    from engine.store import RunHeader, RunStore, find_run
    from engine.validate import refuse_errors, refuse_first_tasks

    if resume is not None:
        if spec is not None or limit is not None:
            wrong_usage("--resume continues a run with its own spec; leave out SPEC and --limit")
        store = RunStore.open(find_run(resume, out=out or Path("runs")))
        try:
            loaded = _changed(store.header.loaded_spec(strict=True), overrides, console)
            return loaded, load_tasks(loaded), store
        except BaseException:
            store.close()
            raise
    if spec is None:
        wrong_usage("give a spec to run, or --resume RUN")
    changes = [*overrides, f"tasks.limit={limit}"] if limit is not None else overrides
    loaded = load_spec(spec, changes)
    for item in refuse_errors(loaded):
        console.print(str(item), style="yellow")
    tasks = load_tasks(loaded)
    refuse_first_tasks(loaded, tasks)
    folder = out or Path(loaded.spec.rollout.out)
    return loaded, tasks, RunStore.create(folder, RunHeader.of(loaded, overrides=changes, evaluation=evaluation))


def _changed(loaded: LoadedSpec, overrides: list[str], console: Console) -> LoadedSpec:
    """The spec of a resumed run, with changed values. Raises: SpecError, StoreError: they cannot be changed."""
    from engine.errors import StoreError
    from engine.spec.load import override_spec
    from engine.store.header import changes_of, resumable_keys
    from engine.validate import refuse_errors

    if not overrides:
        return loaded
    new = override_spec(loaded, overrides)
    _, refused = changes_of(loaded.spec, new.spec, resumable_keys())
    if refused:
        names = ", ".join(f"`{path}`" for path in refused[:8])
        keys = ", ".join(f"`{key}`" for key in resumable_keys() if not key.endswith(".*")) or "nothing"
        raise StoreError(f"a resumed run cannot change {names}; what may change: {keys}")
    for item in refuse_errors(new):
        console.print(str(item), style="yellow")
    return new


async def drive(
    loaded: LoadedSpec,
    tasks: TaskList,
    store: RunStore,
    console: Console,
    *,
    quiet: bool,
    summary: bool = True,
    again: Sequence[Blame] = (),
    keep_going: bool = False,
) -> RunResult:
    """Run a prepared run to its end, with progress.

    Args:
        loaded: The spec.
        tasks: The run's tasks.
        store: The run's store.
        console: The console to print on.
        quiet: Print no progress.
        summary: Whether to print the summary.
        again: Episodes that failed with one of these blames are run again.
        keep_going: See `Runner`.
    """
    import asyncio

    from engine.api.progress import ConsoleProgress, RunPanel
    from engine.backends.registry import open_backend
    from engine.cli.exits import stop_on_signals
    from engine.cli.run_report import print_summary
    from engine.masking import mask_credentials
    from engine.runner.observers import RunObservers
    from engine.runner.processes import processes_of
    from engine.runner.runner import Runner
    from engine.runner.source import fitting_tasks
    from engine.store.private import private_file
    from engine.tokens.loading import load_format

    if (processes := processes_of(loaded, store.folder)) is not None:
        return await processes.run(tasks, store, console, quiet=quiet, summary=summary, keep_going=keep_going)
    began = time.perf_counter()
    chat_format = load_format(loaded.spec.model, loaded.base)
    tasks = fitting_tasks(tasks, loaded, chat_format)
    backend = open_backend(loaded, chat_format)
    backend.logs = store.folder / "servers"
    stop = asyncio.Event()
    observers = RunObservers(loaded, store)
    with stop_on_signals(stop, f"To finish it: engine run --resume {store.folder}"):
        async with observers.of_errors():
            try:
                await backend.start()
                console.print(
                    f"{loaded.spec.name}: {len(tasks)} tasks × {loaded.spec.rollout.samples_per_task} samples on "
                    f"{loaded.spec.backend.kind}, ready after {time.perf_counter() - began:.1f} s",
                )
                runner = Runner(loaded, tasks, chat_format, backend, store, keep_going=keep_going)
                if again:
                    console.print(f"{len(await store.begin_again(again))} failed episodes are run again")
                began = time.perf_counter()
                watching = ConsoleProgress(console, quiet=quiet).watching(RunPanel(runner.counters, runner.summary))
                with observers.watch(runner.counters, runner.summary), watching:
                    result = await runner.run(stop=stop)
            finally:
                await backend.close()
        await observers.of_result(result)
    stats = backend.stats() | ({"played": runner.service_stats} if runner.service_stats else {})
    try:
        report = private_file(store.folder / "backend.json")
        report.write_text(mask_credentials(json.dumps(stats, indent=2, default=str)) + "\n")
    except OSError as error:
        echo(f"the backend's counts could not be written: {error}")
    if summary:
        print_summary(console, result.summary, seconds=time.perf_counter() - began, tokens=runner.counters.tokens)
    if cost := runner.cost:
        most = "" if cost.most is None else f" of at most {cost.most:.6g}"
        console.print(f"Cost of the run: {cost.spent:.6g}{most}, with users, judges and unfinished episodes")
    if busy_calls := runner.busy_calls:
        console.print(busy_calls, highlight=False)
    if certificate := stats.get("certificate"):
        console.print(
            f"Certificate: {certificate['turns_checked']} prompts compared with the prompt that the server used, "
            f"{certificate['prompt_mismatches']} differ, {certificate['turns_unchecked']} could not be compared",
        )
    if images := stats.get("images"):
        console.print(
            f"Images: sent at the size of their grid, so that the servers ({', '.join(images['server_processors'])}) "
            "see the rows' own pixels",
            highlight=False,
        )
    if verified := stats.get("verified"):
        console.print(
            "Verified: the servers' log-probs of a prompt differ from those of the model's files by "
            f"{verified['largest']:.2g} "
            f"at most and {verified['mean']:.2g} on average, over {verified['tokens']} tokens",
            highlight=False,
        )
    return result
