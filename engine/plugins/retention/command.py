"""`engine compact`: drops stored episodes of a training to save space."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.exits import USAGE, errors_exit, wrong_usage
from engine.cli.options import Json, RunsFolder, only_looks
from engine.terminal import echo, echo_json, size_words

if TYPE_CHECKING:
    from engine.plugins.retention.compact import Compacted, DropPlan
    from engine.plugins.retention.spec import KeepSpec
    from engine.schemas.episode import EpisodeSpec


@only_looks
def compact(
    run: Annotated[str, typer.Argument(help="A training: its folder, its id or the beginning of it, or `latest`.")],
    steps: Annotated[int | None, typer.Option(min=0, help="Keep the groups of the last STEPS steps.")] = None,
    failures: Annotated[
        bool | None, typer.Option("--failures/--no-failures", help="Keep groups with an episode that failed.")
    ] = None,
    sample: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, metavar="FRACTION", help="Keep this fraction of all groups.")
    ] = None,
    trained: Annotated[
        bool | None, typer.Option("--trained/--no-trained", help="Keep groups that a step was trained on.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing; say what would be dropped.")] = False,
    out: RunsFolder = Path("runs"),
    json: Json = False,
) -> None:
    """Drop tokens, messages and journals of a training's episodes, and shrink the file of its run store.

    What stays is `rollout.keep` of the training's spec, with the options given here in its place. Nothing that a resume
    of the training needs is dropped, and outcome, reward and counts of each episode stay. The training must not be
    running.
    """
    from engine.plugins.retention.compact import compact_training
    from engine.store.training import find_training, read_header

    with errors_exit(USAGE):
        folder = find_training(run, out)
        spec = read_header(folder).loaded_spec().spec
        keep = _keep(spec, {"steps": steps, "failures": failures, "sample": sample, "trained": trained})
        plan, compacted = compact_training(folder, spec, keep, dry_run=dry_run)
    if json:
        echo_json(_document(folder, keep, plan, compacted, dry_run=dry_run))
    else:
        _report(folder, plan, compacted, dry_run=dry_run)
    if compacted.problem is not None:
        echo(compacted.problem, err=True)
        raise typer.Exit(1)


def _keep(spec: EpisodeSpec, given: dict[str, object]) -> KeepSpec:
    from engine.plugins.retention.spec import KeepSpec

    if spec.train is None or not spec.train.samples_episodes:
        wrong_usage("this training has no episodes of its own (`train.kind: sft`), so there is nothing to drop")
    options = {key: value for key, value in given.items() if value is not None}
    keep = KeepSpec.section_of(spec.rollout)
    if keep is None and not options:
        wrong_usage(
            "the training's spec has no `rollout.keep`: say what stays with --steps, --failures, --sample or --trained"
        )
    if keep is None and "steps" not in options:
        options["steps"] = 0  # else --sample 0.1 would keep the last steps, which nobody asked for
    return (keep or KeepSpec()).model_copy(update=options)


def _document(
    folder: Path, keep: KeepSpec, plan: DropPlan, compacted: Compacted, *, dry_run: bool
) -> dict[str, object]:
    return {
        "training": str(folder),
        "dry_run": dry_run,
        "keep": keep.model_dump(),
        "dropped": {"groups": compacted.groups, "episodes": compacted.episodes, "bytes": compacted.size},
        "dropped_images": {"images": compacted.images, "bytes": compacted.image_size},
        "dropped_so_far": {"episodes": compacted.total.episodes, "bytes": compacted.total.size},
        "groups_that_stay": _reasons(plan, compacted),
        "resume_needs_steps_after": plan.repeated,
        "file_bytes": {"before": compacted.before.file, "after": compacted.after.file},
        "problem": compacted.problem,
    }


def _reasons(plan: DropPlan, compacted: Compacted) -> dict[str, int]:
    """Number of consumed groups that stay, by the reason."""
    return dict(plan.stay) | ({"an episode of them failed": compacted.failed} if compacted.failed else {})


def _report(folder: Path, plan: DropPlan, compacted: Compacted, *, dry_run: bool) -> None:
    from engine.console import make_console

    console = make_console(soft_wrap=True)
    verb = "would be dropped" if dry_run else "dropped"
    console.print(
        f"{compacted.episodes} episodes of {compacted.groups} groups {verb}: {size_words(compacted.size)} of content"
    )
    for reason, count in _reasons(plan, compacted).items():
        console.print(f"{count} groups stay: {reason}")
    if not plan.repeated:
        console.print("The training has no checkpoint yet, and a resume repeats all of its steps")
    for line in disk_lines(compacted):
        console.print(line)
    if dry_run:
        console.print("Nothing was written. Images that only dropped episodes show are dropped as well")
    console.print(f"Training: {folder}")


def disk_lines(compacted: Compacted) -> list[str]:
    """What a compaction did, and the size of the run store before and after it, in words."""
    lines = []
    if compacted.total.episodes:
        lines.append(
            f"Dropped since the training began: {compacted.total.episodes} episodes, "
            f"{size_words(compacted.total.size)} of content"
        )
    if compacted.images:
        lines.append(f"Dropped images: {compacted.images}, {size_words(compacted.image_size)}")
    sizes = dict.fromkeys((size_words(compacted.before.file), size_words(compacted.after.file)))
    lines.append(f"Run store: {' -> '.join(sizes)}")
    return lines
