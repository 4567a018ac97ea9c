"""`engine export`: writes a run's training rows as JSONL or Parquet, or rows for supervised fine-tuning."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from engine import plugin
from engine.cli.commands.export_credit import changed_credit, read_values
from engine.cli.options import Imports, only_looks
from engine.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from engine.schemas.credit import CreditSpec
    from engine.schemas.trajectory import Trajectory
    from engine.store.export import Row
    from engine.store.reader import RunReader


class RecordedScenario(Protocol):
    """A scenario made of an episode."""

    name: str
    text: str
    """A whole file of scenarios, in YAML."""
    notes: list[str]
    """What the reader should know: what is scripted beyond the replies, and why."""


RECORD_SCENARIO: plugin.Hook[Callable[[RunReader, str, Path | None], RecordedScenario]]
RECORD_SCENARIO = plugin.Hook("record_scenario")
"""Make a scenario of a finished episode and play it; with a path, write it there. The arguments: the run, the episode, the path."""


class Format(StrEnum):
    """File formats."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    SFT = "sft"
    SCENARIO = "scenario"
    TRL = "trl"
    VERL = "verl"


class Content(StrEnum):
    """What a row of a data set is."""

    TURNS = "turns"
    CONVERSATIONS = "conversations"
    PREFERENCES = "preferences"
    PROMPTS = "prompts"


class Images(StrEnum):
    """How a data set holds images."""

    BYTES = "bytes"
    PATHS = "paths"


@only_looks
def export(
    run: Annotated[str, typer.Argument(help="A run's folder, its id or the beginning of it, or `latest`.")],
    format: Annotated[
        Format | None,
        typer.Option(
            help="jsonl or parquet: training rows; the default follows the suffix of --out, else jsonl. "
            "sft: JSON lines for supervised fine-tuning, here or with TRL. scenario: a test of one episode, for `engine test`. "
            "trl, verl: data sets that these load."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The file; by default rows.FORMAT in the run's folder, with --format sft: sft.jsonl."
        ),
    ] = None,
    episode: Annotated[str | None, typer.Option(metavar="ID", help="With --format scenario: the episode.")] = None,
    filter: Annotated[
        str | None,
        typer.Option(
            metavar="CEL",
            help="Only episodes for which this holds: an expression over the variables of guards, `outcome` and `episode`, "
            "such as 'outcome.solved && turns.assistant <= 4'.",
        ),
    ] = None,
    turns: Annotated[
        str | None,
        typer.Option(
            metavar="CEL",
            help="With --format sft: train only turns for which this holds, also over `turn`, such as 'turn.event != \"malformed\"'.",
        ),
    ] = None,
    content: Annotated[
        Content | None,
        typer.Option(
            help="With --format trl or verl, what a row is. trl: turns (the default), conversations, preferences, prompts. verl: prompts."
        ),
    ] = None,
    images: Annotated[
        Images | None,
        typer.Option(
            help="With --format trl or verl: images as the bytes of their files (the default), or as paths of files beside the data set."
        ),
    ] = None,
    ground_truth: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="With --content prompts: the task's field with its answer, also dotted."),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Push the rows to a data set of the Hugging Face hub, `owner/name`, with the token in HF_TOKEN; a new one is private.",
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: a new data set is public.")] = False,
    runs: Annotated[Path, typer.Option(help="Folder in which runs are stored.")] = Path("runs"),
    trainable_only: Annotated[
        bool, typer.Option("--trainable-only", help="Leave out rows that are not trainable.")
    ] = False,
    credit: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Change the spec's credit method: --credit method=turn_return"),
    ] = None,
    score: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Use the rewards of this score of `engine rescore`.")
    ] = None,
    values: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A critic's values, for bilevel_gae and turn_ppo: JSON lines with `episode_id` and `values`, "
            "a list for each turn, a number for each sampled token.",
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """Write training rows, one per branch: ids, loss mask, log-probs, rewards and advantages by token, messages.

    All rows of finished episodes are written, with a column `trainable`; a run that is still running can be
    exported too. Rewards and advantages are computed from the stored ledgers, so --credit needs no new run. The tensors that a
    forward pass needs for images are written to a folder beside the file, FILE.images, one file per image.

    With --format sft: one row per branch of the chosen episodes, with ids, masks by turn and the messages that the model was shown.

    With --format trl or verl: a data set of messages, and a line for each thing that such a data set does not carry.

    With --format scenario: a scenario of one episode, with its replies and its result, which has passed `engine test`, so the spec's
    code runs. A file that holds scenarios of the same spec gets one more.
    """
    from engine.cli.console import make_console
    from engine.cli.reports.report import dropped_words, unchecked_warning
    from engine.errors import EngineError
    from engine.logs import configure_logging
    from engine.store.export import export_rows
    from engine.store.find import find_run
    from engine.store.loader import vision_of, with_image_files
    from engine.store.store import RunStore

    configure_logging()
    chosen = format or (Format.PARQUET if out is not None and out.suffix == ".parquet" else Format.JSONL)
    given = {
        "--turns": turns,
        "--episode": episode,
        "--filter": filter,
        "--score": score,
        "--credit": credit,
        "--values": values,
        "--trainable-only": trainable_only,
        "--content": content,
        "--images": images,
        "--ground-truth": ground_truth,
        "--push": push,
        "--public": public,
        "--import": imports,
    }
    if unused := _without_effect(chosen, out, given):
        echo(f"error: {unused}", err=True)
        raise typer.Exit(2)
    if chosen in (Format.TRL, Format.VERL):
        from engine.plugins.datasets.command import DatasetOptions, export_dataset

        options = DatasetOptions(
            chosen, content, images or Images.BYTES, filter, turns, score, ground_truth, push, public
        )
        export_dataset(run, runs, out, options)
        return
    if chosen is Format.SCENARIO:
        _export_scenario(run, runs, out, episode)
        return
    if chosen is Format.SFT:
        _export_sft(run, runs, out, filter, turns, score)
        return
    try:
        with RunStore.open(find_run(run, runs), readonly=True) as store:
            path = out or store.default_file(f"rows.{chosen}")
            rows = export_rows(
                store,
                credit=(method := changed_credit(store, score, credit or [])),
                trainable_only=trainable_only,
                score=score,
                values=read_values(values) if values is not None else None,
                keep=_filter(store, filter),
            )
            rows = with_image_files(rows, path, partial(vision_of, store))
            unchecked: list[int] = []
            refused: Counter[str] = Counter()
            rows = _noting(rows, unchecked, refused)
            count = _write(store, chosen, path, rows, method, score)
            partly = _partly_done(store)
            dropped = dropped_words(store)
            evaluation = store.header.evaluation
    except EngineError as error:
        echo(str(error), err=True)
        raise typer.Exit(2) from None
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
            f"{partly} tasks have episodes that are not done: their advantages are computed from the episodes that are done"
        )


_ROWS = frozenset({Format.JSONL, Format.PARQUET})
_DATASETS = frozenset({Format.TRL, Format.VERL})
_TAKEN: dict[str, frozenset[Format]] = {
    "--turns": frozenset({Format.SFT, Format.TRL}),
    "--episode": frozenset({Format.SCENARIO}),
    "--filter": _ROWS | _DATASETS | {Format.SFT},
    "--score": _ROWS | _DATASETS | {Format.SFT},
    "--credit": _ROWS,
    "--values": _ROWS,
    "--trainable-only": _ROWS,
    "--content": _DATASETS,
    "--images": _DATASETS,
    "--ground-truth": _DATASETS,
    "--push": _DATASETS,
    "--public": _DATASETS,
    "--import": _ROWS | _DATASETS | {Format.SFT},
}
"""The formats in which an option has an effect."""
_KINDS: dict[Format, tuple[str, tuple[str, ...]]] = {
    Format.SFT: ("JSON lines", (".jsonl", ".json")),
    Format.SCENARIO: ("YAML", (".yaml", ".yml")),
    Format.TRL: ("Parquet", (".parquet",)),
    Format.VERL: ("Parquet", (".parquet",)),
}
"""The kind of file that a format is, and its suffixes, if no other kind is possible."""


def _without_effect(chosen: Format, out: Path | None, given: Mapping[str, object]) -> str | None:
    """Why the options do not go together; None if they do."""
    for option, value in given.items():
        if value and chosen not in _TAKEN[option]:
            others = " or ".join(f"--format {each}" for each in Format if each in _TAKEN[option])
            return f"{option} has no effect with --format {chosen}; leave it out, or use {others}"
    kind, suffixes = _KINDS.get(chosen, ("", ()))
    if suffixes and out is not None and out.suffix not in suffixes:
        return f"--format {chosen} writes {kind}; name a file with the suffix {suffixes[0]} instead of {out.name}"
    if chosen is Format.SCENARIO and (out is None or given["--episode"] is None):
        return "--format scenario needs --episode ID and -o FILE.yaml; `engine show RUN` lists the episodes"
    return None


def _filter(store: RunReader, expression: str | None) -> Callable[[Trajectory], bool] | None:
    from engine.store.listing.finished import EpisodeFilter

    return EpisodeFilter(store, expression) if expression is not None else None


def _export_sft(
    run: str, runs: Path, out: Path | None, filter: str | None, turns: str | None, score: str | None
) -> None:
    from engine.cli.console import make_console
    from engine.cli.reports.report import dropped_words
    from engine.errors import EngineError
    from engine.store.export import write_jsonl
    from engine.store.find import find_run
    from engine.store.listing.finished import TURN_VARIABLES, EpisodeFilter
    from engine.store.loader import vision_of, with_image_files
    from engine.store.sft_rows import SftSelection, sft_rows
    from engine.store.store import RunStore

    try:
        with RunStore.open(find_run(run, runs), readonly=True) as store:
            path = out or store.default_file("sft.jsonl")
            selection = SftSelection()
            if filter is not None:
                selection.episode = EpisodeFilter(store, filter)
            if turns is not None:
                selection.turn = EpisodeFilter(store, turns, "--turns", TURN_VARIABLES)
            rows = with_image_files(sft_rows(store, selection, score=score), path, partial(vision_of, store))
            count = write_jsonl(rows, path)
            dropped = dropped_words(store)
    except EngineError as error:
        echo(str(error), err=True)
        raise typer.Exit(2) from None
    console = make_console(soft_wrap=True)
    console.print(f"{count} rows of {selection.episodes} episodes: {path}")
    for line in selection.summary():
        console.print(line)
    if dropped:
        console.print(dropped, style="yellow")


def recorded_scenario(store: RunReader, episode: str, file: Path | None = None) -> RecordedScenario:
    """Make a scenario of a finished episode, play it, and write it to a file if one is given.

    Raises:
        EngineError: the plugin is not installed, or the scenario does not have the recorded result.
    """
    from engine.errors import StoreError

    for record in RECORD_SCENARIO.all():
        return record(store, episode, file)
    raise StoreError(f"there are no scenarios: {plugin.missing('commands', 'test')}")


def _export_scenario(run: str, runs: Path, out: Path | None, episode: str | None) -> None:
    from engine.cli.console import make_console
    from engine.errors import EngineError
    from engine.spec.code.entry import looking
    from engine.store.find import find_run
    from engine.store.store import RunStore

    assert out is not None
    assert episode is not None
    try:
        with looking(None), RunStore.open(find_run(run, runs), readonly=True) as store:  # the scenario is tried
            made = recorded_scenario(store, episode, out)
    except EngineError as error:
        echo(str(error), err=True)
        raise typer.Exit(2) from None
    console = make_console(soft_wrap=True)
    console.print(f"scenario `{made.name}`, which passes: {out}")
    for note in made.notes:
        console.print(note)


def _noting(rows: Iterator[Row], unchecked: list[int], refused: Counter[str]) -> Iterator[Row]:
    """The rows. `unchecked` gets the number of unchecked prompts of each row that has some, `refused` counts failures of the guard."""
    from engine.runner.guarded import KINDS

    for row in rows:
        if row["unchecked_prompts"]:
            unchecked.append(row["unchecked_prompts"])
        failure = row["outcome"]["failure"]
        if failure is not None and failure["kind"] in KINDS:
            refused[failure["kind"]] += 1
        yield row


def _write(
    store: RunReader, chosen: Format, path: Path, rows: Iterator[Row], credit: CreditSpec, score: str | None
) -> int:
    from engine.masking import mask
    from engine.store.export import write_jsonl
    from engine.store.parquet import write_parquet

    if chosen is Format.JSONL:
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
    done: dict[str, set[bool]] = {}
    for row in store.episodes():
        done.setdefault(row.task_id, set()).add(row.status == "done")
    return sum(len(states) == 2 for states in done.values())
