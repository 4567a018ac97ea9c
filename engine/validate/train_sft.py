"""Rules for `train.kind: sft`: training on written episodes. Imports neither torch nor the trainer."""

from __future__ import annotations

from collections.abc import Iterator

from engine.schemas.train import TrainSpec
from engine.spec.text.diagnostic import DataPath
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule

KIND: DataPath = ("train", "kind")
SUFFIXES = (".jsonl", ".parquet")


def _sft(ctx: CheckContext) -> Iterator[TrainSpec]:
    if ctx.spec.train is not None and not ctx.spec.train.samples_episodes:
        yield ctx.spec.train


@rule("train.sft", "error", "a key of `train` has no effect with `kind: sft`")
def sft_keys(ctx: CheckContext) -> Iterator[Finding]:
    """Keys for episodes that the model samples. Those of a spec that this one extends are left out: they are for `kind: rl`."""
    for train in _sft(ctx):
        file = ctx.loaded.origin(KIND, key=True).file
        for name in TrainSpec.model_fields:
            path: DataPath = ("train", name)
            if name in (train.facts.keys or ()) and (name != "weight_sync" or train.uses_backend):
                continue
            if ctx.written(*path) and ctx.loaded.origin(path, key=True).file == file:
                why = "weights are sent only to evaluate them (`train.eval`)"
                if name != "weight_sync":
                    why = "nothing is sampled, and the loss is the cross-entropy of the rows in `train.data`"
                yield Finding(f"`train.{name}` has no effect with `kind: sft`: {why}", path, "remove it", key=True)


@rule("train.data", "warning", "the rows of a training on written episodes are not there yet")
def sft_data(ctx: CheckContext) -> Iterator[Finding]:
    """`train.data.path`."""
    for train in _sft(ctx):
        named = train.data.path if train.data is not None else []
        for number, each in enumerate([named] if isinstance(named, str) else named):
            path: DataPath = ("train", "data", "path", *(() if isinstance(named, str) else (number,)))
            file = ctx.loaded.resolve(each, path)
            access = ctx.loaded.access
            if access.is_dir(file):
                continue
            if not access.is_file(file):
                message = f"there is no file `{each}`"
                yield Finding(message, path, "write it with `engine export RUN --out FILE`")
            elif file.suffix not in SUFFIXES:
                message = f"`{each}` is not a file of `engine export`: its name ends with neither .jsonl nor .parquet"
                yield Finding(message, path, "write it with `engine export RUN --format jsonl`")
