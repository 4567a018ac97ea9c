"""Where the rows of a training's steps come from, and what measures its weights after some of them.

The same steps are made again from their records after a kill. A plugin adds a source with a `TrainKind`
(`schemas/train.py`), whose `use` names a subclass of `StepSource`, and an evaluator, which changes no weight and no
row, by the hook `evaluate_training`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from engine.plugin import Hook
from engine.schemas.base import Struct

if TYPE_CHECKING:
    from pathlib import Path

    from engine.actions.services import Cost
    from engine.errors import TrainError
    from engine.schemas.train import TrainSpec
    from engine.spec.load import LoadedSpec
    from engine.store.rows.row import TrainingRow
    from engine.train.batch_log import BatchRecord
    from engine.train.trainer import Trainer


@dataclass(slots=True)
class TrainResult:
    """The result of a training."""

    steps: int
    """Number of finished steps, including those of earlier launches."""
    first: dict[str, float] = field(default_factory=dict)
    """Metrics of the first step of this launch."""
    last: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step."""
    checkpoint: Path | None = None
    model: Path | None = None
    """A complete model beside the checkpoints, with the adapter merged in: after a training on written episodes with
    LoRA."""
    best: float | None = None
    best_step: int | None = None
    interrupted: bool = False
    faults: list[str] = field(default_factory=list)
    repeated_steps: int = 0
    """Steps that this launch repeated from stored episodes, because they came after the checkpoint that it resumed
    from."""
    resumed: Counter[str] = field(default_factory=Counter)
    """Totals of this launch of the metrics `rollout/…`: episodes that continued, tokens sampled again, groups
    dropped."""
    cost: Cost | None = None
    """What the training has cost, resumes included; None where no costs are counted."""


class StepBatch(Struct, frozen=True, kw_only=True, eq=False):
    """What a source gives for one step."""

    rows: Sequence[TrainingRow]
    metrics: Mapping[str, float]
    """Metrics that are known before the update."""
    record: BatchRecord
    """What the rows are made from; the trainer adds the step, its updates and its metrics."""
    tokens: float
    """What the metric `tokens_per_second` counts."""
    lacking: TrainError | None = None
    """Without rows: the error that ends the training; None: the step is made without an update."""
    update_metrics: Collection[str] | None = None
    """The metrics of an update that have a meaning; None: all."""


@dataclass(eq=False)
class StepSource(ABC):
    """Where the rows of a training's steps come from. `train.kind` names its class (`schemas/train.py`)."""

    remains: ClassVar[str] = ""
    """What a training without a checkpoint has kept, as the end of a sentence."""

    _trainer: Trainer

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that were sampled since the launch."""
        return 0

    @property
    def cost(self) -> Cost | None:
        """What sampling has cost, resumes included; None where no costs are counted."""
        return None

    @classmethod
    @abstractmethod
    def steps_of(cls, loaded: LoadedSpec, train: TrainSpec, epochs: float) -> float:
        """The number of steps of `epochs` passes over the data."""

    @abstractmethod
    async def prepare(self) -> None:
        """Read what does not need the model. Raises: EngineError: the training cannot start."""

    @abstractmethod
    def opened(self, result: TrainResult) -> AbstractAsyncContextManager[None]:
        """Be ready inside the block, after the newest checkpoint has been read; complete the result when it ends
        without an error."""

    @abstractmethod
    def rows_of(self, record: BatchRecord) -> list[TrainingRow] | None:
        """The rows of a recorded step; None if one of them is gone."""

    async def begin(self, records: Sequence[BatchRecord]) -> None:  # noqa: B027
        """`batch` follows. The steps of the records, all that the training has, are made; the backend has the weights
        after them."""

    @abstractmethod
    async def batch(self) -> StepBatch:
        """The batch of the next step."""

    async def trained(self, version: int) -> None:  # noqa: B027
        """The newest batch was trained on, and the backend samples with weights of `version` from now on."""

    async def drain(self) -> None:  # noqa: B027
        """Wait until all episodes that run have ended by themselves, so that no reply under way is lost."""

    async def close(self) -> None:  # noqa: B027
        """No more batches are needed: end what runs."""


class Evaluator:
    """Measures nothing. A plugin has a subclass."""

    cost: Cost | None = None
    """What the training has cost; None before the first evaluation, and where no costs are counted."""

    def due(self, step: int) -> bool:
        """Whether the weights after a step are evaluated. Step 0: those before the first one."""
        return False

    async def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the weights that the backend has, which are those after `step`. Raises: EngineError: the
        evaluation failed."""
        return {}

    def note(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the evaluation in a step's metrics, if there is one, is the best so far. Then the training's state
        has it."""
        return False


EVALUATE_TRAINING: Hook[Callable[[Trainer], Evaluator | None]] = Hook("evaluate_training")
"""Makes the evaluator of a training, which is not opened yet; None if its spec asks for none."""
