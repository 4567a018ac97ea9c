"""The learner: trains a policy on batches of rows, split into mini-batches and micro-batches.

Invariants:
- The gradient of a step does not depend on how its rows are split into micro-batches: the loss weight of every token is
  computed before the first micro-batch.
- The learner adds columns to rows and rewrites none.
- An update whose loss or gradient norm is not finite is not applied, neither to the policy nor to another objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace
from safetensors import SafetensorError

from engine.errors import TrainError
from engine.train.auxiliary import AuxiliaryObjective
from engine.train.distributed import ProcessGroup
from engine.train.files import write_tensors
from engine.train.loss_columns import LossColumns, mean_length_of, minibatches, weighted_parts, whitened_advantages
from engine.train.loss_tokens import LossTokens
from engine.train.losses import objective
from engine.train.metric_sums import MetricSums, mean_metrics
from engine.train.optimizers import MasterWeights, learning_rate, make_optimizer, set_rate, update
from engine.train.packing import Pack, pack_rows
from engine.train.state_parts import StatePart, load_optimizer, optimizer_tensors

if TYPE_CHECKING:
    from engine.schemas.train import TrainSpec
    from engine.store.rows.row import Floats, TrainingRow
    from engine.tokens.image_bank import SentImages
    from engine.train.policy import Policy


class Learner:
    """A policy and its optimizer. Each process of a training has one; that of process 0 calls the others.

    Args:
        objectives: What is computed and trained beside the policy.
    """

    def __init__(
        self,
        policy: Policy,
        spec: TrainSpec,
        *,
        process_group: ProcessGroup | None = None,
        objectives: Sequence[AuxiliaryObjective] = (),
    ) -> None:
        self.objectives = objectives
        self.policy = policy
        self.process_group = process_group or ProcessGroup()
        self._offload = spec.memory.offload == "optimizer"
        # Before the optimizer is made: sharding replaces the parameters.
        policy.shard(offload=spec.memory.offload == "all")
        for other in self.objectives:
            other.shard(offload=spec.memory.offload == "all")
        self._spec = spec
        self._length: float | None = spec.loss.constant_length
        """The constant of `dr_grpo`. None: it is measured in the first step that makes an update."""
        self._masters = MasterWeights(dict(policy.named_parameters()))
        self._parameters = list(self._masters.named.values())
        """What the optimizer updates, and what has the gradients."""
        self.optimizer = make_optimizer(self._parameters, spec.optimizer)
        self.rate = spec.optimizer.lr
        """The learning rate of the current batch (or the last one)."""
        self.updates = 0
        """Number of updates that the current batch (or the last one) has made."""

    # --- a step -----------------------------------------------------------------------------------------------

    def step(
        self,
        rows: Sequence[TrainingRow],
        step: int,
        rate: float | None = None,
        most_updates: int | None = None,
        images: SentImages | None = None,
    ) -> dict[str, float]:
        """Train on one batch, in all processes. Returns metrics: means over the updates, maxima for names that end in
        `max`.

        Args:
            rows: The training rows of the batch.
            step: The batch's number, from 0. It sets the learning rate and the order of mini-batches.
            rate: The learning rate. Default: that of the schedule.
            most_updates: Stop after this number of updates: a step that failed after them is done again.
            images: In other processes than 0: the images of the rows. Each makes the tensors of those that it trains.

        Raises:
            TrainError: kind `diverged`: the loss or the gradient norm is not finite.
        """
        vision, spec = self.policy.net.vision, self._spec
        if vision is not None and self.process_group.size > 1:
            if self.process_group.main:
                images = vision.bank.sent(image.image for row in rows for image in row.branch.images)
            elif images is not None:
                vision.bank.receive(images)
        self.process_group.call_others("step", rows, step, rate, most_updates, images)
        self.updates = 0
        columns, metrics = self._columns(rows, step)
        length = self._length
        if length is None:
            length = mean_length_of(columns)
        rate = self.rate = learning_rate(spec, step) if rate is None else rate
        set_rate(self.optimizer, rate)
        holds = any(other.holds_policy(step) for other in self.objectives)
        epochs = [(other, spec.update_epochs if other.epochs is None else other.epochs) for other in self.objectives]
        for number in range(max(spec.update_epochs, *(count for _, count in epochs), 0)):
            parts = minibatches(columns, spec.minibatches, seed=(spec.seed, step, number))
            for part in weighted_parts(spec.loss, parts, length):
                if self.updates == most_updates:
                    break
                others = [other for other, count in epochs if number < count]
                metrics.append(self._update(part, others, policy=number < spec.update_epochs, holds_policy=holds))
                self._length = length  # only now: a step without an update is not made, and leaves nothing
        if spec.loss.denominator == "constant_length" and spec.loss.constant_length is None and length is not None:
            metrics.append({"loss/length": length})
        return mean_metrics(metrics) | {"lr": rate, "updates": float(self.updates)}

    # --- columns ----------------------------------------------------------------------------------------------

    def _columns(self, rows: Sequence[TrainingRow], step: int) -> tuple[list[LossColumns], list[dict[str, float]]]:
        """The columns of a batch before its first update, all but the loss weights, and metrics of them."""
        columns: Sequence[LossColumns] = [LossColumns.of(row) for row in rows]
        metrics: list[dict[str, float]] = []
        for other in self.objectives:
            columns, of_objective = other.columns(columns, self, step)
            metrics.append(dict(of_objective))
        if self._spec.advantage_norm == "batch":
            advantages = whitened_advantages([of_row.advantages for of_row in columns])
            columns = [replace(of_row, advantages=values) for of_row, values in zip(columns, advantages, strict=True)]
        recomputes = self._spec.proximal_logprobs == "recompute"
        if self._spec.proximal_logprobs == "auto":
            recomputes = self._spec.update_epochs * self._spec.minibatches > 1
        if recomputes:
            logprobs = self.per_token(columns, lambda pack: self.policy.forward(pack, entropy=False)[0])
            columns = [replace(of_row, proximal=values) for of_row, values in zip(columns, logprobs, strict=True)]
        return list(columns), metrics

    @torch.no_grad()
    def per_token(self, rows: Sequence[LossColumns], compute: Callable[[Pack], torch.Tensor]) -> list[Floats]:
        """Compute one number for each trained token in all processes, without a graph: for each row, float32 [n].

        `compute` gives the numbers of a pack, in the order of its labels.
        """
        by_row = [np.zeros(len(of_row.row.places), np.float32) for of_row in rows]
        mine: dict[int, np.ndarray] = {}
        for pack, _ in self.packs(rows):
            values, numbers = compute(pack).float().cpu().numpy(), pack.row.cpu().numpy()
            mine |= {int(number): values[numbers == number] for number in np.unique(numbers)}
        for part in self.process_group.all_gather(mine):
            for number, values in part.items():
                by_row[number][:] = values
        return by_row

    def packs(self, rows: Sequence[LossColumns]) -> list[tuple[Pack, bool]]:
        """The packs of this process, and whether each counts. Their images are scaled ahead, in this order."""
        memory = self._spec.memory
        shares = memory.share_prefixes and self.policy.can_share_prefixes
        packed = pack_rows([of_row.row for of_row in rows], memory.max_tokens_per_microbatch, share_prefixes=shares)
        packs = self.process_group.assign(packed, lambda pack: pack.tokens)
        vision = self.policy.net.vision
        if vision is not None:
            vision.bank.expect(image.image for pack, _ in packs for image in pack.images)
        return packs

    # --- updates ----------------------------------------------------------------------------------------------

    def _update(
        self, columns: Sequence[LossColumns], others: Sequence[AuxiliaryObjective], *, policy: bool, holds_policy: bool
    ) -> dict[str, float]:
        """Make one optimizer step on a mini-batch, for the policy and the objectives `others`.

        Without `policy` its loss is not computed, and it is left as it is; with `holds_policy` only its step is left
        out.
        """
        loss, loss_of_others, metrics = 0.0, 0.0, MetricSums()
        for pack, counts in self.packs(columns):
            counted = MetricSums()
            of_policy, of_others = self._losses(pack, columns, others, counted, counts=counts, policy=policy)
            total = sum(of_others, start=of_policy)
            if total.requires_grad:
                total.backward()  # type: ignore[no-untyped-call]
            if counts:
                loss += float(of_policy.detach())
                loss_of_others += sum(float(of_other.detach()) for of_other in of_others)
                metrics.merge(counted)
        if self.process_group.size > 1:
            parts, metrics = self.process_group.all_gather((loss, loss_of_others, metrics.cpu())), MetricSums()
            loss, loss_of_others = (sum(part[place] for part in parts) for place in (0, 1))  # type: ignore[misc]
            for *_, counted in parts:
                metrics.merge(counted)
        norms = self._clip_gradients(others, loss, loss_of_others, policy=policy)
        for other in others:
            other.update()
        if policy and not holds_policy:
            update(self.optimizer, offload=self._offload)
            self._masters.publish()
        self._zero_gradients()
        self.updates += 1
        return metrics.result() | norms

    def _losses(
        self,
        pack: Pack,
        columns: Sequence[LossColumns],
        others: Sequence[AuxiliaryObjective],
        metrics: MetricSums,
        *,
        counts: bool,
        policy: bool,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The policy's loss of a pack, and those of other objectives, with their graphs. Their metrics are added to
        `metrics`."""
        of_policy = torch.zeros(())
        reads_states = any(other.reads_states for other in others)
        if policy:
            logprobs, entropy, states = self.policy.forward_with_states(pack, entropy=True, states=reads_states)
            tokens = LossTokens.of(
                pack,
                columns,
                logprobs,
                entropy=entropy,
                reference=self.policy.reference(pack) if self._spec.kl.in_loss else None,
                sampler_is_proximal=self._spec.proximal_logprobs == "sampler",
            )
            if not counts:  # the pass runs only because the other processes run one
                tokens = replace(tokens, loss_weights=torch.zeros_like(tokens.loss_weights))
            of_policy, counted = objective(self._spec, tokens)
            metrics.merge(counted)
            if pack.images:
                count = sum(len(columns[number].row.branch.images) for number in pack.rows)
                shown = torch.arange(count, device=logprobs.device)
                metrics.mean("images/encoded", shown < len({image.image for image in pack.images}))
        else:
            states = self.policy.states(pack) if reads_states else None
        of_others = []
        for other in others:
            if (part := other.loss(pack, columns, states)) is not None:
                of_others.append(part[0] if counts else 0.0 * part[0])
                metrics.merge(part[1])
        return of_policy, of_others

    def _clip_gradients(
        self, others: Sequence[AuxiliaryObjective], loss: float, loss_of_others: float, *, policy: bool
    ) -> dict[str, float]:
        """Clip the gradients of an update. Returns their norms before, and the policy's loss.

        Raises: TrainError: kind `diverged`: a loss or a norm is not finite; the gradients are gone.
        """
        metrics = {}
        if policy:
            limit = self._spec.optimizer.max_grad_norm or math.inf
            metrics = {"loss": loss, "grad_norm": self.process_group.clip_grad_norm(self._parameters, limit)}
        norms = [(other, other.clip_gradients()) for other in others]
        if not all(map(math.isfinite, metrics.values())):
            problem = f"the loss is {loss} and its gradient's norm {metrics['grad_norm']}: the update was not applied. "
            problem += "Lower `train.optimizer.lr`, or look at policy/ratio_max and sampler/diff_max in metrics.jsonl"
        elif diverged := [
            other for other, of_other in norms if not all(map(math.isfinite, (loss_of_others, *of_other.values())))
        ]:
            problem = diverged[0].diverged
        else:
            return metrics | {name: norm for _, of_other in norms for name, norm in of_other.items()}
        self._zero_gradients()
        raise TrainError(problem, kind="diverged")

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for other in self.objectives:
            if other.optimizer is not None:
                other.optimizer.zero_grad(set_to_none=True)

    # --- checkpoints ------------------------------------------------------------------------------------------

    def state_parts(self) -> dict[str, StatePart]:
        """The parts of a checkpoint that this learner needs to continue, by name."""

        def load_moments(folder: Path) -> None:
            length = load_optimizer(folder, self.optimizer, self._masters.named, self.process_group)
            self._length = self._spec.loss.constant_length or length

        load_policy = partial(self.policy.load_state, tensors=self._masters.tensors())
        parts = {
            "policy": StatePart(1, self._masters.tensors, load_policy),
            "optimizer": StatePart(
                1,
                lambda: optimizer_tensors(self.optimizer, self._masters.named, self._length, self.process_group),
                load_moments,
            ),
        }
        for other in self.objectives:
            parts |= other.state_parts()
        return parts

    def save_state(self, folder: Path) -> None:
        """Write each part into a folder of its own; each process writes its part of each tensor.

        Raises: TrainError: kind `diverged`: a value is not finite; OSError: a process cannot write.
        """
        self.process_group.call_others("save_state", folder)
        for name, part in self.state_parts().items():
            write_tensors(part.tensors(), folder / name, self.process_group)

    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote, with this or another number of processes; each reads its part of each tensor.

        Raises: TrainError: kind `checkpoint`: a part cannot be read, or belongs to another model or other settings.
        """
        self.process_group.call_others("load_state", folder)
        try:
            for name, part in self.state_parts().items():
                part.load(folder / name)
            self._masters.publish()
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise TrainError(f"cannot resume from {folder}: {error}", kind="checkpoint") from error

    def follow(self) -> None:
        """In every process except process 0: run the calls of process 0 until it closes."""
        self.process_group.serve_calls(
            {"step": self.step, "save_state": self.save_state, "load_state": self.load_state}
        )
