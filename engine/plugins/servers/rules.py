"""The rule about `backend.launch`."""

from __future__ import annotations

from collections.abc import Iterator

from engine.plugins.servers.launched import no_launcher
from engine.schemas.backend import ServersSpec
from engine.spec.added import backends_of
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule


@rule("backend.no-launcher", "error", "nothing is installed that starts the servers of `backend.launch`")
def no_launch(ctx: CheckContext) -> Iterator[Finding]:
    """`launch` of a backend whose kind has no launcher. What one installation corrects is one finding."""
    fixes: set[str] = set()
    for path, backend in backends_of(ctx.spec).items():
        if isinstance(backend, ServersSpec) and backend.launch is not None:
            fix = no_launcher(backend.kind)
            if fix is not None and fix not in fixes:
                fixes.add(fix)
                yield Finding(
                    f"nothing is installed that starts `{backend.kind}` servers", (*path, "launch"), fix, key=True
                )
