"""Rules over `environment.adapter`: its library is installed, and `use` names something that is there."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from engine import plugin
from engine.schemas.entry import AdapterFacts, ToolAdapterFacts
from engine.spec.code.entry import EntryError
from engine.spec.text.diagnostic import DataPath
from engine.validate.code.source import Sources
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule


@rule("code.adapter", "error", "an adapter's file or entry point is not there")
def adapter_target(ctx: CheckContext) -> Iterator[Finding]:
    """`environment.use` of an adapter, which names a file, code in a file, or an entry point."""
    environment = ctx.spec.environment
    facts = environment.facts if environment is not None else None
    if environment is None or facts is None:
        return
    mode = str(ctx.spec.environment_isolation.mode)
    if environment.isolation is None and (why := plugin.missing("isolation_modes", mode)) is not None:
        yield Finding(
            f"the adapter `{facts.name}` runs with `isolation: {mode}`: {why}",
            ("environment", "adapter"),
            "or write `isolation: thread` in `environment`",
        )
    if facts.names == "name":
        return
    path = ("environment", "use")
    if facts.names == "name or code" and ":" not in environment.use:
        return
    place, _, name = environment.use.rpartition(":")
    place = environment.use if facts.names == "file" else place
    if facts.names != "file" and not (place and name.isidentifier()):
        yield Finding(f"`{environment.use}` names no function or class", path, f"`use` is {facts.use}")
    elif facts.names == "file" or place.endswith(".py"):
        file = ctx.loaded.base / Path(place).expanduser()
        if not ctx.loaded.access.allows(file):
            ctx.skip()
        elif not file.is_file():
            yield Finding(f"there is no file `{place}`", path, "the path is relative to the spec's folder")
    else:
        try:
            Sources(ctx.loaded.base, ctx.loaded.access).entry(environment.use)
        except EntryError as error:
            message, _, fix = str(error).partition("; ")
            yield Finding(message, path, fix or None)


@rule("code.no-package", "info", "a package that an adapter of the environment or of a tool needs is not installed")
def adapter_package(ctx: CheckContext) -> Iterator[Finding]:
    """The packages of `environment.adapter` and of the `adapter` of tools."""
    environment = ctx.spec.environment
    adapters: list[tuple[DataPath, AdapterFacts | ToolAdapterFacts | None]] = [
        (("tools", index, "adapter"), tool.facts) for index, tool in enumerate(ctx.spec.tools)
    ]
    adapters.append((("environment", "adapter"), environment.facts if environment is not None else None))
    for path, facts in adapters:
        for package in facts.packages if facts is not None else ():
            if find_spec(package) is None and facts is not None:
                yield Finding(
                    f"`{package}` is not installed, and a run needs it for the adapter `{facts.name}`",
                    path,
                    facts.install,
                )
