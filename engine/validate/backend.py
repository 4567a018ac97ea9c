"""Rules about `backend:` of the policy, and of model-played users and judges."""

from __future__ import annotations

from collections.abc import Iterator

from engine.schemas.backend import BackendBase, LocalBackendSpec, ServersSpec, backend_classes
from engine.schemas.generation import SamplingParams
from engine.spec.text.diagnostic import DataPath
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule


@rule("backend.unsupported-sampling", "error", "a sampling parameter that the backend does not have")
def unsupported_sampling(ctx: CheckContext) -> Iterator[Finding]:
    """`sampling` of the policy and of each model-played role, against the capabilities of its backend."""
    for backend, sampling, path in _sampled(ctx):
        for name in backend.unsupported(sampling):
            kinds = [
                kind.kind_name()
                for kind in backend_classes()
                if name not in kind.unsupported_sampling and not isinstance(backend, kind)
            ]
            fix = f"remove it, or use {' or '.join(f'`kind: {kind}`' for kind in kinds)}"
            yield Finding(f"the `{backend.kind_name()}` backend does not have `{name}`", (*path, name), fix)
        if sampling.temperature > backend.max_temperature and "temperature" not in backend.lacking:
            yield Finding(
                f"`temperature` is {sampling.temperature:g}; the `{backend.kind_name()}` backend takes at most "
                f"{backend.max_temperature:g}",
                (*path, "temperature"),
                f"set it to {backend.max_temperature:g} or less",
            )
        if (conflict := backend.conflict(sampling)) is not None:
            yield Finding(conflict, path, "remove one of them")


@rule("backend.no-launcher", "error", "nothing is installed that starts the servers of `backend.launch`")
def no_launch(ctx: CheckContext) -> Iterator[Finding]:
    """`launch` of a backend whose kind has no launcher. What one installation corrects is one finding."""
    fixes: set[str] = set()
    for backend, path in _declared(ctx):
        if isinstance(backend, ServersSpec) and backend.launch is not None:
            from engine.backends.servers.launched import no_launcher  # the check of another spec imports no backend

            fix = no_launcher(backend.kind)
            if fix is not None and fix not in fixes:
                fixes.add(fix)
                yield Finding(
                    f"nothing is installed that starts `{backend.kind}` servers", (*path, "launch"), fix, key=True
                )


def _declared(ctx: CheckContext) -> Iterator[tuple[BackendBase, DataPath]]:
    """The backends of the policy and of roles that declare their own, with their paths."""
    yield ctx.spec.backend, ("backend",)
    if any(user.model_played for _, user in ctx.users) or ctx.spec.rewards.scorer is not None:
        from engine.actions.role_models import roles_of

        for path, role in roles_of(ctx.spec).items():
            if role.spec.backend is not None:
                yield role.spec.backend, (*path, "backend")


def _sampled(ctx: CheckContext) -> Iterator[tuple[BackendBase, SamplingParams, DataPath]]:
    """Each backend with the sampling parameters that it is sent, and their path."""
    yield ctx.spec.backend, ctx.spec.sampling, ("sampling",)
    if not any(user.model_played for _, user in ctx.users) and ctx.spec.rewards.scorer is None:
        return
    from engine.actions.role_models import roles_of
    from engine.actions.role_weights import shares_policy

    for path, role in roles_of(ctx.spec).items():
        part = role.spec
        shared = shares_policy(ctx.spec, part)
        yield ctx.spec.backend if shared else part.backend or LocalBackendSpec(), part.sampling, (*path, "sampling")
