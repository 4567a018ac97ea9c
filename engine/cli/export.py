"""`engine export`: writes a run's training rows as JSONL or Parquet, or rows for supervised fine-tuning."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.schemas.credit import CreditSpec
    from engine.schemas.trajectory import Trajectory
    from engine.store.export import Row
    from engine.store.store import RunStore


class Format(StrEnum):
    """File formats."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    SFT = "sft"


def export(
    run: Annotated[str, typer.Argument(help="A run's folder, its id or the beginning of it, or `latest`.")],
    format: Annotated[
        Format | None,
        typer.Option(
            help="jsonl or parquet: training rows; the default follows the suffix of --out, else jsonl. "
            "sft: JSON lines for supervised fine-tuning, here or with TRL."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The file; by default rows.FORMAT in the run's folder, with --format sft: sft.jsonl."),
    ] = None,
    filter: Annotated[
        str | None,
        typer.Option(
            metavar="CEL",
            help="Only episodes for which this holds: an expression over the variables of guards and `outcome`, "
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
) -> None:
    """Write training rows, one per branch: ids, loss mask, log-probs, rewards and advantages by token, messages.

    All rows of finished episodes are written, with a column `trainable`; a run that is still running can be
    exported too. Rewards and advantages are computed from the stored ledgers, so --credit needs no new run. The tensors that a
    forward pass needs for images are written to a folder beside the file, FILE.images, one file per image.

    With --format sft: one row per branch of the chosen episodes, with ids, masks by turn and the messages that the model was shown.
    """
    from engine.cli.console import make_console
    from engine.errors import EngineError
    from engine.store.export import export_rows
    from engine.store.find import find_run
    from engine.store.loader import vision_of, with_image_files
    from engine.store.store import RunStore

    chosen = format or (Format.PARQUET if out is not None and out.suffix == ".parquet" else Format.JSONL)
    if unused := _without_effect(chosen, out, turns, trainable_only, credit, values):
        echo(f"error: {unused}", err=True)
        raise typer.Exit(2)
    if chosen is Format.SFT:
        _export_sft(run, runs, out, filter, turns, score)
        return
    try:
        with RunStore.open(find_run(run, runs), readonly=True) as store:
            path = out or store.folder / f"rows.{chosen}"
            rows = export_rows(
                store,
                credit=(method := _credit(store, score, credit or [])),
                trainable_only=trainable_only,
                score=score,
                values=_values(values) if values is not None else None,
                keep=_filter(store, filter),
            )
            rows = with_image_files(rows, path, partial(vision_of, store))
            count = _write(store, chosen, path, rows, method, score)
            partly = _partly_done(store)
            evaluation = store.header.evaluation
    except EngineError as error:
        echo(str(error), err=True)
        raise typer.Exit(2) from None
    console = make_console(soft_wrap=True)
    console.print(f"{count} rows: {path}")
    if evaluation:
        console.print("none of them is trainable: this run is an evaluation")
    if partly:
        console.print(
            f"{partly} tasks have episodes that are not done: their advantages are computed from the episodes that are done"
        )


def _without_effect(
    chosen: Format,
    out: Path | None,
    turns: str | None,
    trainable_only: bool,
    credit: list[str] | None,
    values: Path | None,
) -> str | None:
    """Why the options do not go together; None if they do."""
    if chosen is not Format.SFT:
        return "--turns has an effect only with --format sft; leave it out, or add --format sft" if turns else None
    named = {"--credit": credit, "--values": values, "--trainable-only": trainable_only}
    if given := [option for option, value in named.items() if value]:
        return f"{given[0]} has no effect with --format sft, whose rows have no advantages and are all trainable; leave it out"
    if out is not None and out.suffix == ".parquet":
        return f"--format sft writes JSON lines; name a file with the suffix .jsonl instead of {out.name}"
    return None


def _filter(store: RunStore, expression: str | None) -> Callable[[Trajectory], bool] | None:
    from engine.runner.finished import EpisodeFilter

    return EpisodeFilter(store, expression) if expression is not None else None


def _export_sft(
    run: str, runs: Path, out: Path | None, filter: str | None, turns: str | None, score: str | None
) -> None:
    from engine.cli.console import make_console
    from engine.errors import EngineError
    from engine.runner.finished import TURN_VARIABLES, EpisodeFilter
    from engine.store.export import write_jsonl
    from engine.store.find import find_run
    from engine.store.loader import vision_of, with_image_files
    from engine.store.sft_rows import SftSelection, sft_rows
    from engine.store.store import RunStore

    try:
        with RunStore.open(find_run(run, runs), readonly=True) as store:
            path = out or store.folder / "sft.jsonl"
            selection = SftSelection()
            if filter is not None:
                selection.episode = EpisodeFilter(store, filter)
            if turns is not None:
                selection.turn = EpisodeFilter(store, turns, "--turns", TURN_VARIABLES)
            rows = with_image_files(sft_rows(store, selection, score=score), path, partial(vision_of, store))
            count = write_jsonl(rows, path)
    except EngineError as error:
        echo(str(error), err=True)
        raise typer.Exit(2) from None
    console = make_console(soft_wrap=True)
    console.print(f"{count} rows of {selection.episodes} episodes: {path}")
    for line in selection.summary():
        console.print(line)


def _write(
    store: RunStore, chosen: Format, path: Path, rows: Iterator[Row], credit: CreditSpec, score: str | None
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


def _credit(store: RunStore, score: str | None, changes: list[str]) -> CreditSpec:
    """Return the credit method of the run or the score, with changes; another `method` begins with its own defaults."""
    from pydantic import ValidationError

    from engine.errors import StoreError
    from engine.schemas.credit import CreditSpec, read_credit
    from engine.spec.places import fields_by_key, tagged
    from engine.store.export import credit_of

    values = credit_of(store, score).model_dump(by_alias=True)
    given: dict[str, str] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise StoreError(f"--credit {change}: write KEY=VALUE, such as method=turn_return")
        given[key] = value
    model = tagged(CreditSpec, "method").get(given.get("method", values["method"]))
    try:
        kept = {key: value for key, value in values.items() if model is None or key in fields_by_key(model)}
        return read_credit(kept | given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][1:])) or "method"
        keys = sorted(fields_by_key(model), key=lambda key: key != "method") if model is not None else []
        known = f" (keys: {', '.join(keys)})" if keys else ""
        raise StoreError(f"--credit {place}: {first['msg']}{known}") from None


def _values(path: Path) -> dict[str, list[list[float]]]:
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
    found: dict[str, list[list[float]]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = orjson.loads(line)
            found[str(row["episode_id"])] = [[float(value) for value in turn] for turn in row["values"]]
        except (ValueError, KeyError, TypeError) as error:
            form = '{"episode_id": "t/0", "values": [[0.1, 0.2], [0.3]]}'
            raise StoreError(f"{path}:{number}: {error!r}; a line is {form}") from error
    return found


def _partly_done(store: RunStore) -> int:
    """Return the number of tasks with both finished and unfinished episodes."""
    done: dict[str, set[bool]] = {}
    for row in store.episodes():
        done.setdefault(row.task_id, set()).add(row.status == "done")
    return sum(len(states) == 2 for states in done.values())
