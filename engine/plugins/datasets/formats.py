"""`engine export --format sft|trl|verl`: writes rows or a data set of messages, and pushes a data set to the hub."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.api.exports import Exported, ExportFormat
from engine.errors import StoreError

if TYPE_CHECKING:
    from engine.api.runs import Run
    from engine.plugins.datasets.sft_rows import ExportedTurns


def _problem(form: str, contents: list[str], options: Mapping[str, Any]) -> str | None:
    """Why the options of the command do not go together; None if they do."""
    content = options["--content"] or contents[0]
    rows = (
        (
            content not in contents,
            f"--content {content} is not one of --format {form}, which has: {', '.join(contents)}",
        ),
        (
            options.get("--turns") is not None and content not in ("turns", "preferences"),
            f"--turns has no effect with --content {content}; leave it out, or use --content turns",
        ),
        (
            options["--ground-truth"] is not None and content != "prompts",
            f"--ground-truth has no effect with --content {content}; leave it out, or use --content prompts",
        ),
        (options["--public"] and options["--push"] is None, "--public has an effect only with --push"),
        (
            options["--push"] is not None and options["--images"] == "paths",
            "--images paths names files of this machine, which nobody who reads the hub has; leave it out",
        ),
    )
    return next((message for holds, message in rows if holds), None)


def _selection(run: Run, options: Mapping[str, Any]) -> ExportedTurns:
    """What `--filter` and `--turns` choose."""
    from engine.plugins.datasets.sft_rows import ExportedTurns
    from engine.store.episode_filter import TURN_VARIABLES, EpisodeFilter

    selection = ExportedTurns(episode=run.keeps())
    if options.get("--turns") is not None:
        selection.turn = EpisodeFilter(run.store, options["--turns"], "--turns", TURN_VARIABLES)
    return selection


def export_dataset(form: str, run: Run, out: Path | None, options: Mapping[str, Any]) -> Exported:
    """Write the data set, and push it.

    Args:
        form: `trl` or `verl`.
        run: The run, or a part of it.
        out: The file; by default in the run's folder.
        options: The options of the command: `--content` -> its value.

    Raises:
        StoreError: the options do not go together, or the hub refuses the push.
    """
    from engine.plugins.datasets.contents import TABLES, ExportedRun
    from engine.plugins.datasets.tables import image_struct, write_table
    from engine.store.dropped import dropped_words
    from engine.tokens.loading import load_format

    tables = TABLES[form]
    if problem := _problem(form, list(tables), options):
        raise StoreError(problem)
    content, push, store = options["--content"] or next(iter(tables)), options["--push"], run.store
    if push is not None:
        from engine.plugins.datasets.hub import check_push

        check_push(push)
    template = load_format(store.header.model, store.header.base)
    source = ExportedRun(store, template, _selection(run, options), options["--score"], options["--ground-truth"])
    path = out or store.default_file(f"{form}_{content}.parquet")
    folder = path.with_name(f"{path.stem}_images")
    image = partial(image_struct, store, folder if options["--images"] == "paths" else None)
    metadata = {"episode_engine.run_id": store.run_id, "episode_engine.version": store.header.engine_version}
    kinds, rows = tables[content]
    count = write_table(rows(source), source.columns(kinds), path, metadata, image=image)
    notes = list(source.summary())
    if push is not None:
        from engine.plugins.datasets.hub import push_file

        public = bool(options["--public"])
        url = push_file(path, push, rows=count, public=public, run_id=store.run_id, content=content)
        notes.append(f"pushed: {url}")
    return Exported(path=path, words=f"{count} rows", warnings=[*filter(None, [dropped_words(store)])], notes=notes)


def export_sft(run: Run, out: Path | None, options: Mapping[str, Any]) -> Exported:
    """Write rows for supervised fine-tuning: one per branch, with ids, masks by turn and the messages that the model
    was shown."""
    from engine.plugins.datasets.sft_rows import sft_rows
    from engine.store.dropped import dropped_words
    from engine.store.loader import vision_of, with_image_files
    from engine.store.rows.export import write_jsonl

    path = out or run.store.default_file("sft.jsonl")
    selection = _selection(run, options)
    columns = sft_rows(run.store, selection, score=options["--score"])
    count = write_jsonl(with_image_files(columns, path, partial(vision_of, run.store)), path)
    words = f"{count} rows of {selection.episodes} episodes"
    warnings = [*filter(None, [dropped_words(run.store)])]
    return Exported(path=path, words=words, warnings=warnings, notes=selection.summary())


_TAKEN = frozenset({"--filter", "--score", "--content", "--images", "--ground-truth", "--push", "--public"})
TRL = ExportFormat(partial(export_dataset, "trl"), "Parquet", (".parquet",), _TAKEN | {"--turns"})
VERL = ExportFormat(partial(export_dataset, "verl"), "Parquet", (".parquet",), _TAKEN)
SFT = ExportFormat(export_sft, "JSON lines", (".jsonl", ".json"), frozenset({"--filter", "--score", "--turns"}))
