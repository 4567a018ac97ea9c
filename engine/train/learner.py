"""The learner: trains a policy on batches of rows, split into mini-batches and micro-batches.

Invariants:
- The gradient of a step does not depend on how its rows are split into micro-batches: the loss weight of every token is
  computed before the first micro-batch.
- An update whose loss or gradient norm is not finite is not applied, neither to the policy nor to a critic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError

from engine.errors import TrainError
from engine.train.batches import mean_metrics, whitened_advantages
from engine.train.credited_rows import credited_columns, value_metrics, with_last_state
from engine.train.critic_update import update_critic, with_value_weights
from engine.train.distributed import ProcessGroup, SingleProcessGroup
from engine.train.gather import gather_tokens
from engine.train.kl import LEAST_LOGPROB
from engine.train.loss_columns import LossColumns, minibatches
from engine.train.loss_tokens import Tokens
from engine.train.loss_weights import mean_episode_length, token_loss_weights
from engine.train.losses import objective
from engine.train.metric_sums import MetricSums
from engine.train.moments import load_moments, moments
from engine.train.optimizers import MasterWeights, make_optimizer, set_rate, update
from engine.train.packing import Pack, pack_rows
from engine.train.schedule import learning_rate
from engine.train.state_parts import StatePart, part_folder
from engine.train.tensor_files import read_tensors, stored_names, write_tensors
from engine.train.value_loss import value_objective

if TYPE_CHECKING:
    from engine.schemas.credit import CreditMethod
    from engine.schemas.train import TrainSpec
    from engine.store.rows.row import TrainingRow
    from engine.tokens.image_bank import SentImages
    from engine.train.critic import Critic
    from engine.train.policy import Policy

LENGTH = "loss_length"
"""Name in the optimizer's part of a checkpoint of the constant of `dr_grpo` that was measured; 0: not measured yet."""
RANDOM = "torch_rng"
"""Name of the random state of process 0 in the optimizer's part of a checkpoint; that of process 1 is `torch_rng.1`, and so on."""


class Learner:
    """A policy and its optimizer.

    Args:
        policy: The model to train.
        spec: The `train:` section.
        episode_tokens: Maximum number of tokens of an episode: the constant of `dr_grpo` in trainings that engines began which did
            not measure it.
        process_group: The processes of the training. Each has a learner; process 0's learner calls the others.
        critic: The critic, if the credit method needs values. Rows then come without the credit's advantages.
        credit: The credit method, which computes advantages again if the reward has KL penalties.

    Raises:
        TrainError: kind `train_setup`: no parameter is trained, or the credit method takes no penalties.
    """

    def __init__(
        self,
        policy: Policy,
        spec: TrainSpec,
        *,
        episode_tokens: int | None = None,
        process_group: ProcessGroup | None = None,
        critic: Critic | None = None,
        credit: CreditMethod | None = None,
    ) -> None:
        if spec.kl.in_reward and (credit is None or not credit.takes_penalties):
            raise TrainError(
                "`train.kl.in: reward`: the credit method takes no penalties of tokens; use `train.kl.in: loss`, or a credit "
                "method of the engine",
                kind="train_setup",
            )
        self._credit = credit
        self.policy = policy
        self.critic = critic
        self.process_group: ProcessGroup = process_group or SingleProcessGroup()
        self._offload = spec.memory.offload == "optimizer"
        policy.shard(
            offload=spec.memory.offload == "all"
        )  # before the optimizer is made: sharding replaces the parameters
        self._spec = spec
        self._longest = episode_tokens
        self._length: float | None = spec.loss.constant_length
        """The constant of `dr_grpo`. None: it is measured in the first step that makes an update."""
        self._masters = MasterWeights(dict(policy.named_parameters()))
        self._parameters = list(self._masters.named.values())
        """What the optimizer updates, and what has the gradients."""
        if not self._parameters:
            raise TrainError(
                "no parameter is trained: the patterns of `train.freeze` match all of them; remove one",
                kind="train_setup",
            )
        wanted = spec.optimizer
        self.optimizer = make_optimizer(self._parameters, wanted)
        self.lora = spec.lora is not None
        self.rate = wanted.lr
        """The learning rate of the current batch (or the last one)."""
        self.updates = 0
        """Number of updates that the current batch (or the last one) has made."""
        self._only_critic = False
        """Whether the current batch trains the critic alone."""

    def step(
        self,
        rows: Sequence[TrainingRow],
        step: int,
        images: SentImages | None = None,
        rate: float | None = None,
        most_updates: int | None = None,
    ) -> dict[str, float]:
        """Train on one batch.

        Args:
            rows: The training rows of the batch.
            step: The batch's number, from 0. It sets the learning rate and the order of mini-batches.
            images: The rows' images, for processes that did not sample the rows. Each makes the tensors of the rows that it trains.
            rate: The learning rate. Default: that of the schedule.
            most_updates: Stop after this number of updates: a step that failed after them is done again.

        Returns:
            Metrics: means over the updates; maxima for names that end in `max`.

        Raises:
            TrainError: kind `diverged`: the loss or the gradient norm is not finite.
        """
        self.process_group.call_others("step", rows, step, self._images(rows), rate, most_updates)
        vision = self.policy.net.vision
        if images is not None and vision is not None:
            vision.bank.receive(images)
        self.updates = 0
        spec = self._spec
        metrics: list[dict[str, float]] = []
        if self.critic is not None:
            self._only_critic = step < self.critic.spec.warmup_steps
        columns = self._credited(rows, metrics)
        if self._recompute:
            columns = self._with_proximal(columns)
        length = self._length
        if length is None:
            length = mean_episode_length(*_lengths(columns))
        rate = self.rate = learning_rate(spec, step) if rate is None else rate
        set_rate(self.optimizer, rate)
        critic_epochs = 0 if self.critic is None else self.critic.spec.update_epochs or spec.update_epochs
        for number in range(max(spec.update_epochs, critic_epochs)):
            parts = minibatches(columns, spec.minibatches, seed=(spec.seed, step, number))
            for part in self._weighted(parts, length):
                if self.updates == most_updates:
                    break
                if number < spec.update_epochs:
                    metrics.append(self._update(part, self.critic if number < critic_epochs else None))
                else:
                    metrics.append(self._update_critic(part))
                self._length = length  # only now: a step without an update is not made, and leaves nothing
        if self._measures_length and length is not None:
            metrics.append({"loss/length": length})
        return mean_metrics(metrics) | {"lr": rate, "updates": float(self.updates)}

    def use_longest_episode(self) -> None:
        """Take the longest possible episode as the constant of `dr_grpo`, for a training that began before it was measured."""
        if self._measures_length:
            self.process_group.call_others("use_longest_episode")
            self._length = self._longest

    @property
    def _measures_length(self) -> bool:
        return self._spec.loss.denominator == "constant_length" and self._spec.loss.constant_length is None

    def _credited(self, rows: Sequence[TrainingRow], told: list[dict[str, float]]) -> list[LossColumns]:
        """The columns of rows with the advantages that the loss reads, before the first update; metrics of penalties and values are added to `told`."""
        spec, critic, penalties = self._spec, self.critic, None
        if spec.kl.in_reward:
            token_kl = self._token_kl(rows)
            penalties = [spec.kl.coefficient * of_row.astype(np.float64) for of_row in token_kl]
            told.append({"policy/kl_ref": float(np.concatenate(token_kl).mean(dtype=np.float64))})
        if critic is not None:
            columns = credited_columns(
                rows,
                critic.credit,
                values=self._values(rows),
                penalties=penalties,
                by_turn=critic.by_turn,
                targets=critic.target_credit,
            )
            told.append(value_metrics(columns))
        elif penalties is not None and self._credit is not None:
            columns = credited_columns(rows, self._credit, penalties=penalties)
        else:
            columns = [LossColumns.of(row) for row in rows]
        if spec.advantage_norm == "none":
            return columns
        advantages = whitened_advantages([of_row.advantages for of_row in columns])
        return [replace(of_row, advantages=values) for of_row, values in zip(columns, advantages, strict=True)]

    def _images(self, rows: Sequence[TrainingRow]) -> SentImages | None:
        """The rows' images, which process 0 sends to the others."""
        vision = self.policy.net.vision
        if vision is None or self.process_group.size == 1 or not self.process_group.main:
            return None
        return vision.bank.sent(image.image for row in rows for image in row.branch.images)

    def _assigned(self, rows: Sequence[TrainingRow]) -> list[tuple[Pack, bool]]:
        """The packs of this process, and whether each counts. Their images are scaled ahead, in this order."""
        packs = self.process_group.assign(self._packs(rows), _cost)
        vision = self.policy.net.vision
        if vision is not None:
            vision.bank.expect(image.image for pack, _ in packs for image in pack.images)
        return packs

    @property
    def _recompute(self) -> bool:
        """Whether the log-probs before the first update must be computed separately from the current ones."""
        spec = self._spec
        if spec.proximal_logprobs == "auto":
            return spec.update_epochs * spec.minibatches > 1
        return spec.proximal_logprobs == "recompute"

    @torch.no_grad()
    def _with_proximal(self, columns: Sequence[LossColumns]) -> list[LossColumns]:
        """The columns with `proximal`."""
        logprobs = self._by_row(_rows(columns), lambda pack: self.policy.forward(pack, entropy=False)[0])
        return [replace(of_row, proximal=values) for of_row, values in zip(columns, logprobs, strict=True)]

    @torch.no_grad()
    def _token_kl(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """`k1` of each trained token before the first update, for each row: float32 [trained tokens]."""
        policy = self._by_row(rows, lambda pack: self.policy.forward(pack, entropy=False)[0])
        reference = self._by_row(rows, self.policy.reference)
        return [
            np.maximum(a, LEAST_LOGPROB) - np.maximum(b, LEAST_LOGPROB) for a, b in zip(policy, reference, strict=True)
        ]

    @torch.no_grad()
    def _values(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """The critic's values before the trained tokens of each row, and that of its last state if it was cut; float32."""
        critic = self.critic
        assert critic is not None
        if critic.reads_policy:
            return self._by_row(
                [with_last_state(row) for row in rows], lambda pack: self.policy.values(pack, critic.head)
            )
        return self._by_row([with_last_state(row) for row in rows], critic.values)

    def _by_row(self, rows: Sequence[TrainingRow], compute: Callable[[Pack], torch.Tensor]) -> list[np.ndarray]:
        """Compute one number for each trained token in all processes. For each row, float32 [trained tokens]."""
        by_row = [np.zeros(len(row.places), np.float32) for row in rows]
        mine: dict[int, np.ndarray] = {}
        for pack, _ in self._assigned(rows):
            values, numbers = compute(pack).float().cpu().numpy(), pack.row.cpu().numpy()
            mine |= {int(number): values[numbers == number] for number in np.unique(numbers)}
        for part in self.process_group.all_gather(mine):
            for number, values in part.items():
                by_row[number][:] = values
        return by_row

    def _packs(self, rows: Sequence[TrainingRow]) -> list[Pack]:
        memory = self._spec.memory
        share = memory.share_prefixes and self.policy.can_share_prefixes
        return pack_rows(rows, memory.max_tokens_per_microbatch, share_prefixes=share)

    def _update_critic(self, columns: Sequence[LossColumns]) -> dict[str, float]:
        """Make one optimizer step of the critic alone."""
        assert self.critic is not None
        packs = self._assigned(_rows(columns))
        metrics = update_critic(self.critic, self.policy, with_value_weights(columns), packs, self.process_group)
        self.updates += 1
        return metrics

    def _update(self, columns: Sequence[LossColumns], critic: Critic | None) -> dict[str, float]:
        """Make one optimizer step, of the critic too if one is passed."""
        loss, value_loss, metrics = 0.0, 0.0, MetricSums()
        if critic is not None:
            columns = with_value_weights(columns)
        for pack, counts in self._assigned(_rows(columns)):
            tokens = gather_tokens(pack, columns, self.policy, critic, self._spec)
            tokens = tokens if counts else _with_zero_loss_weights(tokens)
            part, counted = objective(self._spec, tokens)
            total = part
            if critic is not None and tokens.valued is not None:
                of_values, counted_values = value_objective(critic.spec, tokens.valued)
                total = part + critic.spec.loss_factor * of_values
                value_loss += float(of_values.detach())
                counted.merge(counted_values)
            if total.requires_grad:
                total.backward()  # type: ignore[no-untyped-call]
            if counts:
                loss += float(part.detach())
                metrics.merge(counted)
                if pack.images:
                    count = sum(len(columns[number].row.branch.images) for number in pack.rows)
                    shown = torch.arange(count, device=part.device)
                    metrics.mean("images/encoded", shown < len({image.image for image in pack.images}))
        if self.process_group.size > 1:
            parts, metrics = self.process_group.all_gather((loss, value_loss, metrics.cpu())), MetricSums()
            loss, value_loss = (sum(part[place] for part in parts) for place in (0, 1))  # type: ignore[misc]
            for *_, counted in parts:
                metrics.merge(counted)
        norm = self.process_group.clip_grad_norm(self._parameters, self._spec.optimizer.max_grad_norm or math.inf)
        norms = {"loss": loss, "grad_norm": norm}
        if critic is not None:
            norms["critic/grad_norm"] = critic.clip_gradients()
        if not all(math.isfinite(number) for number in (*norms.values(), value_loss)):
            self._zero_gradients()
            raise TrainError(_not_finite(norms), kind="diverged")
        if critic is not None:
            critic.update()
        if not self._only_critic:
            update(self.optimizer, offload=self._offload)
            self._masters.publish()
        self._zero_gradients()
        self.updates += 1
        return metrics.result() | norms

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.optimizer.zero_grad(set_to_none=True)

    def _weighted(self, parts: Sequence[Sequence[LossColumns]], length: float | None) -> list[list[LossColumns]]:
        """The mini-batches of a batch with loss weights. `length`: that of `dr_grpo`."""
        lengths, episodes = _lengths([of_row for part in parts for of_row in part])
        numbers = [number for number, part in enumerate(parts) for _ in part]
        weights = iter(token_loss_weights(self._spec.loss, lengths, episodes, minibatches=numbers, length=length))
        return [[replace(of_row, weights=next(weights)) for of_row in part] for part in parts]

    def state_parts(self) -> dict[str, StatePart]:
        """The parts of a checkpoint that this learner needs to continue, by name."""
        parts = {
            "policy": StatePart(1, self._masters.tensors, self._load_policy),
            "optimizer": StatePart(1, self._optimizer_tensors, self._load_optimizer),
        }
        return parts if self.critic is None else parts | {"critic": self.critic.state_part()}

    def save_state(self, folder: Path) -> None:
        """Write each part into a folder of its own; each process writes its part of each tensor.

        Raises:
            TrainError: kind `diverged`: a value is not finite.
            OSError: a process cannot write.
        """
        self.process_group.call_others("save_state", folder)
        for name, part in self.state_parts().items():
            write_tensors(part.tensors(), folder / name, self.process_group)

    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote, with this or another number of processes; each reads its part of each tensor.

        Raises:
            TrainError: kind `checkpoint`: a part cannot be read, or belongs to another model or other settings.
        """
        self.process_group.call_others("load_state", folder)
        try:
            for name, part in self.state_parts().items():
                with part_folder(folder, name) as place:
                    part.load(place)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise TrainError(f"cannot resume from {folder}: {error}", kind="checkpoint") from error

    def _load_policy(self, folder: Path) -> None:
        self.policy.load_state(folder, self._masters.tensors())
        self._masters.publish()

    def _optimizer_tensors(self) -> dict[str, torch.Tensor]:
        length = torch.tensor(self._length or 0.0, dtype=torch.float64)
        return moments(self.optimizer, self._masters.named) | {self._random_name: torch.get_rng_state(), LENGTH: length}

    def _load_optimizer(self, folder: Path) -> None:
        load_moments(folder, self.optimizer, self._masters.named, self.process_group)
        stored = stored_names(folder)
        name = self._random_name if self._random_name in stored else RANDOM
        random = torch.zeros(stored[name], dtype=torch.uint8)
        read_tensors({name: random}, folder, self.process_group)
        torch.set_rng_state(random)
        length = torch.tensor(self._longest or 0.0, dtype=torch.float64)
        if LENGTH in stored:
            read_tensors({LENGTH: length}, folder, self.process_group)
        self._length = self._spec.loss.constant_length or length.item() or None

    @property
    def _random_name(self) -> str:
        return RANDOM if self.process_group.main else f"{RANDOM}.{self.process_group.rank}"

    def follow(self) -> None:
        """In every process except process 0: run the calls of process 0 until it closes."""
        calls: dict[str, Callable[..., Any]] = {
            "step": self.step,
            "save_state": self.save_state,
            "load_state": self.load_state,
            "use_longest_episode": self.use_longest_episode,
        }
        self.process_group.serve_calls(calls)


def _rows(columns: Sequence[LossColumns]) -> list[TrainingRow]:
    return [of_row.row for of_row in columns]


def _lengths(columns: Sequence[LossColumns]) -> tuple[list[int], list[str]]:
    """The number of trained tokens of each row, and the id of its episode."""
    rows = _rows(columns)
    return [len(row.places) for row in rows], [row.episode.episode_id for row in rows]


def _cost(pack: Pack) -> int:
    return pack.tokens


def _with_zero_loss_weights(tokens: Tokens) -> Tokens:
    """Tokens of a pass that does not count: it runs only because the other processes run one."""
    valued = tokens.valued
    if valued is not None:
        valued = replace(valued, weights=torch.zeros_like(valued.weights))
    return replace(tokens, loss_weights=torch.zeros_like(tokens.loss_weights), valued=valued)


def _not_finite(told: Mapping[str, float]) -> str:
    """The message of an update that is not applied."""
    norms = f"the loss is {told['loss']} and its gradient's norm {told['grad_norm']}"
    key, names = "`train.optimizer.lr`", "policy/ratio_max and sampler/diff_max"
    if math.isfinite(told["loss"]) and math.isfinite(told["grad_norm"]):
        norms, key, names = "the critic's loss or its gradient's norm is not finite", "`train.critic.lr`", "critic/loss"
    return f"{norms}: the update was not applied. Lower {key}, or look at {names} in metrics.jsonl"
