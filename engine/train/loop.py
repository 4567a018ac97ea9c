"""What every training has: checkpoints, metrics, evaluations, notices, and the last finite state that is saved at its end.

Invariants:
- Whenever a training ends, by an error, a divergence, a signal or a lost server, the weights after the last update are
  in a checkpoint, and an error's message names it. Before the first update there is nothing to save.
- Each finished step gets one line of `metrics.jsonl`. A resumed training writes the lines that are missing after a kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from engine.drivers.session import of_driver
from engine.errors import EngineError
from engine.runner.observers import TrainingObservers
from engine.train.batch_log import BatchLog, BatchRecord
from engine.train.checkpoint import Checkpoints, State
from engine.train.distributed import ProcessGroup, SingleProcessGroup
from engine.train.evaluation import Evaluator
from engine.train.metrics import MetricsLog, read_metrics
from engine.train.setup import train_spec_of
from engine.train.stopping import unless_stopped

if TYPE_CHECKING:
    from engine.actions.services import Cost
    from engine.backends.backend import Backend
    from engine.runner.stats import RunCounters
    from engine.spec.load import LoadedSpec
    from engine.store.rows.row import TrainingRow
    from engine.store.upkeep.compact import Compacted
    from engine.tokens.template import ChatTemplate
    from engine.train.learner import Learner
    from engine.train.sync import WeightSync

log = structlog.get_logger(__name__)

StepCallback = Callable[[int, Mapping[str, float]], None]
"""Called after each finished step with its number, from 1 (0: evaluation before the first step), and its metrics."""


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
    """A complete model beside the checkpoints, with the adapter merged in: after a training on written episodes with LoRA."""
    best: float | None = None
    best_step: int | None = None
    interrupted: bool = False
    faults: list[str] = field(default_factory=list)
    repeated_steps: int = 0
    """Steps that this launch repeated from stored episodes, because they came after the checkpoint that it resumed from."""
    resumed: Counter[str] = field(default_factory=Counter)
    """Totals of this launch of the metrics `rollout/…`: episodes that continued, tokens sampled again, groups dropped."""
    disk: Compacted | None = None
    """With `rollout.keep`, unless it was interrupted: what was dropped at the end, and the size of the run store."""
    missing_signal: str = ""
    """How many steps of this launch had no learning signal, and why; empty if few or none."""
    cost: Cost | None = None
    """What the training has cost, resumes included; None where no costs are counted."""


class TrainingLoop(ABC):
    """One training, new or resumed.

    Args:
        loaded: The spec.
        folder: The folder of the training, made by `folder.begin`.
        on_step: Called after each step.
        phase: Called at the start of each phase: `rollout`, `update`, `sync`, `eval`, `checkpoint`, `compact`.
        watch: Called with the counters of its episodes when they exist, for a live display.
        keep_going: Do not stop if the first episodes all fail with one cause.
        process_group: The processes of the training. This is process 0; the others run `setup.follow`.
    """

    def __init__(
        self,
        loaded: LoadedSpec,
        folder: Path,
        *,
        process_group: ProcessGroup | None = None,
        on_step: StepCallback | None = None,
        phase: Callable[[str], None] | None = None,
        watch: Callable[[RunCounters], None] | None = None,
        keep_going: bool = False,
    ) -> None:
        self.loaded = loaded
        self.spec = loaded.spec
        self.train = train_spec_of(loaded)
        self.folder = folder
        self._process_group = process_group or SingleProcessGroup()
        self._on_step = on_step
        self._phase = phase
        self._watch = watch
        self._keep_going = keep_going
        self._state = State()
        self._checkpoints = Checkpoints(folder, self.train.checkpoints.keep)
        self._newest_checkpoint: Path | None = None
        self._batch_log = BatchLog(folder)
        # evaluations run in this process, also those of a training with several drivers
        alone = of_driver(loaded, 1, 0) if loaded.spec.rollout.drivers > 1 else loaded
        self._evaluator = Evaluator(alone, folder, self.train, keep_going=keep_going)
        self._weights_known = True
        """Whether the learner's weights are those after the updates that `_state` counts."""
        self._seconds: dict[str, float] = {}
        self._pushed: dict[str, float] = {}
        """Metrics of the step's push of weights."""
        self._observers = TrainingObservers(loaded, folder)
        self._format: ChatTemplate
        self._backend: Backend
        self._learner: Learner
        self._sync: WeightSync
        self._metrics: MetricsLog

    async def run(self, *, stop: asyncio.Event | None = None) -> TrainResult:
        """Train to the last step, or until `stop` is set. Then a checkpoint is written; running episodes stay in the store.

        Raises:
            TrainError: kind `train_setup`: the training cannot start; `diverged`; `no_data`: there is nothing to train on.
            EngineError: the backend, the store or the evaluation failed.
        """
        try:
            with self._observers.watch(lambda: self._state.step, lambda: self._sampled_tokens()):
                result = await self._run_prepared(stop)
            if not result.interrupted:
                await self._observers.ended(result.steps, result.last)
            return result
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await self._observers.failed(error, self._state.step)
            raise
        finally:
            self._observers.close()

    @abstractmethod
    async def _run_prepared(self, stop: asyncio.Event | None) -> TrainResult:
        """Open what the training needs, and train."""

    @property
    def _cost(self) -> Cost | None:
        """What the training has cost, evaluations included; None where no costs are counted."""
        return self._evaluator.cost

    def _sampled_tokens(self) -> int:
        """Return the number of tokens that were sampled since the launch."""
        return 0

    # --- beginning and end ----------------------------------------------------------------------------------

    async def _open_state(self) -> None:
        """Load the newest checkpoint, or seed torch, and open the metrics."""
        resumed = self._checkpoints.newest()
        if resumed is None:
            torch.manual_seed(self.train.seed)
        else:
            self._state = await asyncio.to_thread(self._checkpoints.read, resumed, self._learner)
            self._newest_checkpoint = resumed
        self._metrics = MetricsLog(self.folder)
        try:
            self._observers.began()
        except BaseException:
            self._metrics.close()
            raise

    def _continue_metrics(self) -> None:
        """Remove metrics after the step from which the training goes on."""
        self._metrics.truncate(self._state.step)
        self._observers.continued(self._state.step)

    @contextlib.asynccontextmanager
    async def _saving(self, result: TrainResult) -> AsyncIterator[None]:
        """Save the last finite state at the end and on errors, and complete the result."""
        try:
            yield
        except Exception as error:
            await self._save_after(error)
            raise
        await self._checkpoint_if_trained()
        state = self._state
        result.steps, result.checkpoint = state.step, self._newest_checkpoint
        result.best, result.best_step = state.best, state.best_step
        result.cost = self._cost

    def _repeated_step(self) -> None:
        """After a repeated step: write the checkpoint that is due, so that repeated kills do not repeat the same steps."""
        if self._state.step % self.train.checkpoints.every == 0:
            self._newest_checkpoint = self._checkpoints.write(self._state, self._learner)

    async def _write_missing_lines(self, records: Sequence[BatchRecord], stop: asyncio.Event | None) -> None:
        """Write the metrics of finished steps that have no line yet, because an earlier launch ended before it wrote them."""
        written = {int(line["step"]): line for line in read_metrics(self.folder)}
        for step in sorted(written.keys() - {0}):
            self._evaluator.note(
                self._state, step, written[step]
            )  # from repeated steps, whose checkpoints do not have it
        if self._state.step == 0 and 0 not in written and self.train.eval is not None:
            values = await unless_stopped(stop, self._evaluate())
            if values is not None:
                self._write_line(0, values)
        for record in records:
            if not record.step_made or record.step in written:
                continue
            values = {name: math.nan if value is None else value for name, value in record.metrics.items()}
            if record.step == self._state.step and self._evaluator.due(record.step):
                found = await unless_stopped(stop, self._evaluate())
                if found is None:
                    return
                values |= found
                if self._evaluator.note(self._state, record.step, found):
                    await self._checkpoint()
            self._write_line(record.step, values)

    async def _save_after(self, error: Exception) -> None:
        """Save the last finite state after an error, and name the checkpoint in the error's message."""
        try:
            if self._weights_known:
                await self._checkpoint_if_trained()
        except EngineError as failed:
            log.warning("the last state could not be saved", reason=str(failed))
        if self._newest_checkpoint is not None:
            words = f"The last saved state is {self._newest_checkpoint}"
        else:
            words = f"No step was finished, so there is no checkpoint{self._kept}"
        if error.args and isinstance(error.args[0], str):
            error.args = (f"{error.args[0]}\n{words}", *error.args[1:])

    _kept = ""
    """What a training without a checkpoint has kept, as the end of a sentence."""

    # --- parts of a step ------------------------------------------------------------------------------------

    async def _learn(self, rows: Sequence[TrainingRow]) -> dict[str, float]:
        """Run the updates of a batch in a thread, so that other work can continue meanwhile."""
        self._weights_known = False
        with self._timed("update"):
            work = asyncio.ensure_future(asyncio.to_thread(self._learner.step, rows, self._state.step))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                with contextlib.suppress(Exception):  # a thread cannot be stopped in the middle of an update
                    await work
                raise

    async def _push_weights(self) -> None:
        """Send the current weights to the backend."""
        pushed = await self._sync.push(self._learner.policy, self._state.version)
        self._pushed = pushed.metrics()

    async def _evaluate(self) -> dict[str, float]:
        """Evaluate the current policy. Returns the metrics of the evaluation."""
        with self._timed("eval"):
            return await self._evaluator.evaluate(self._state.step, self._format, self._backend)

    async def _checkpoint(self) -> None:
        with self._timed("checkpoint"):
            self._newest_checkpoint = await asyncio.to_thread(self._checkpoints.write, self._state, self._learner)

    async def _checkpoint_if_trained(self) -> None:
        """Write a checkpoint, unless the weights are still those of the spec's model."""
        if self._state.step:
            await self._checkpoint()

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        if self._phase is not None:
            self._phase(phase)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - began

    def _write_line(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a step and report them."""
        self._metrics.write(step, values)
        self._observers.stepped(step, values)
        if self._on_step is not None:
            self._on_step(step, values)
