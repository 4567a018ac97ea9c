"""The key `train.eval`: evaluations during a training, and what it means for other parts of a spec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from engine.schemas.base import Contract
from engine.schemas.sections import SpecSection
from engine.spec.added import SpecFacts

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec


class EvalSetSpec(Contract):
    """One of several evaluations during training. Keys that are not set are those of `eval`."""

    tasks: dict[str, Any]
    """Tasks of the evaluation, in the form of the spec's `tasks`."""
    every: int | None = Field(default=None, ge=1)
    """Steps between evaluations."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first `limit` tasks."""
    samples: int | None = Field(default=None, ge=1)
    """Episodes per task."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the spec's `sampling`, in addition to those of `eval`."""


class TrainEvalSpec(SpecSection):
    """Evaluation during training: the same environment and users, with other tasks if `tasks` or `sets` is set."""

    NULLABLE: ClassVar[bool] = True

    every: int = Field(default=10, ge=1)
    """Steps between evaluations. There is also one before the first step and one after the last step."""
    tasks: dict[str, Any] | None = None
    """Tasks of the evaluation, in the form of the spec's `tasks`. Default: the training tasks."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first `limit` tasks."""
    samples: int = Field(default=1, ge=1)
    """Episodes per task."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the spec's `sampling`, such as `temperature: 0`."""
    metric: str = "reward"
    """The metric of `engine eval` that selects the best checkpoint, such as `success`, `reward`, `pass@4`."""
    sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")], EvalSetSpec] = Field(default_factory=dict)
    """Several evaluations instead of one, by name. The metrics are `eval/<name>/<measure>`."""
    best: str | None = None
    """With `sets`: the set whose `metric` selects the best checkpoint. Default: the first."""

    @model_validator(mode="after")
    def _sets(self) -> Self:
        if self.sets and self.tasks is not None:
            raise ValueError("`tasks` has no effect beside `sets`; make it one of the sets")
        if self.best is not None and self.best not in self.sets:
            raise ValueError(f"`best: {self.best}` is none of the sets: {', '.join(self.sets) or 'there are none'}")
        return self

    def by_name(self) -> dict[str, TrainEvalSpec]:
        """The evaluations by name, with all of their keys. Without `sets` there is one, and its name is empty."""
        if not self.sets:
            return {"": self}
        return {
            name: self.model_copy(
                update={
                    "tasks": one.tasks,
                    "every": one.every or self.every,
                    "limit": one.limit if one.limit is not None else self.limit,
                    "samples": one.samples or self.samples,
                    "sampling": {**self.sampling, **one.sampling},
                    "sets": {},
                    "best": None,
                }
            )
            for name, one in self.sets.items()
        }

    @property
    def best_metric(self) -> str:
        """Name in `metrics.jsonl` of the metric that selects the best checkpoint."""
        name = self.best or next(iter(self.sets), None)
        return f"eval/{self.metric}" if name is None else f"eval/{name}/{self.metric}"


def powers(most: int) -> list[int]:
    """The k of `pass@k` that are measured: the powers of two below `most` episodes of a task, and `most` itself."""
    return sorted({*(2**power for power in range(min(most.bit_length(), 64))), most} - {0})


def facts(spec: EpisodeSpec) -> SpecFacts:
    """The hook `spec_facts`."""
    section = None if spec.train is None else TrainEvalSpec.section_of(spec.train)
    if section is None:
        return SpecFacts()
    tasks = [one.tasks for one in section.by_name().values() if one.tasks is not None]
    return SpecFacts(samples_weights=True, tasks=tuple(tasks))
