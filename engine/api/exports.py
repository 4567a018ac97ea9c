"""A run -> a file: training rows as JSON lines or Parquet, a scenario of one episode, and formats of plugins.

    run.filter("outcome.solved").export("rows.parquet", trainable_only=True)
    run.export("sft.jsonl", format="sft", turns="turn.last")        # a plugin's

Invariant: an option that has no effect with a format is refused, so no file lacks what was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import ValidationError

from engine import plugin
from engine.errors import StoreError
from engine.masking import mask
from engine.runner.guarded import KINDS
from engine.runner.summary import RunSummary
from engine.schemas.base import Struct
from engine.schemas.credit import CreditSpec, read_credit
from engine.spec.text.near import near_or_known
from engine.spec.text.places import fields_by_key, tagged
from engine.store.dropped import dropped_words
from engine.store.loader import vision_of, with_image_files
from engine.store.rows.build import rewards_of
from engine.store.rows.export import training_rows, write_jsonl, write_parquet
from engine.store.rows.row import columns_of

if TYPE_CHECKING:
    from engine.api.runs import Run
    from engine.store.reader import RunReader
    from engine.store.rows.row import TrainingRow


class Exported(Struct, frozen=True, kw_only=True):
    """What an export wrote."""

    path: Path
    words: str
    """What is in the file: `12 rows`."""
    warnings: Sequence[str] = ()
    """What the rows lack or do not show."""
    notes: Sequence[str] = ()
    """What else the reader should know."""


class ExportFormat(Struct, frozen=True):
    """A format: one of the core's, or a plugin's."""

    write: Callable[[Run, Path | None, Mapping[str, Any]], Exported]
    """Gets the run or a part of it, the file, and the options in `takes`: `--score` -> its value, None if it is not
    given."""
    kind: str
    """The kind of file, for messages."""
    suffixes: tuple[str, ...]
    """Those that a file may have; empty: any."""
    takes: frozenset[str]
    """The options that have an effect, of the core's and of the plugin's own. With `--filter` it takes part of a run:
    `Run.keeps`."""


class RecordedScenario(Struct, frozen=True):
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


def export(run: Run, path: Path | None, format: str | None, options: Mapping[str, Any]) -> Exported:
    """Write a file of a run; `Run.export` has the arguments. Raises: StoreError: see there."""
    formats: dict[str, ExportFormat] = CORE | plugin.loaded("export_formats", [*CORE])
    name = format or ("parquet" if path is not None and path.suffix == ".parquet" else "jsonl")
    if (chosen := formats.get(name)) is None:
        hint = plugin.missing("export_formats", name) or near_or_known(name, list(formats), what="formats")
        raise StoreError(f"there is no format `{name}`; {hint}")
    for option in [option for option, value in options.items() if value and option not in chosen.takes]:
        taking = [f"--format {other}" for other, entry in formats.items() if option in entry.takes]
        others = f", or use {' or '.join(taking)}" if taking else ""
        raise StoreError(f"{option} has no effect with --format {name}; leave it out{others}")
    if chosen.suffixes and path is not None and path.suffix not in chosen.suffixes:
        fix = f"name a file with the suffix {chosen.suffixes[0]} instead of {path.name}"
        raise StoreError(f"--format {name} writes {chosen.kind}; {fix}")
    return chosen.write(run, path, {option: options.get(option) for option in chosen.takes})


# ---- rows


_PARTLY_DONE = (
    "SELECT count(*) FROM "
    "(SELECT 1 FROM episodes GROUP BY task_index, task_id HAVING count(DISTINCT status = 'done') = 2)"
)


def _write_rows(format: str, run: Run, path: Path | None, options: Mapping[str, Any]) -> Exported:
    store, score = run.store, options["--score"]
    path = path or store.default_file(f"rows.{format}")
    credit = changed_credit(store, options["--credit"] or (), score)
    values = options["--values"]
    rows = training_rows(
        store,
        credit=credit,
        trainable_only=bool(options["--trainable-only"]),
        score=score,
        values=None if values is None else _read_values(Path(values)),
        keep=run.keeps(),
    )
    unchecked, refused = 0, Counter[str]()

    def counted() -> Iterator[TrainingRow]:
        nonlocal unchecked
        for row in rows:
            unchecked += row.unchecked_prompts or 0
            failure = row.episode.outcome.failure
            if failure is not None and failure.kind in KINDS:
                refused[failure.kind] += 1
            yield row

    columns = with_image_files(columns_of(counted()), path, partial(vision_of, store))
    if format == "jsonl":
        count = write_jsonl(columns, path)
    else:
        metadata = {
            "episode_engine.run_id": store.run_id,
            "episode_engine.version": store.header.engine_version,
            "episode_engine.credit": mask(credit.model_dump_json(by_alias=True)),
        }
        count = write_parquet(columns, path, metadata | ({"episode_engine.score": score} if score else {}))
    warnings = [dropped_words(store), RunSummary(unchecked_prompts=unchecked).unchecked_words]
    if refused:
        kinds = ", ".join(f"{kind} {number}" for kind, number in refused.most_common())
        warnings.append(f"{refused.total()} of them are not trainable, because the guard refused them: {kinds}")
    notes = ["none of them is trainable: this run is an evaluation"] if store.header.evaluation else []
    with store.snapshot() as connection:
        partly = connection.execute(_PARTLY_DONE).fetchone()[0]
    if partly:
        why = "their advantages are computed from the episodes that are done"
        notes.append(f"{partly} tasks have episodes that are not done: {why}")
    return Exported(path=path, words=f"{count} rows", warnings=[*filter(None, warnings)], notes=notes)


def changed_credit(
    store: RunReader, changes: Mapping[str, Any] | Sequence[str], score: str | None = None
) -> CreditSpec:
    """Return the credit method of the run or of a score, with changes. Another `method` keeps the values that it has
    too.

    Raises:
        StoreError: a change is not KEY=VALUE, or the method does not take it.
    """
    changed: dict[str, Any] = dict(changes) if isinstance(changes, Mapping) else {}
    for change in () if isinstance(changes, Mapping) else changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise StoreError(f"--credit {change}: write KEY=VALUE, such as method=turn_return")
        changed[key] = value
    values = rewards_of(store, score).credit.model_dump(by_alias=True)
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


# ---- scenarios


def recorded_scenario(store: RunReader, episode: str, file: Path | None = None) -> RecordedScenario:
    """Make a scenario of a finished episode, play it, and write it to a file if one is given.

    Raises:
        StoreError: the plugin is not installed.
        EngineError: the scenario does not have the recorded result.
    """
    for record in RECORD_SCENARIO.all():
        return record(store, episode, file)
    raise StoreError(f"there are no scenarios: {plugin.missing('commands', 'test')}")


def _write_scenario(run: Run, path: Path | None, options: Mapping[str, Any]) -> Exported:
    """Write a scenario of an episode. Raises: StoreError: the episode or the file is not given."""
    if path is None or options["--episode"] is None:
        raise StoreError("--format scenario needs --episode ID and -o FILE.yaml; `engine show RUN` lists the episodes")
    scenario = recorded_scenario(run.store, options["--episode"], path)  # it is tried
    return Exported(path=path, words=f"scenario `{scenario.name}`, which passes", notes=scenario.notes)


_ROWS = frozenset({"--filter", "--score", "--credit", "--values", "--trainable-only"})
CORE = {
    "jsonl": ExportFormat(partial(_write_rows, "jsonl"), "JSON lines", (), _ROWS),
    "parquet": ExportFormat(partial(_write_rows, "parquet"), "Parquet", (), _ROWS),
    "scenario": ExportFormat(_write_scenario, "YAML", (".yaml", ".yml"), frozenset({"--episode"})),
}
"""Formats of the core; plugins add others."""
