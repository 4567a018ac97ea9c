"""Rules about `train.kind: sft` and `train.data`: found without torch and without reading rows."""

from __future__ import annotations

from collections.abc import Iterator

from engine.plugins.sft.spec import SUFFIXES, SftDataSpec
from engine.schemas.train import TrainSpec
from engine.spec.added import trains_backend
from engine.spec.text.diagnostic import DataPath
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule

KIND: DataPath = ("train", "kind")


def _sft(ctx: CheckContext) -> Iterator[TrainSpec]:
    if ctx.spec.train is not None and ctx.spec.train.kind == "sft":
        yield ctx.spec.train


@rule("train.sft", "error", "`train.kind: sft` and keys of `train` that do not fit each other")
def sft_keys(ctx: CheckContext) -> Iterator[Finding]:
    """`train.data`, and keys for episodes that the model samples. Those of a spec that this one extends are left out:
    they are for `kind: rl`."""
    if ctx.spec.train is not None and SftDataSpec.section_of(ctx.spec.train) is not None and not list(_sft(ctx)):
        yield Finding(
            "`data` belongs to `kind: sft`", ("train", "data"), "write `kind: sft`, or remove `data`", key=True
        )
    for train in _sft(ctx):
        if SftDataSpec.section_of(train) is None:
            yield Finding("`kind: sft` needs `data`", KIND, "write `data: {path: rows.jsonl, min_reward: 1.0}`")
        file = ctx.loaded.origin(KIND, key=True).file
        for name in TrainSpec.model_fields:
            path: DataPath = ("train", name)
            if name in (train.facts.keys or ()) and (name != "weight_sync" or trains_backend(ctx.spec)):
                continue
            if ctx.written(*path) and ctx.loaded.origin(path, key=True).file == file:
                why = "weights are sent only to evaluate them (`train.eval`)"
                if name != "weight_sync":
                    why = "nothing is sampled, and the loss is the cross-entropy of the rows in `train.data`"
                yield Finding(f"`train.{name}` has no effect with `kind: sft`: {why}", path, "remove it", key=True)


@rule(
    "train.data",
    "warning",
    "the rows of a training on written episodes are not there yet, or a key chooses none of them",
)
def sft_data(ctx: CheckContext) -> Iterator[Finding]:
    """`train.data.path`, and `train.data.reward` without `min_reward`."""
    for train in _sft(ctx):
        data = SftDataSpec.section_of(train)
        if data is None:
            continue
        if data.min_reward is None and ctx.written("train", "data", "reward"):
            yield Finding(
                "`train.data.reward` has no effect: `train.data.min_reward` is not set, so all episodes are used",
                ("train", "data", "reward"),
                "remove it, or set `min_reward`",
                key=True,
            )
        for number, name in enumerate([data.path] if isinstance(data.path, str) else data.path):
            path: DataPath = ("train", "data", "path", *(() if isinstance(data.path, str) else (number,)))
            file = ctx.loaded.resolve(name, path)
            access = ctx.loaded.access
            if access.is_dir(file):
                continue
            if not access.is_file(file):
                yield Finding(f"there is no file `{name}`", path, "write it with `engine export RUN --out FILE`")
            elif file.suffix not in SUFFIXES:
                yield Finding(
                    f"`{name}` is not a file of `engine export`: its name ends with neither .jsonl nor .parquet",
                    path,
                    "write it with `engine export RUN --format jsonl`",
                )
