"""Rules about `rollout.drivers`: what several processes cannot share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.errors import SpecError
from engine.schemas.backend import BackendBase, LocalBackendSpec
from engine.spec.added import spec_facts
from engine.spec.text.diagnostic import DataPath, Diagnostic
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.spec.load import LoadedSpec

RULE = "rollout.drivers"


@rule(RULE, "error", "something that several drivers cannot share")
def unshared(ctx: CheckContext) -> Iterator[Finding]:
    """`rollout.drivers` above 1 with a part of the spec that belongs to one process."""
    for message, path, fix in problems(ctx.spec):
        yield Finding(message, path, fix)


@rule("rollout.shards", "warning", "a place for shards in a run with one driver")
def unused_shards(ctx: CheckContext) -> Iterator[Finding]:
    """`rollout.shards` without several drivers."""
    if ctx.spec.rollout.shards is not None and ctx.spec.rollout.drivers == 1:
        yield Finding(
            "`shards` has no effect with one driver: its rows stay in the run's store",
            ("rollout", "shards"),
            "set `rollout.drivers`, or remove it",
        )


def problems(spec: EpisodeSpec) -> Iterator[tuple[str, DataPath, str]]:
    """What prevents several drivers: a message, its place, and what to do."""
    from engine.actions.role_models import roles_of

    rollout = spec.rollout
    if rollout.drivers == 1:
        return
    live = rollout.live_episodes or 2 * rollout.concurrency
    if min(rollout.concurrency, live) < rollout.drivers:
        yield (
            f"{rollout.drivers} drivers share {min(rollout.concurrency, live)} places (`concurrency`, `live_episodes`)",
            ("rollout", "drivers"),
            "use fewer drivers, or raise `rollout.concurrency` and `rollout.live_episodes`",
        )
    for facts in spec_facts(spec):
        yield from facts.one_process
    backends: list[tuple[BackendBase, DataPath]] = [(spec.backend, ("backend",))]
    if (
        any(user.model_played for user in (spec.user, *spec.users.values()) if user is not None)
        or spec.rewards.scorer is not None
    ):
        backends += [
            (role.spec.backend, (*path, "backend"))
            for path, role in roles_of(spec).items()
            if role.spec.backend is not None
        ]
    for backend, path in backends:
        if isinstance(backend, LocalBackendSpec):
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
    if spec.agent is not None and spec.agent.elsewhere:
        yield (
            "agent programs that run elsewhere have one endpoint",
            ("agent",),
            "set `rollout.drivers: 1`",
        )


def refuse_many(loaded: LoadedSpec, who: str) -> None:
    """Refuse a spec with several drivers for something that drives its episodes in one process.

    Args:
        loaded: The spec.
        who: What does so, as a message names it.

    Raises:
        SpecError: `rollout.drivers` is more than 1.
    """
    path = ("rollout", "drivers")
    if loaded.spec.rollout.drivers > 1:
        message = f"{who} does not support several drivers; `engine run`, `engine eval`, `engine train` and `engine serve SPEC` do"
        fix = "give --set rollout.drivers=1, or set it in the spec"
        raise SpecError([Diagnostic(RULE, "error", message, fix, loaded.origin(path), path)])


def refuse_drivers(loaded: LoadedSpec) -> None:
    """Check a spec whose number of drivers was changed after it was checked.

    Raises:
        SpecError: it cannot run with so many drivers.
    """
    _refuse(loaded, problems(loaded.spec))


def refuse_training(loaded: LoadedSpec) -> None:
    """Check what a training with several drivers cannot do.

    Raises:
        SpecError: something belongs to one process.
    """
    _refuse(loaded, training_problems(loaded.spec))


def training_problems(spec: EpisodeSpec) -> Iterator[tuple[str, DataPath, str]]:
    """What prevents a training with several drivers, in addition to `problems`: a message, its place, and what to do."""
    train = spec.train
    if spec.rollout.drivers == 1 or train is None:
        return
    one = "or set `rollout.drivers: 1`"
    if not train.samples_episodes:
        yield "a training on written episodes samples none", ("rollout", "drivers"), "set `rollout.drivers: 1`"
        return
    if train.weight_sync.method == "adapter":
        yield (
            "`adapter` is not supported with several drivers: the trainer does not know which adapters their requests use",
            ("train", "weight_sync", "method"),
            f"use `tensors`, `disk` or `collective`, {one}",
        )
    if train.colocate:
        yield (
            "`colocate` is not supported with several drivers",
            ("train", "colocate"),
            f"give trainer and servers GPUs of their own, {one}",
        )
    if spec.rollout.keep is not None:
        yield (
            "`keep` is not supported in a training with several drivers: their stores are not compacted",
            ("rollout", "keep"),
            f"remove it, {one}",
        )
    if spec.rollout.shards is not None:
        yield (
            "a training publishes no shards; its drivers run on the trainer's machine",
            ("rollout", "shards"),
            f"remove it, {one}",
        )


def refuse_serving(loaded: LoadedSpec) -> None:
    """Check what a service with several drivers cannot do.

    Raises:
        SpecError: it publishes no shards.
    """
    rollout = loaded.spec.rollout
    if rollout.drivers > 1 and rollout.shards is not None:
        fix = "remove it, or set `rollout.drivers: 1`"
        message = "a service publishes no shards; its drivers run on its machine"
        _refuse(loaded, iter([(message, ("rollout", "shards"), fix)]))


def _refuse(loaded: LoadedSpec, found: Iterator[tuple[str, DataPath, str]]) -> None:
    errors = [Diagnostic(RULE, "error", message, fix, loaded.origin(path), path) for message, path, fix in found]
    if errors:
        raise SpecError(errors)
