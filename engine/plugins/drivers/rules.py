"""Rules about `rollout.drivers`: what several processes cannot share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING

from engine.errors import SpecError
from engine.given import names_in
from engine.plugins.drivers.spec import DriversSpec
from engine.processes.worker import default_processes
from engine.spec.added import backends_of, spec_facts
from engine.spec.text.diagnostic import DataPath, Diagnostic
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.spec.load import LoadedSpec

RULE = "rollout.drivers"
SLOTS_OF_ONE = 1024
"""Generation slots for which `auto` takes one process: one keeps 2,048 busy whose replies take a second, and 256 whose
replies take a tenth of it (`python bench/rollout.py --measure slots`)."""


@rule(RULE, "error", "something that several drivers cannot share")
def unshared(ctx: CheckContext) -> Iterator[Finding]:
    """`rollout.drivers` above 1 with a part of the spec that belongs to one process."""
    for message, path, fix in problems(ctx.spec):
        yield Finding(message, path, fix)


@rule("rollout.shards", "warning", "a place for shards in a run with one driver")
def unused_shards(ctx: CheckContext) -> Iterator[Finding]:
    """`rollout.shards` without several drivers."""
    section = DriversSpec.of(ctx.spec)
    if section.shards is not None and number_of_drivers(ctx.spec) == 1:
        yield Finding(
            "`shards` has no effect with one driver: its rows stay in the run's store",
            ("rollout", "shards"),
            "set `rollout.drivers`, or remove it",
        )


def number_of_drivers(spec: EpisodeSpec) -> int:
    """The number of drivers of a spec: the given one, or the one that `auto` picks on this machine."""
    asked = DriversSpec.of(spec).drivers
    if asked != "auto":
        return asked
    drivers = min(default_processes(), -(-spec.rollout.concurrency // SLOTS_OF_ONE))
    if drivers == 1 or find_spec("ray") is None:
        return 1
    return 1 if any(chain(_unshared(spec, drivers), _untrainable(spec, None))) else drivers


def problems(spec: EpisodeSpec) -> Iterator[tuple[str, DataPath, str]]:
    """What prevents several drivers: a message, its place, and what to do."""
    drivers = DriversSpec.of(spec).drivers
    if drivers not in (1, "auto"):  # `auto` picks 1 where something prevents several
        yield from _unshared(spec, int(drivers))


def _unshared(spec: EpisodeSpec, drivers: int) -> Iterator[tuple[str, DataPath, str]]:
    rollout = spec.rollout
    live = rollout.live_episodes or 2 * rollout.concurrency
    if min(rollout.concurrency, live) < drivers:
        yield (
            f"{drivers} drivers share {min(rollout.concurrency, live)} places (`concurrency`, `live_episodes`)",
            ("rollout", "drivers"),
            "use fewer drivers, or raise `rollout.concurrency` and `rollout.live_episodes`",
        )
    for facts in spec_facts(spec):
        yield from facts.one_process
    for path, name in names_in(spec.model_dump(mode="json", by_alias=True)):
        yield (
            f"`{name}` belongs to the program that gave it, and other processes do not have it",
            path,
            f"put it into a module and write `module:{name}`, or set `rollout.drivers: 1`",
        )
    for path, backend in backends_of(spec).items():
        if not backend.weights_in_servers and not backend.scripted:
            yield (
                "each driver would load a copy of the weights",
                path,
                "use a backend with servers (`kind: sglang`, `kind: vllm`), or set `rollout.drivers: 1`",
            )
        elif getattr(backend, "launch", None) is not None:
            yield (
                "each driver would start servers of its own",
                (*path, "launch"),
                "start the servers beside the run, and give their `url` or `urls`, or set `rollout.drivers: 1`",
            )


def training_problems(spec: EpisodeSpec) -> Iterator[tuple[str, DataPath, str]]:
    """What prevents a training with several drivers, in addition to `problems`: a message, its place, and what to
    do."""
    section = DriversSpec.of(spec)
    if section.drivers not in (1, "auto"):
        yield from _untrainable(spec, section.shards)


def _untrainable(spec: EpisodeSpec, shards: str | None) -> Iterator[tuple[str, DataPath, str]]:
    train = spec.train
    if train is None:
        return
    one = "or set `rollout.drivers: 1`"
    if not train.samples_episodes:
        yield "a training on written episodes samples none", ("rollout", "drivers"), "set `rollout.drivers: 1`"
        return
    if train.weight_sync.method == "adapter":
        yield (
            "`adapter` is not supported with several drivers: the trainer does not know which adapters their requests "
            "use",
            ("train", "weight_sync", "method"),
            f"use `tensors`, `disk` or `collective`, {one}",
        )
    if train.colocate:
        yield (
            "`colocate` is not supported with several drivers",
            ("train", "colocate"),
            f"give trainer and servers GPUs of their own, {one}",
        )
    if shards is not None:
        yield (
            "a training publishes no shards; its drivers run on the trainer's machine",
            ("rollout", "shards"),
            f"remove it, {one}",
        )


def refuse(loaded: LoadedSpec, problems: Iterable[tuple[str, DataPath, str]]) -> None:
    """Raise what prevents several drivers.

    Raises:
        SpecError: there is something.
    """
    errors = [Diagnostic(RULE, "error", message, fix, loaded.origin(path), path) for message, path, fix in problems]
    if errors:
        raise SpecError(errors)
