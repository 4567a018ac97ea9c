"""The critic: predicts, before each sampled token, the rewards that are still to come.

Three kinds (`train.critic.kind`), each a head on hidden states:
- `probe`: a small network on the policy's states, which are detached;
- `head`: a linear layer on the policy's states; its gradient reaches the policy's weights, or its LoRA adapter;
- `network`: a linear layer on the states of a model of its own.

Invariants:
- A new critic's values are 0, so advantages are returns until it has learned.
- The values and targets of a batch are computed once, before its first update. They follow from the rows and the
  weights, so a step that a resumed training repeats has the same ones.
- Weights of `probe` and `head` are whole in every process, and their gradients are summed over processes; a `network`
  is sharded as the policy is.
- The loss of an update is the mean over all of its trained values, however its rows are cut into micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from engine.errors import TrainError
from engine.plugins.critic.spec import HeadCritic, NetworkCritic, ProbeCritic, ValueCritic
from engine.tokens.catalogue import resolve_model
from engine.train.auxiliary import AuxiliaryObjective
from engine.train.credited_rows import PENALTIES, credited_columns, with_last_state
from engine.train.files import read_tensors, stored_names
from engine.train.metric_sums import MetricSums
from engine.train.optimizers import MasterWeights
from engine.train.policy import enable_gradient_checkpointing, open_model
from engine.train.state_parts import StatePart, load_moments, moments

if TYPE_CHECKING:
    from engine.schemas.credit import CreditMethod
    from engine.schemas.train import TrainSpec
    from engine.spec.load import LoadedSpec
    from engine.store.rows.row import Floats
    from engine.tokens.template import ChatTemplate
    from engine.train.distributed import ProcessGroup
    from engine.train.learner import Learner
    from engine.train.loss_columns import LossColumns
    from engine.train.packed_model import PackedModel
    from engine.train.packing import Pack
    from engine.train.policy import Policy

_WEIGHT = "weight::"
"""Begins the names of weights in the critic's file of a checkpoint; the other tensors are AdamW's."""
_HEAD = "value_head"


class ValueHead(nn.Module):
    """Values of hidden states, which are 0 at first.

    Args:
        size: The size of a hidden state.
        width: Width of the hidden layer of a `probe`, which reads detached states. None: a linear layer alone.
    """

    def __init__(self, size: int, width: int | None) -> None:
        super().__init__()
        self.last = nn.Linear(width or size, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        self.first = None if width is None else nn.Sequential(nn.LayerNorm(size), nn.Linear(size, width), nn.GELU())

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Values float32 [n] of hidden states [n, H]."""
        if self.first is not None:
            states = self.first(states.detach().float())
        values: torch.Tensor = self.last(states.to(self.last.weight.dtype))
        return values[:, 0].float()


class Critic(AuxiliaryObjective):
    """A critic and its optimizer.

    Args:
        spec: `train.critic`.
        credit: The credit method, which reads the values.
        policy: The policy. With `network`, values do not depend on it.
        process_group: The processes of the training.
        seed: Seed of the first layer of a `probe`.
        model: The model of a `network`; None for the other kinds.
        gradient_checkpointing: Whether the model of a `network` recomputes activations.

    Raises:
        TrainError: kind `train_setup`: the credit method reads no values.
    """

    optimizer: torch.optim.AdamW
    diverged = (
        "the critic's loss or its gradient's norm is not finite: the update was not applied. Lower `train.critic.lr` "
        "or `train.critic.update_epochs`, or look at critic/loss in metrics.jsonl"
    )

    def __init__(
        self,
        spec: ValueCritic,
        credit: CreditMethod,
        policy: Policy,
        process_group: ProcessGroup,
        *,
        seed: int = 0,
        model: PackedModel | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        if not credit.needs_values:
            raise TrainError("`train.critic` is set, and the credit method reads no values", kind="train_setup")
        self.spec = spec
        self.epochs = spec.update_epochs
        self.credit = credit
        lambdas = [name for name in ("lam", "token_lam") if name in type(credit).model_fields]
        self.target_credit = credit if spec.lam is None else credit.model_copy(update=dict.fromkeys(lambdas, spec.lam))
        """The method that computes the targets of the values."""
        self.by_turn = spec.level == "turn" or (spec.level == "auto" and credit.value_level == "turn")
        """Whether a turn has one value."""
        self._process_group = process_group
        self.net = model
        self.reads_states = model is None
        size = (model or policy.net).hidden_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            width = spec.width if isinstance(spec, ProbeCritic) else None
            self.head = ValueHead(size, width).to(policy.device)
        if model is not None:
            embeddings = model.model.get_input_embeddings().weight
            for parameter in model.model.get_output_embeddings().parameters():
                if parameter is not embeddings:  # values do not use the output layer
                    parameter.requires_grad_(False)
            if gradient_checkpointing:
                enable_gradient_checkpointing(model.model)
            self.head.to(model.dtype)
            setattr(model.model, _HEAD, self.head)  # a part of the model, so that it is sharded with it
        else:
            self.heads = (self.head,)

    def shard(self, *, offload: bool) -> None:
        """See `AuxiliaryObjective`."""
        trained: nn.Module = self.head
        if self.net is not None:
            self.net.shard(offload=offload)
            trained = self.net.model
        self.masters = MasterWeights(
            {name: weight for name, weight in trained.named_parameters() if weight.requires_grad}
        )
        self.parameters = self.masters.named
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=self.spec.lr, weight_decay=0.0)

    def held(self) -> list[torch.Tensor]:
        """See `AuxiliaryObjective`: tensors of any shape and dtype."""
        return [*(self.head if self.net is None else self.net.model).parameters(), *self.masters.copies]

    def holds_policy(self, step: int) -> bool:
        """See `AuxiliaryObjective`."""
        return step < self.spec.warmup_steps

    def columns(
        self, columns: Sequence[LossColumns], learner: Learner, step: int
    ) -> tuple[Sequence[LossColumns], Mapping[str, float]]:
        """See `AuxiliaryObjective`: values, their targets and the advantages that follow from them."""
        rows = [of_row.row for of_row in columns]
        credited = credited_columns(
            rows,
            self.credit,
            values=self.values_of(columns, learner),
            penalties=[of_row.extra[PENALTIES] for of_row in columns]
            if columns and PENALTIES in columns[0].extra
            else None,
            by_turn=self.by_turn,
            targets=self.target_credit,
        )
        return credited, value_metrics(credited)

    def values_of(self, columns: Sequence[LossColumns], learner: Learner) -> list[Floats]:
        """The values before the trained tokens of each row, and that of its last state if it was cut; float32
        [values of the row]."""
        rows = [replace(of_row, row=with_last_state(of_row.row)) for of_row in columns]
        policy = learner.policy
        return learner.per_token(
            rows, lambda pack: self.predict(pack, policy.states(pack) if self.reads_states else None)
        )

    def predict(self, pack: Pack, states: torch.Tensor | None) -> torch.Tensor:
        """See `AuxiliaryObjective`: the values before the pack's trained tokens, float32 [n]."""
        if self.net is not None:
            return self.net.states(pack, self.head)
        values: torch.Tensor = self.head(states)
        return values

    def loss(
        self, pack: Pack, columns: Sequence[LossColumns], states: torch.Tensor | None
    ) -> tuple[torch.Tensor, MetricSums]:
        """See `AuxiliaryObjective`: a scalar, float32."""
        values = self.predict(pack, states)
        count = max(1.0, sum(float(of_row.extra["has_value"].sum()) for of_row in columns))

        def column(name: str, divisor: float = 1.0) -> torch.Tensor:
            of_rows = [columns[number].extra[name] / divisor for number in pack.rows]
            flat = np.concatenate(of_rows) if of_rows else np.zeros(0)
            return torch.as_tensor(flat, dtype=torch.float32).to(values.device)

        weights = column("has_value", count)
        loss, metrics = value_objective(self.spec, values, column("values"), column("returns"), weights)
        return (self.spec.coefficient if isinstance(self.spec, HeadCritic) else 1.0) * loss, metrics

    def clip_gradients(self) -> dict[str, float]:
        """See `AuxiliaryObjective`."""
        parameters = list(self.parameters.values())
        if self.reads_states:
            self._process_group.sum_gradients(parameters)
        norm = self._process_group.clip_grad_norm(parameters, self.spec.max_grad_norm or math.inf)
        return {"critic/grad_norm": norm}

    def update(self) -> None:
        """See `AuxiliaryObjective`."""
        self.optimizer.step()
        self.masters.publish()

    # --- checkpoints ----------------------------------------------------------------------------------------

    def state_parts(self) -> dict[str, StatePart]:
        """See `AuxiliaryObjective`: weights and AdamW's state."""
        return {"critic": StatePart(1, lambda: self._weights() | moments(self.optimizer, self.parameters), self._load)}

    def _weights(self) -> dict[str, torch.Tensor]:
        return {f"{_WEIGHT}{name}": weight for name, weight in self.masters.tensors().items()}

    def _load(self, folder: Path) -> None:
        """Read the critic's part of a checkpoint.

        Raises:
            ValueError: the folder belongs to another critic.
        """
        weights = self._weights()
        stored = {name: shape for name, shape in stored_names(folder).items() if name.startswith(_WEIGHT)}
        odd = sorted(weights.keys() ^ stored.keys())
        odd += [name for name in weights if name in stored and weights[name].shape != stored[name]]
        if odd:
            raise ValueError(
                f"the critic of the checkpoint is another one: {len(odd)} weights differ, for example "
                f"{odd[0].removeprefix(_WEIGHT)!r}"
            )
        read_tensors(weights, folder, self._process_group)
        self.masters.publish()
        load_moments(folder, self.optimizer, self.parameters, self._process_group)


def value_losses(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Each token's value loss.

        1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)

    The maximum is that of PPO's code (openai/baselines, ppo2; arXiv 2005.12729, section 3): a value that is already
    further than `clip` from the old one, in the direction of its target, has no gradient.

    Args:
        values: V, [n], with its graph.
        old: V before the batch's first update, [n].
        returns: R, the targets, [n].
        clip: Largest change that is rewarded; None: 1/2 (V - R)^2.

    Returns:
        The losses, [n], with their graph, and whether the clipped value decides, bool [n].
    """
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = (torch.clamp(values, old - clip, old + clip) - returns).square()
    decides = clipped > plain
    return 0.5 * torch.where(decides, clipped, plain), decides


def value_objective(
    spec: ValueCritic, values: Tensor, old: Tensor, returns: Tensor, weights: Tensor
) -> tuple[Tensor, MetricSums]:
    """The contribution of a micro-batch to the value loss of an update, a scalar with its graph, and its metrics.

    Args:
        spec: The critic's section.
        values: The critic's values before the n trained tokens of the micro-batch, [n], with their graph; n may be 0.
        old: The values before the batch's first update, [n].
        returns: The targets of the values, [n].
        weights: Factor of each token in the value loss, [n]: 0 where no value is trained.
    """
    losses, clipped = value_losses(values, old, returns, spec.clip)
    trained = weights > 0
    metrics = MetricSums()
    metrics.mean("critic/loss", losses[trained])
    metrics.mean("critic/clip_fraction", clipped[trained])
    return (weights * losses).sum(), metrics


def value_metrics(columns: Sequence[LossColumns]) -> dict[str, float]:
    """Mean value, mean target and explained variance before the first update: 1 - Var(target - value) / Var(target).

    The explained variance is 1 for exact values and 0 for a constant; it is left out if all targets are equal.
    """
    trained = [of_row.extra["has_value"] > 0 for of_row in columns]
    values, returns = (
        np.concatenate([of_row.extra[name][mask] for of_row, mask in zip(columns, trained, strict=True)])
        for name in ("values", "returns")
    )
    if not len(values):
        return {}
    metrics = {"critic/value_mean": float(values.mean()), "critic/return_mean": float(returns.mean())}
    if (spread := float(returns.var())) > 1e-12:
        metrics["critic/explained_variance"] = 1.0 - float((returns - values).var()) / spread
    return metrics


def objective_of(loaded: LoadedSpec, train: TrainSpec, template: ChatTemplate, policy: Policy) -> Critic | None:
    """The critic of `train.critic`; None if it is not set, or of another plugin's kind.

    Raises:
        TrainError: kind `train_setup`: the credit method reads no values, or the critic's model does not fit the
            policy.
        ModelError: the files of the critic's model cannot be found or loaded.
    """
    if not isinstance(train.critic, ValueCritic):
        return None
    return Critic(
        train.critic,
        loaded.spec.rewards.credit,
        policy,
        policy.net.process_group,
        seed=train.seed,
        model=_own_model(loaded, train, train.critic, template, policy)
        if isinstance(train.critic, NetworkCritic)
        else None,
        gradient_checkpointing=train.memory.gradient_checkpointing,
    )


def _own_model(
    loaded: LoadedSpec, train: TrainSpec, critic: NetworkCritic, template: ChatTemplate, policy: Policy
) -> PackedModel:
    """Load the model of a `network`."""
    path = critic.path
    model = open_model(
        policy.net.folder if path is None else resolve_model(path, critic.revision, loaded.base),
        train,
        temperature=1.0,
        vocab=template.vocab_size,
        vision=template.vision,
        process_group=policy.net.process_group,
    )
    size, wanted = (net.model.get_input_embeddings().weight.shape[0] for net in (model, policy.net))
    if size != wanted:
        raise TrainError(
            f"`train.critic.path` {path}: its vocabulary has {size} tokens and that of the policy {wanted}; use a "
            "model with the same tokenizer",
            kind="train_setup",
        )
    return model
