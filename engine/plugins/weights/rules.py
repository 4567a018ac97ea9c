"""Rules for `train.weight_sync` and `train.colocate`. Imports neither torch nor the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from engine.schemas.backend import backend_classes
from engine.schemas.train import TrainSpec
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule

_HERE = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})


def _train(ctx: CheckContext) -> Iterator[TrainSpec]:
    """The section `train`, if the spec has one."""
    if ctx.spec.train is not None:
        yield ctx.spec.train


@rule("train.weight-sync", "error", "`train.weight_sync.method` does not fit what is trained or served")
def weight_sync(ctx: CheckContext) -> Iterator[Finding]:
    """`adapter` without `train.lora`; `collective` with it, behind a router, or with `train.colocate`."""
    for train in _train(ctx):
        method, path = train.weight_sync.method, ("train", "weight_sync", "method")
        if method == "adapter" and train.adapter is None:
            yield Finding(
                "only an adapter would be sent, but all weights are trained",
                path,
                "add `train.lora: {}`, or use `disk` or `auto`",
            )
        if method != "collective":
            continue
        if train.adapter is not None:
            yield Finding("all weights would be sent, but only an adapter is trained", path, "use `adapter` or `auto`")
        if getattr(ctx.spec.backend, "router", False):
            yield Finding(
                "servers behind a router cannot be called to a process group",
                path,
                "name the servers themselves in `backend.urls`, or use `disk`",
            )
        if train.colocate:
            yield Finding(
                "NCCL refuses a group in which trainer and server have the same GPU (`train.colocate`)",
                path,
                "use `tensors` or `disk`",
            )


@rule("train.colocate", "error", "trainer and servers cannot use the same GPUs in turn")
def colocate(ctx: CheckContext) -> Iterator[Finding]:
    """`train.colocate` with another backend, behind a router, or with sampling while an update runs."""
    for train in _train(ctx):
        if not train.colocate:
            continue
        backend, path = ctx.spec.backend, ("train", "colocate")
        if not backend.releases_memory:
            kinds = " or ".join(f"`{kind.kind_name()}`" for kind in backend_classes() if kind.releases_memory)
            yield Finding(
                f"the `{backend.kind}` backend has no servers that release memory", path, f"remove it, or use {kinds}"
            )
        if getattr(backend, "router", False):
            yield Finding(
                "a router does not pass on that servers release memory",
                path,
                "name the servers themselves in `backend.urls`",
            )
        if train.asynchrony.max_staleness:
            yield Finding(
                "servers sample while an update runs, so they cannot release their memory",
                ("train", "asynchrony", "max_staleness"),
                "set it to 0, or remove `train.colocate`",
            )
        if not train.samples_episodes:
            yield Finding("nothing is sampled between updates, so nothing is released", path, "remove it")


@rule(
    "train.weight-sync-method",
    "warning",
    "`train.weight_sync.method` has no effect, or the server may not see the weights",
)
def weight_sync_method(ctx: CheckContext) -> Iterator[Finding]:
    """The local backend shares the trainer's memory; shared memory is limited to one host."""
    for train in _train(ctx):
        method, backend, path = train.weight_sync.method, ctx.spec.backend, ("train", "weight_sync", "method")
        if backend.trains and method not in backend.weight_methods:
            yield Finding(
                f"`{method}` has no effect: the `{backend.kind}` backend takes weights in memory", path, "remove it"
            )
        if method == "tensors":
            far = [url for url in backend.server_urls if _host(url) not in _HERE]
            if far:
                yield Finding(
                    f"`tensors` uses the shared memory of this host, and `{far[0]}` may be another host",
                    path,
                    "use `disk` with a folder that both hosts share",
                )


def _host(url: str) -> str:
    try:
        return urlsplit(url if "//" in url else f"//{url}").hostname or ""
    except ValueError:
        return ""
