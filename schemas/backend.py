"""The backends of `backend:`: one config class each, with the capabilities that checks, runner, replay and trainer read.

To add a backend: the runtime class in a new file or folder of `engine/backends/`, and its config class here or in
`backend_servers.py`, and in `BackendSpec`; or a plugin with both, which names the config class in `backends`. Checks, evaluation, scenarios, model-played users, trainer,
JSON Schema and docs/spec.md read the class attributes and properties; none of them asks for the `kind`. The capabilities are
declared here and not on the runtime class, because `engine validate` reads them, and importing the runtime class takes up to
0.2 s.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from engine import plugin
from engine.schemas.backend_base import CONSTRAINTS, BackendBase
from engine.schemas.backend_servers import (
    LaunchSpec,
    ServersSpec,
    SGLangBackendSpec,
    changes_distribution,
    cuts_distribution,
)
from engine.schemas.open_union import OneOf

__all__ = [
    "BackendBase",
    "BackendSpec",
    "LaunchSpec",
    "SGLangBackendSpec",
    "ScriptedBackendSpec",
    "ServersSpec",
    "backend_classes",
    "changes_distribution",
    "cuts_distribution",
    "default_backend",
    "kinds_that_train",
    "no_default",
]


class ScriptedBackendSpec(BackendBase):
    """Replies from a YAML file, tokenised by the real tokenizer: a dry run without a model."""

    runtime: ClassVar[str] = "engine.backends.scripted:ScriptedBackend"
    scripted: ClassVar[bool] = True
    unsupported_sampling: ClassVar[tuple[str, ...]] = CONSTRAINTS

    kind: Literal["scripted"] = "scripted"
    replies: str | list[Any]
    """A YAML file (relative to the spec), or the replies themselves."""
    latency: Annotated[float, Field(ge=0)] = 0.0
    """Seconds before each reply."""

    @property
    def files(self) -> dict[str, str]:
        return {"replies": self.replies} if isinstance(self.replies, str) else {}

    @property
    def reply_seconds(self) -> float:
        return self.latency


_KINDS: OneOf[BackendBase] = OneOf(
    point="backends",
    core=(
        SGLangBackendSpec,
        ScriptedBackendSpec,
    ),
)
BackendSpec = Annotated[BackendBase, _KINDS]
"""A backend of any kind; the discriminator is `kind`."""


def backend_classes() -> tuple[type[BackendBase], ...]:
    """The config class of every kind, those of plugins after the core's."""
    return _KINDS.members()


DEFAULT = "local"
"""The kind of a backend that is left out. A plugin adds it."""


def default_backend() -> BackendBase:
    """The backend where none is written: of kind `DEFAULT`; a bare `BackendBase`, which nothing can run, where that is not installed."""
    kinds = {kind.kind_name(): kind for kind in backend_classes()}
    return kinds.get(DEFAULT, BackendBase)()


def no_default(backend: BackendBase) -> str | None:
    """What to write, because a backend was left out and its default is not installed; None if it has a kind."""
    if type(backend) is not BackendBase:
        return None
    return f"`backend` needs `kind`; left out, it is `{DEFAULT}`: {plugin.missing('backends', DEFAULT) or 'no plugin adds it'}"


def kinds_that_train() -> str:
    """The kinds of backends that take new weights, as text: `` `local` or `sglang` ``."""
    return " or ".join(f"`{declared.kind_name()}`" for declared in backend_classes() if declared.trains)
