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
    "LocalBackendSpec",
    "SGLangBackendSpec",
    "ScriptedBackendSpec",
    "ServersSpec",
    "backend_classes",
    "changes_distribution",
    "cuts_distribution",
    "kinds_that_train",
]


class LocalBackendSpec(BackendBase):
    """transformers in this process, with batching of concurrent requests."""

    runtime: ClassVar[str] = "engine.plugins.local.backend:LocalBackend"
    trains: ClassVar[bool] = True
    weight_methods: ClassVar[tuple[str, ...]] = ("auto", "tensors")
    unsupported_sampling: ClassVar[tuple[str, ...]] = CONSTRAINTS
    reports_experts: ClassVar[bool] = True

    kind: Literal["local"] = "local"
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on a CPU, bfloat16 on a GPU. In 16 bits log-probs differ from a recomputation, by up to 0.5."""
    deterministic: bool = False
    """A reply's ids and log-probs are bit-identical in any batch, and after a restart. About half as fast
    in full batches. The start checks it for the model and device, and fails if logits depend on the batch."""
    max_batch: int = Field(default=32, ge=1)
    """Maximum number of sequences in one forward pass."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for torch. Default: torch's choice."""
    routed_experts: bool = False
    """Keep the experts that a mixture-of-experts model chose for each token, in rows too; `engine train` then uses the same experts."""

    @property
    def asks_experts(self) -> bool:
        return self.routed_experts

    @property
    def half_precision(self) -> str | None:
        return self.dtype if self.dtype in ("bfloat16", "float16") else None


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
        LocalBackendSpec,
        SGLangBackendSpec,
        ScriptedBackendSpec,
    ),
)
BackendSpec = Annotated[BackendBase, _KINDS]
"""A backend of any kind; the discriminator is `kind`."""


def backend_classes() -> tuple[type[BackendBase], ...]:
    """The config class of every kind, those of plugins after the core's."""
    return _KINDS.members()


def kinds_that_train() -> str:
    """The kinds of backends that take new weights, as text: `` `local` or `sglang` ``."""
    return " or ".join(f"`{declared.kind_name()}`" for declared in backend_classes() if declared.trains)
