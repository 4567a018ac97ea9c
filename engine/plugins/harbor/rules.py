"""Rules about task folders of Harbor's form."""

from __future__ import annotations

from collections.abc import Iterator

from engine.actions.facts import owns_conversation
from engine.errors import SpecError
from engine.validate.context import CheckContext, each_source
from engine.validate.registry import Finding, rule


@rule(
    "tasks.harbor",
    "error",
    "task folders of Harbor's form without the environment that runs them, or with too little time",
)
def harbor_environment(ctx: CheckContext) -> Iterator[Finding]:
    """`source: harbor` and `adapter: harbor` belong together; `environment.timeout` is at least the time of the
    tests."""
    spec = ctx.spec
    sources = [(path, source) for path, source in each_source(ctx) if source.spec.tasks.source == "harbor"]
    environment = spec.environment
    ours = environment is not None and environment.adapter == "harbor"
    for path, source in sources:
        if not ours or environment is None:
            yield Finding(
                "nothing runs the tests of these task folders",
                (*path, "source"),
                "add `environment: {adapter: harbor, use: shell}`, or `use: program` for an agent program",
            )
            continue
        try:
            longest = max((float(row.fields["verifier_seconds"]) for row in source.first_rows()), default=0.0)
        except SpecError:
            continue  # `tasks.unreadable` reports it
        if longest >= environment.timeout:
            yield Finding(
                f"the tests of a task may take {longest:g} s, and `environment.timeout` is {environment.timeout:g} s",
                ("environment", "timeout"),
                f"write `timeout: {longest + 60:g}s`",
            )
    if ours and environment is not None:
        if not sources:
            yield Finding(
                "the adapter `harbor` runs only tasks of `source: harbor`",
                ("environment", "adapter"),
                "write `tasks: {source: harbor, path: FOLDER}`",
            )
        if environment.use not in ("shell", "program"):
            yield Finding(f"`{environment.use}` is neither `shell` nor `program`", ("environment", "use"))
        elif (environment.use == "program") != owns_conversation(ctx.machine):
            other = "shell" if environment.use == "program" else "program"
            why = (
                "is for agent programs"
                if environment.use == "program"
                else "gives the tool to the model, not to the program"
            )
            yield Finding(f"`use: {environment.use}` {why}", ("environment", "use"), f"write `use: {other}`")
