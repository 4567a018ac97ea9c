"""A user or a scorer that a model plays needs a plugin that lets it."""

from __future__ import annotations

from collections.abc import Iterator

from engine.schemas.backend import no_default
from engine.spec.added import no_player, played_parts, played_roles
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule


@rule("role.no-player", "error", "nothing is installed that lets a model play a user or a judge")
def nobody_plays(ctx: CheckContext) -> Iterator[Finding]:
    """`user`, `users` or `rewards.scorer` without `use`. What one installation corrects is one finding."""
    fixes: set[str] = set()
    for path, part in played_parts(ctx.spec).items():
        fix = no_player(part)
        if fix is not None and fix not in fixes:
            fixes.add(fix)
            yield Finding(f"nothing is installed that lets a model play the {part.player}", path, fix, key=True)
    for path, role in played_roles(ctx.spec).items():
        if (why := no_default(role.served_by(ctx.spec))) is not None:
            yield Finding(why, path, "write where the model runs: `backend: {kind: …}`", key=True)
