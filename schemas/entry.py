"""Code that a spec names: its entry point, what a crash may do with its calls, and where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from engine.schemas.base import Bytes, Contract, Seconds
from engine.schemas.open_union import NameOf

Effects = Literal["pure", "replayable", "external"]
"""What a crash may do with a call that was made already.

`pure`: nothing; its recorded answer is enough. `replayable`: it is called again to rebuild its state,
and must answer the same. `external`: it cannot be called again, so the episode starts anew.
"""


class Entry(Contract):
    """An object of your own, by entry point."""

    use: str = Field(min_length=1)
    """`package.module:Name`, or a name that an installed package offers."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """Keyword arguments for its constructor."""


IsolationMode = Annotated[str, NameOf(point="isolation_modes", core=("thread",))]
"""Where code runs: `thread` is the core's, others are plugins'."""


class IsolationSpec(Contract):
    """Where code of the spec runs, and its limits there. The default of each key is the value of the spec's `isolation`."""

    PLUGIN_NAMES: ClassVar[Mapping[str, str]] = {"mode": "isolation_modes"}

    mode: IsolationMode | None = None
    """`thread`: in the engine's process. `process`: each object in a worker process, which is killed at a deadline."""
    memory: Bytes | None = None
    """Maximum memory of one worker process. Default: 4GB."""
    cpu: Seconds | None = None
    """Maximum CPU time of one call. Default: only its deadline."""
    output: Bytes | None = None
    """Maximum bytes that one call may print, and maximum bytes of its answer. Default: 16MB."""
    processes: int | None = Field(default=None, ge=1)
    """Maximum number of processes and threads of one worker, including itself. Default: 256 if the engine runs as root, else no limit."""
    workers: int | None = Field(default=None, ge=1)
    """Maximum number of worker processes at once; further calls wait. Default: 64 for functions, one per object of a running episode."""
    user: str | None = Field(default=None, min_length=1)
    """The system user of the workers, where the engine runs as root; `engine` is the engine's own. Left out: an
    unprivileged uid for each worker."""

    @property
    def limits(self) -> dict[str, int | float | str]:
        """What is set beside `mode`."""
        values = {name: getattr(self, name) for name in type(self).model_fields if name != "mode"}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, default: IsolationSpec | None) -> IsolationSpec:
        """This one, with what it leaves out taken from `default`."""
        if default is None or self.mode == "thread":
            return self
        missing = [name for name in type(self).model_fields if getattr(self, name) is None]
        return self.model_copy(update={name: getattr(default, name) for name in missing})

    @model_validator(mode="before")
    @classmethod
    def _by_mode(cls, value: Any) -> Any:
        return {"mode": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _limits_bind(self) -> IsolationSpec:
        if self.mode == "thread" and self.limits:
            named = " and ".join(f"`{name}`" for name in self.limits)
            raise ValueError(f"{named} cannot limit code in a thread of the engine's process; write `mode: process`")
        return self
