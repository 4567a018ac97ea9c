"""NotifySpec: the `notify:` section of a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from pydantic import Field

from engine.schemas.base import Contract, Seconds
from engine.schemas.sections import SpecSection

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.spec.added import SpecFacts

NoticeKind = Literal["failed", "stalled", "diverged", "no_signal", "finished", "budget"]
"""The events that can send a notice."""


class NoticeBudget(Contract):
    """Amounts after which a notice of kind `budget` is sent, once per launch. Nothing is stopped."""

    tokens: int | None = Field(default=None, ge=1)
    """Tokens that the policy sampled since the launch of the command."""
    time: Seconds | None = None
    """Time since the launch of the command."""


class NotifySpec(SpecSection):
    """Notices of `engine run`, `engine eval` and `engine train`: where they go, and which events send one."""

    RENAMED: ClassVar[Mapping[str, str]] = {"stall": "stall_timeout"}

    webhook_env: str | None = None
    """Name of the environment variable that holds a URL. Notices are POSTed to it as JSON (`text` and the event's
    fields)."""
    services_env: list[str] = Field(default_factory=list)
    """Names of environment variables that each hold the apprise URL of a service: Slack, Discord, Feishu, DingTalk
    (signed), e-mail and others (extra `notify`)."""
    command: list[str] | None = None
    """A command that reads the notice as JSON from its standard input."""
    use: str | None = None
    """A function, as `package.module:function(event: dict)`."""
    on: list[NoticeKind] = Field(default_factory=lambda: list(get_args(NoticeKind)))
    """The events that send a notice."""
    stall_timeout: Seconds = 1800.0
    """A run is stalled after this time without a sampled reply or a finished episode, a training after this time
    without a finished episode or step."""
    repeat_after: Seconds = 3600.0
    """A notice that differs from an earlier one of the same run only in numbers is sent again only after this time,
    also by a resumed run."""
    budget: NoticeBudget | None = None
    """Amounts after which a notice of kind `budget` is sent."""

    @property
    def has_channel(self) -> bool:
        """Whether notices go anywhere."""
        return bool(self.webhook_env or self.services_env or self.command is not None or self.use)


def facts(spec: EpisodeSpec) -> SpecFacts:
    """The hook `spec_facts`."""
    from engine.spec.added import Called, SpecFacts  # imports the schemas, which are built with this section

    use, path = NotifySpec.or_default(spec).use, ("notify", "use")
    if not use:
        return SpecFacts()
    return SpecFacts(called=(Called(use=use, arguments=("event",), with_={}, path=path, path_with=("notify", "with")),))
