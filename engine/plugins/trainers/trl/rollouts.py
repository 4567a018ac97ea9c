"""Runs the episodes of TRL's batches: the `rollout_func` of a GRPOTrainer.

Each call gets the task ids of one generation batch and runs `num_generations` episodes of each task, with the trainer's
present weights: the engine's local sampler runs over the trainer's own model. No weight is copied. The trainer and the
sampler use the model in turn: `lent` switches it to the sampler's attention and to evaluation mode, and switches back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from engine.errors import TrainError
from engine.plugins.local.backend import LocalBackend
from engine.plugins.local.kv import ATTENTION
from engine.plugins.local.load import BatchedModel, stash_budget
from engine.plugins.local.rows import RowTable
from engine.plugins.local.spec import LocalBackendSpec
from engine.plugins.local.vision import VisionModel
from engine.plugins.trainers.handover import BatchSums, HandedRow, SeveralRows, groups_of, one_row_each
from engine.plugins.trainers.rollouts import TrainerRollouts
from engine.spec.load import LoadedSpec, load_spec

if TYPE_CHECKING:
    from engine.plugins.local.spec import LocalBackendSpec
    from engine.tokens.vision import Vision


class _SharedModel(BatchedModel):
    """A model that the trainer has loaded."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        self._given = model
        super().__init__(*args, **kwargs)

    def _open(self, folder: Path) -> Any:
        return self._given


class _SharedVisionModel(_SharedModel, VisionModel):
    """The same with a vision tower."""


class SharedBackend(LocalBackend):
    """The local backend over a model that a trainer updates in place.

    Requests are valid only inside `lent`, and after `weights_changed` if the weights have changed since the last one.
    """

    def __init__(
        self,
        model: Any,
        folder: Path,
        decode: Callable[[Sequence[int]], str],
        spec: LocalBackendSpec,
        *,
        vocab: int | None,
        context: int | None,
        vision: Vision | None,
    ) -> None:
        """`model`: the trainer's, without wrappers, loaded from `folder`; its device and precision are used. The
        others: as `LocalBackend`."""
        super().__init__(lambda: folder, decode, spec, vocab=vocab, context=context, vision=vision)
        self.model = model

    def _load(self, folder: Path) -> tuple[BatchedModel, RowTable]:
        if self._spec.threads is not None:
            torch.set_num_threads(self._spec.threads)
        first = next(self.model.parameters())
        rows, repeatable = self._spec.max_batch, self._spec.deterministic
        packed: BatchedModel
        if self._vision is None:
            packed = _SharedModel(self.model, folder, first.device, first.dtype, rows, repeatable=repeatable)
        else:
            packed = _SharedVisionModel(
                self.model, folder, first.device, first.dtype, rows, vision=self._vision, repeatable=repeatable
            )
        return packed, RowTable(packed.store, rows, stash_budget(first.device), reuse=packed.reuses_prefixes)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside the block the model belongs to the sampler."""
        model = self.model
        text = model.config.get_text_config()
        before = text._attn_implementation
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        if self._worker is not None:  # `start` sets it after its check of the model
            self._attend(ATTENTION)
        try:
            yield
        finally:
            self._attend(before)
            for module, training in modes:
                module.training = training

    def _attend(self, name: str) -> None:
        self.model.set_attn_implementation(name if self._vision is None else {"text_config": name})

    async def weights_changed(self, version: int) -> None:
        """Drop what was computed with older weights. Tokens sampled from now on carry this version."""
        worker = self._started()

        def forget() -> None:
            worker.table.clear()
            worker.version = version

        await worker.call(forget)


class EngineRollouts:
    """The episodes of a spec for a trainer in this process. Close it after the training, or use it as a context
    manager.

    >>> with EngineRollouts("spec.yaml", "runs/with-trl") as rollouts:
    ...     EngineGRPOTrainer(rollouts, args).train()

    Args:
        spec: The spec, or the path of its file. Its backend must be `local`: the sampler uses the trainer's own model.
        folder: The folder of the training; the run store is `rollouts` in it.
        keep_going: Do not stop if the first episodes all fail with one cause.
        several_rows: What happens to an episode with several rows, since TRL takes one for each prompt. `refuse`: the
            training stops.
            `leave_out`: its tokens are not trained; `trl/left_out_tokens` counts them. Its rewards stay in the baseline
            of its group.

    Raises:
        SpecError: the spec is invalid.
        TrainError: kind `train_setup`: the spec uses something that does not reach TRL's loss.
    """

    def __init__(
        self,
        spec: LoadedSpec | Path | str,
        folder: Path | str,
        *,
        keep_going: bool = False,
        several_rows: SeveralRows = "refuse",
    ) -> None:
        self.loaded = spec if isinstance(spec, LoadedSpec) else load_spec(spec)
        self._several_rows = several_rows
        backend = self.loaded.spec.backend
        if not isinstance(backend, LocalBackendSpec):
            raise TrainError(
                f"{self.loaded.path}: a `{backend.kind}` backend does not sample with TRL's model; use "
                "`backend: {kind: local}`",
                kind="train_setup",
            )
        self._backend_spec = backend
        self._episodes = TrainerRollouts(self.loaded, folder, "trl", keep_going=keep_going)
        self.folder = self._episodes.folder
        self.model_folder = self._episodes.model_folder
        self.format = self._episodes.format
        self.tasks = self._episodes.tasks
        """The ids of the tasks, in order."""
        self._backend: SharedBackend | None = None
        self.handed: list[HandedRow] = []
        """The rows of the newest call, one for each prompt."""
        self.sums = BatchSums(0, 0, 0.0)
        """Their sums; that of the images is the trainer's."""
        self.version = -1
        """The weight version of the newest call: the number of TRL's updates before it."""
        self.metrics: dict[str, float] = {}
        """Metrics of the newest call, under the names of `engine train`."""

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """Run the episodes of a generation batch. TRL calls this as `rollout_func`.

        Args:
            prompts: Task ids, each repeated `num_generations` times in a row.
            trainer: The trainer; its model samples.

        Raises:
            TrainError: kind `train_setup`: the prompts are not groups of this spec's tasks, or the model was exchanged;
                kind `handover`: an episode has several rows; kind `no_data`: no episode can be trained on.
            EngineError: as `Runner.episode`.
        """
        samples: int = trainer.num_generations
        model = trainer.accelerator.unwrap_model(trainer.model)
        if (backend := self._backend) is None:
            backend = SharedBackend(
                model,
                self.model_folder,
                self.format.decode,
                self._backend_spec,
                vocab=self.format.vocab_size,
                context=self._episodes.context,
                vision=self.format.vision,
            )
        if model is not backend.model:
            raise TrainError("the trainer has another model than at its first batch", kind="train_setup")
        self.version = trainer.state.global_step
        groups = groups_of(prompts, samples, "make `generation_batch_size` a multiple of `num_generations`")
        loop = self._episodes.loop
        with backend.lent():
            if self._backend is None:
                loop.call(self._episodes.start(backend))
                self._backend = backend
            loop.call(backend.weights_changed(self.version))
            batch = loop.call(self._episodes.batch(groups, samples, self.version))
        self.metrics = batch.metrics(tuple(self.loaded.spec.tasks.mix or ()))
        ended = {
            (group.number, trajectory.sample_index): trajectory
            for group in (*batch.used, *batch.left_out)
            for trajectory in group.trajectories
        }
        self.handed, empty, left_out = one_row_each(
            self._episodes.final_rows(batch),
            len(groups),
            samples,
            trainer="TRL",
            several=self._several_rows,
            leave_out='EngineRollouts(…, several_rows="leave_out")',
        )
        self.metrics |= {"trl/left_out_tokens": float(left_out), "trl/empty_rows": float(empty)}
        self.sums = BatchSums.of_rows(self.handed)
        slots = [ended.get((number, sample)) for number in range(len(groups)) for sample in range(samples)]
        return {
            "prompt_ids": [row.prompt_ids for row in self.handed],
            "completion_ids": [row.completion_ids for row in self.handed],
            "logprobs": [row.logprobs for row in self.handed],
            "env_mask": [row.mask for row in self.handed],
            "engine_reward": [None if trajectory is None else trajectory.outcome.reward for trajectory in slots],
        }

    def mean_length(self) -> float:
        """The mean number of trained tokens of an episode in the training's first batch, which the folder keeps for
        later launches.

        Raises:
            OSError, ValueError: the folder's file cannot be read or written.
        """
        file = self.folder / "loss_length.json"
        if not file.exists():
            counts = [sum(row.mask) for row in self.handed]
            trained = [count for count in counts if count]
            file.write_text(json.dumps(sum(trained) / max(len(trained), 1)), encoding="utf-8")
        return float(json.loads(file.read_text(encoding="utf-8")))

    def close(self) -> None:
        """Close the run store and the services of the episodes. Later calls do nothing."""
        self._episodes.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
