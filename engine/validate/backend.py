"""Rules about `backend:` of the policy, and of model-played users and judges."""

from __future__ import annotations

from collections.abc import Iterator

from engine.schemas.backend import BackendBase, ServersSpec, backend_classes
from engine.schemas.generation import SamplingParams
from engine.spec.added import backends_of, played_roles
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
    for path, backend in backends_of(ctx.spec).items():
        if isinstance(backend, ServersSpec) and backend.launch is not None:
            from engine.backends.servers.launched import no_launcher  # the check of another spec imports no backend

            fix = no_launcher(backend.kind)
            if fix is not None and fix not in fixes:
                fixes.add(fix)
                yield Finding(
                    f"nothing is installed that starts `{backend.kind}` servers", (*path, "launch"), fix, key=True
                )


def _sampled(ctx: CheckContext) -> Iterator[tuple[BackendBase, SamplingParams, DataPath]]:
    """Each backend with the sampling parameters that it is sent, and their path."""
    yield ctx.spec.backend, ctx.spec.sampling, ("sampling",)
    for path, role in played_roles(ctx.spec).items():
        yield role.served_by(ctx.spec), role.spec.sampling, (*path, "sampling")
