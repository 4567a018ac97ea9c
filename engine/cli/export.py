"""`engine export`: writes a run's training rows as JSONL or Parquet, or rows for supervised fine-tuning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine import plugin
from engine.cli.exits import USAGE, errors_exit, wrong_usage
from engine.cli.options import Imports, RunsFolder, Score, StoredRun, one_of, only_looks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.schemas.credit import CreditSpec
    from engine.store.reader import RunReader
    from engine.store.rows.columns import Columns
    from engine.store.rows.row import TrainingRow


@dataclass(frozen=True)
class RecordedScenario:
    """A scenario made of an episode."""

    name: str
    text: str
    """A whole file of scenarios, in YAML."""
    notes: list[str]
    """What the reader should know: what is scripted beyond the replies, and why."""


RECORD_SCENARIO: plugin.Hook[Callable[[RunReader, str, Path | None], RecordedScenario]]
RECORD_SCENARIO = plugin.Hook("record_scenario")
"""Make a scenario of a finished episode and play it; with a path, write it there. The arguments: the run, the episode,
the path."""


CORE = ("jsonl", "parquet", "scenario")
"""Formats of the core; plugins add others."""


@dataclass(frozen=True)
class ExportFormat:
    """A format that a plugin adds."""

    write: Callable[[str, Path, Path | None, Mapping[str, Any]], None]
    """Gets the run, the folder of runs, `--out`, and the options in `takes`: `--filter` -> its value, None if it is not
    given."""
    kind: str
    """The kind of file, for messages."""
    suffixes: tuple[str, ...]
    takes: frozenset[str]
    """The options that have an effect, of the core's and of the plugin's own; `--import` always has."""


@only_looks
def export(
    run: StoredRun,
    episode: Annotated[str | None, typer.Option(metavar="ID", help="With --format scenario: the episode.")] = None,
    filter: Annotated[
        str | None,
        typer.Option(
            metavar="CEL",
            help="Only episodes for which this holds: an expression over the variables of guards, `outcome` and "
            "`episode`, "
            "such as 'outcome.solved && turns.assistant <= 4'.",
        ),
    ] = None,
    trainable_only: Annotated[
        bool, typer.Option("--trainable-only", help="Leave out rows that are not trainable.")
    ] = False,
    credit: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Change the spec's credit method: --credit method=turn_return"),
    ] = None,
    score: Score = None,
    values: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A critic's values, for bilevel_gae and turn_ppo: JSON lines with `episode_id` and `values`, "
            "a list for each turn, a number for each sampled token.",
        ),
    ] = None,
    runs: RunsFolder = Path("runs"),
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="The file; by default rows.FORMAT in the run's folder."),
    ] = None,
    format: Annotated[
        str | None,
        one_of(
            "export_formats",
            CORE,
            "jsonl or parquet: training rows; the default follows the suffix of --out, else jsonl. "
            "scenario: a test of one episode, for `engine test`. Others are formats of plugins.",
        ),
    ] = None,
    imports: Imports = None,
    added: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write training rows, one per branch: ids, loss mask, log-probs, rewards and advantages by token, messages.

    All rows of finished episodes are written, with a column `trainable`; a run that is still running can be
    exported too. Rewards and advantages are computed from the stored ledgers, so --credit needs no new run. The tensors
    that a forward pass needs for images are written to a folder beside the file, FILE.images, one file per image.

    With --format scenario: a scenario of one episode, with its replies and its result, which has passed `engine test`,
    so the spec's code runs. A file that holds scenarios of the same spec gets one more.
    """
    from engine.cli.run_report import dropped_words, unchecked_warning
    from engine.console import make_console
    from engine.store.episode_filter import EpisodeFilter
    from engine.store.find import find_run
    from engine.store.loader import vision_of, with_image_files
    from engine.store.rows.export import training_rows
    from engine.store.rows.row import columns_of
    from engine.store.store import RunStore

    chosen = format or ("parquet" if out is not None and out.suffix == ".parquet" else "jsonl")
    formats = plugin.loaded("export_formats", CORE)
    options = {
        "--episode": episode,
        "--filter": filter,
        "--score": score,
        "--credit": credit,
        "--values": values,
        "--trainable-only": trainable_only,
        "--import": imports,
        **added,
    }
    if unused := _without_effect(chosen, out, options, formats):
        wrong_usage(f"error: {unused}")
    if chosen in formats:
        taken = {option: options[option] for option in formats[chosen].takes}
        formats[chosen].write(run, runs, out, taken)
        return
    if chosen == "scenario":
        _export_scenario(run, runs, out, episode)
        return
    with errors_exit(USAGE), RunStore.open(find_run(run, runs), readonly=True) as store:
        path = out or store.default_file(f"rows.{chosen}")
        rows = training_rows(
            store,
            credit=(method := _changed_credit(store, score, credit or [])),
            trainable_only=trainable_only,
            score=score,
            values=_read_values(values) if values is not None else None,
            keep=EpisodeFilter(store, filter) if filter is not None else None,
        )
        unchecked: list[int] = []
        refused: Counter[str] = Counter()
        columns = columns_of(_noting(rows, unchecked, refused))
        with_files = with_image_files(columns, path, partial(vision_of, store))
        count = _write(store, chosen, path, with_files, method, score)
        partly = _partly_done(store)
        dropped = dropped_words(store)
        evaluation = store.header.evaluation
    console = make_console(soft_wrap=True)
    console.print(f"{count} rows: {path}")
    if dropped:
        console.print(dropped, style="yellow")
    if unchecked:
        console.print(unchecked_warning(sum(unchecked)), style="yellow")
    if refused:
        kinds = ", ".join(f"{kind} {number}" for kind, number in refused.most_common())
        console.print(
            f"{refused.total()} of them are not trainable, because the guard refused them: {kinds}", style="yellow"
        )
    if evaluation:
        console.print("none of them is trainable: this run is an evaluation")
    if partly:
        console.print(
            f"{partly} tasks have episodes that are not done: their advantages are computed from the episodes that are "
            "done"
        )


_ROWS = ("jsonl", "parquet")
_TAKEN: dict[str, tuple[str, ...]] = {
    "--episode": ("scenario",),
    "--filter": _ROWS,
    "--score": _ROWS,
    "--credit": _ROWS,
    "--values": _ROWS,
    "--trainable-only": _ROWS,
    "--import": _ROWS,
}
"""The formats of the core in which an option has an effect."""
_KINDS = {"scenario": ("YAML", (".yaml", ".yml"))}
"""The kind of file that a format is, and its suffixes, if no other kind is possible."""


def _without_effect(
    chosen: str, out: Path | None, options: Mapping[str, object], formats: Mapping[str, ExportFormat]
) -> str | None:
    """Why the options do not go together; None if they do."""
    for option, value in options.items():
        taking = (name for name, added in formats.items() if option in added.takes or option == "--import")
        taken = (*_TAKEN.get(option, ()), *taking)
        if value and chosen not in taken:
            others = " or ".join(f"--format {name}" for name in taken)
            return f"{option} has no effect with --format {chosen}; leave it out, or use {others}"
    kinds = _KINDS | {name: (added.kind, added.suffixes) for name, added in formats.items()}
    kind, suffixes = kinds.get(chosen, ("", ()))
    if suffixes and out is not None and out.suffix not in suffixes:
        return f"--format {chosen} writes {kind}; name a file with the suffix {suffixes[0]} instead of {out.name}"
    if chosen == "scenario" and (out is None or options["--episode"] is None):
        return "--format scenario needs --episode ID and -o FILE.yaml; `engine show RUN` lists the episodes"
    return None


def _changed_credit(store: RunReader, score: str | None, changes: list[str]) -> CreditSpec:
    """Return the credit method of the run or the score, with changes; another `method` begins with its own defaults.

    Raises:
        StoreError: a change is not KEY=VALUE, or the method does not take it.
    """
    from pydantic import ValidationError

    from engine.errors import StoreError
    from engine.schemas.credit import CreditSpec, read_credit
    from engine.spec.text.places import fields_by_key, tagged
    from engine.store.rows.build import rewards_of

    values = rewards_of(store, score).credit.model_dump(by_alias=True)
    changed: dict[str, str] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise StoreError(f"--credit {change}: write KEY=VALUE, such as method=turn_return")
        changed[key] = value
    model = tagged(CreditSpec, "method").get(changed.get("method", values["method"]))
    try:
        shared = {key: value for key, value in values.items() if model is None or key in fields_by_key(model)}
        return read_credit(shared | changed)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][1:])) or "method"
        keys = sorted(fields_by_key(model), key=lambda key: key != "method") if model is not None else []
        listed = f" (keys: {', '.join(keys)})" if keys else ""
        raise StoreError(f"--credit {place}: {first['msg']}{listed}") from None


def _read_values(path: Path) -> dict[str, list[list[float]]]:
    """Read a critic's values, by episode.

    Raises:
        StoreError: the file cannot be read, or a line has another form.
    """
    import orjson

    from engine.errors import StoreError

    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    values: dict[str, list[list[float]]] = {}
    for number, line in enumerate(lines, 1):
        try:
            episode = orjson.loads(line)
            values[str(episode["episode_id"])] = [[float(value) for value in turn] for turn in episode["values"]]
        except (ValueError, KeyError, TypeError) as error:
            form = '{"episode_id": "t/0", "values": [[0.1, 0.2], [0.3]]}'
            raise StoreError(f"{path}:{number}: {error!r}; a line is {form}") from error
    return values


def recorded_scenario(store: RunReader, episode: str, file: Path | None = None) -> RecordedScenario:
    """Make a scenario of a finished episode, play it, and write it to a file if one is given.

    Raises:
        StoreError: the plugin is not installed.
        EngineError: the scenario does not have the recorded result.
    """
    from engine.errors import StoreError

    for record in RECORD_SCENARIO.all():
        return record(store, episode, file)
    raise StoreError(f"there are no scenarios: {plugin.missing('commands', 'test')}")


def _export_scenario(run: str, runs: Path, out: Path | None, episode: str | None) -> None:
    from engine.console import make_console
    from engine.spec.code.entry import looking
    from engine.store.find import find_run
    from engine.store.store import RunStore

    assert out is not None
    assert episode is not None
    with errors_exit(USAGE), looking(None), RunStore.open(find_run(run, runs), readonly=True) as store:
        scenario = recorded_scenario(store, episode, out)  # it is tried
    console = make_console(soft_wrap=True)
    console.print(f"scenario `{scenario.name}`, which passes: {out}")
    for note in scenario.notes:
        console.print(note)


def _noting(rows: Iterator[TrainingRow], unchecked: list[int], refused: Counter[str]) -> Iterator[TrainingRow]:
    """The rows. `unchecked` gets the number of unchecked prompts of each row that has some, `refused` counts failures
    of the guard."""
    from engine.runner.guarded import KINDS

    for row in rows:
        if row.unchecked_prompts:
            unchecked.append(row.unchecked_prompts)
        failure = row.episode.outcome.failure
        if failure is not None and failure.kind in KINDS:
            refused[failure.kind] += 1
        yield row


def _write(
    store: RunReader, chosen: str, path: Path, rows: Iterator[Columns], credit: CreditSpec, score: str | None
) -> int:
    from engine.masking import mask
    from engine.store.rows.export import write_jsonl, write_parquet

    if chosen == "jsonl":
        return write_jsonl(rows, path)
    header = store.header
    metadata = {
        "episode_engine.run_id": header.run_id,
        "episode_engine.version": header.engine_version,
        "episode_engine.credit": mask(credit.model_dump_json(by_alias=True)),
    }
    return write_parquet(rows, path, metadata | ({"episode_engine.score": score} if score else {}))


def _partly_done(store: RunReader) -> int:
    """Return the number of tasks with both finished and unfinished episodes."""
    groups = "SELECT 1 FROM episodes GROUP BY task_index, task_id HAVING count(DISTINCT status = 'done') = 2"
    with store.snapshot() as connection:
        return int(connection.execute(f"SELECT count(*) FROM ({groups})").fetchone()[0])
