"""Trainings with a critic: it learns the values, resumes exactly, and refuses what it cannot use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import force_setattr
from safetensors.torch import load_file
from slow_cases import slow_but
from test_learner import make_rows
from training_rows import with_branch, with_credit
from trainings import begin_training

from engine.errors import TrainError
from engine.plugins.critic.critic import Critic
from engine.plugins.critic.spec import ValueCritic
from engine.rewards.credit import Member
from engine.rewards.ledger import Ledger
from engine.rewards.sealed import SealedLedger
from engine.schemas.credit import read_credit
from engine.schemas.reward import RewardEvent
from engine.schemas.sections import read_stored
from engine.schemas.train import TrainSpec
from engine.spec.load import load_spec
from engine.store import training as folders
from engine.store.rows.row import Floats, RowCredit, TrainingRow
from engine.train.checkpoint import State, checkpoints_of, read_checkpoint, write_checkpoint
from engine.train.distributed import ProcessGroup
from engine.train.learner import Learner
from engine.train.loss_columns import LossColumns
from engine.train.metric_sums import MetricSums
from engine.train.metrics import read_metrics
from engine.train.packing import Pack
from engine.train.policy import Policy, open_model
from engine.train.trainer import Trainer

KINDS: dict[str, dict[str, Any]] = {
    "probe": {"kind": "probe", "width": 32, "lr": 1e-2},
    "head": {"kind": "head", "lr": 1e-2},
    "network": {"kind": "network", "lr": 1e-3},
}
METHODS = ["turn_ppo", "bilevel_gae", "gae"]


def sealed(*rewards: float) -> SealedLedger:
    ledger = Ledger()
    for turn, value in enumerate(rewards):
        ledger.post(RewardEvent(turn=turn, value=value), turn)
    return ledger.seal(len(rewards))


def valued(rows: list[TrainingRow], cut: bool = False) -> list[TrainingRow]:
    """Rows as a training with a critic builds them: a ledger in place of the credit's advantages."""
    rng = np.random.default_rng(7)
    found = []
    for row in rows:
        ledger = sealed(*rng.normal(size=2).round(2).tolist())
        group = {row.episode.episode_id: Member(ledger=ledger)}
        credit = RowCredit(members=group, needs_values=True, cut=cut)
        found.append(replace(row, advantages=np.zeros_like(row.advantages), credit=credit))
    return found


def learner_of(folder: Path, critic: dict[str, Any], credit: dict[str, Any] | None = None, **train: Any) -> Learner:
    settings = {"optimizer": {"lr": 1e-3, "max_grad_norm": None}, "critic": critic} | train
    spec = read_stored(settings, TrainSpec)
    policy = Policy.load(folder, spec, temperature=1.0, vocab=None, vision=None)
    group = ProcessGroup()
    assert isinstance(spec.critic, ValueCritic)
    model = open_model(folder, spec, temperature=1.0, vocab=None, vision=None) if spec.critic.own_model else None
    method, again = read_credit(credit or {"method": "gae"}), spec.memory.gradient_checkpointing
    made = Critic(spec.critic, method, policy, group, seed=spec.seed, model=model, gradient_checkpointing=again)
    return Learner(policy, spec, process_group=group, objectives=[made])


def critic_of(learner: Learner) -> Critic:
    (critic,) = learner.objectives
    assert isinstance(critic, Critic)
    return critic


def values_of(learner: Learner, rows: list[TrainingRow]) -> list[Floats]:
    return critic_of(learner).values_of([LossColumns.of(row) for row in rows], learner)


def values_in(learner: Learner, rows: list[TrainingRow]) -> torch.Tensor:
    """The values of rows that are one pack, with their graph."""
    ((pack, _),) = learner.packs([LossColumns.of(row) for row in rows])
    critic = critic_of(learner)
    states = learner.policy.forward_with_states(pack, entropy=False, states=critic.reads_states)[2]
    return critic.predict(pack, states)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    own = {f"critic.{name}": each.detach().clone() for name, each in critic_of(learner).parameters.items()}
    return own | {name: tensor.clone() for name, tensor in learner.policy.state().items()}


@pytest.mark.slow
@pytest.mark.parametrize("passes", slow_but([(2, None), (1, 2), (2, 1)], (1, 2)))
@pytest.mark.parametrize("kind", slow_but(KINDS, "head"))
def test_the_update_is_the_same_however_the_rows_are_packed(
    kind: str, passes: tuple[int, int | None], tiny_model_dir: Path
) -> None:
    epochs, critic_epochs = passes
    rows = valued(make_rows(), cut=True)
    told, after = [], []
    for memory in ({"max_tokens_per_microbatch": 1}, {"max_tokens_per_microbatch": 90, "share_prefixes": False}, {}):
        learner = learner_of(
            tiny_model_dir,
            KINDS[kind] | {"max_grad_norm": None, "update_epochs": critic_epochs},
            memory=memory,
            minibatches=2,
            update_epochs=epochs,
        )
        told.append(learner.step(rows, 0))
        after.append(weights(learner))
    assert told[0]["updates"] == 4
    for other, moved in zip(told[1:], after[1:], strict=True):
        assert set(other) == set(told[0])
        for name, value in told[0].items():
            assert other[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
        for name, tensor in after[0].items():
            torch.testing.assert_close(moved[name], tensor, rtol=0, atol=5e-3, msg=name)


@pytest.mark.parametrize("kind", slow_but(KINDS, "head"))
def test_further_passes_train_the_critic_alone(kind: str, tiny_model_dir: Path) -> None:
    """They come after the policy's passes, so the policy is that of a training without them; only the critic goes on."""
    rows = valued(make_rows())
    once, often = (learner_of(tiny_model_dir, KINDS[kind] | {"update_epochs": count}) for count in (1, 6))
    first, told = once.step(rows, 0), often.step(rows, 0)
    assert (first["updates"], told["updates"]) == (1, 6)
    assert {name: told[name] for name in ("loss", "grad_norm")} == {name: first[name] for name in ("loss", "grad_norm")}
    policy = once.policy.state()
    assert all(torch.equal(policy[name], tensor) for name, tensor in often.policy.state().items())
    moved, further = weights(once), weights(often)
    assert any(not torch.equal(moved[name], further[name]) for name in moved if name.startswith("critic."))
    before, after = once.step(rows, 1), often.step(rows, 1)
    assert after["critic/explained_variance"] > before["critic/explained_variance"]


@pytest.mark.parametrize("kind", slow_but(KINDS, "head"))
def test_fewer_passes_leave_the_critic_as_it_is(kind: str, tiny_model_dir: Path) -> None:
    """In passes beyond the critic's, the policy alone is trained; the value loss of a `head` does not reach it there."""
    rows = valued(make_rows())
    once, twice = (
        learner_of(
            tiny_model_dir, KINDS[kind] | {"update_epochs": 1}, update_epochs=count, proximal_logprobs="recompute"
        )
        for count in (1, 2)
    )
    assert (once.step(rows, 0)["updates"], twice.step(rows, 0)["updates"]) == (1, 2)
    moved, further = weights(once), weights(twice)
    changed = {name for name in moved if not torch.equal(moved[name], further[name])}
    assert changed
    assert all(not name.startswith("critic.") for name in changed)


@pytest.mark.parametrize("most", slow_but([1, 3], 3))
def test_a_step_that_stopped_in_a_pass_of_the_critic_is_repeated_up_to_there(most: int, tiny_model_dir: Path) -> None:
    """The batch log holds how many updates a step made; the passes of the critic alone count."""
    rows = valued(make_rows())
    critic = KINDS["probe"] | {"update_epochs": 2}
    told = [learner_of(tiny_model_dir, critic, minibatches=2) for _ in range(2)]
    for learner in told:
        assert learner.step(rows, 0, most_updates=most)["updates"] == most
    one, other = (weights(learner) for learner in told)
    assert all(torch.equal(one[name], other[name]) for name in one)
    whole = learner_of(tiny_model_dir, critic, minibatches=2)
    assert whole.step(rows, 0)["updates"] == 4
    assert any(not torch.equal(weights(whole)[name], one[name]) for name in one)


def test_a_pass_of_the_critic_that_is_not_finite_changes_nothing(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy's update of the batch stays; the critic keeps its last finite weights."""
    learner = learner_of(tiny_model_dir, KINDS["probe"] | {"update_epochs": 3})
    rows = valued(make_rows())
    learner.step(rows, 0, most_updates=1)
    before = weights(learner)
    real = Critic.loss
    alone: list[bool] = []

    def loss(
        critic: Critic, pack: Pack, columns: Sequence[LossColumns], states: torch.Tensor | None
    ) -> tuple[torch.Tensor, MetricSums]:
        value_loss, metrics = real(critic, pack, columns, states)
        assert states is not None
        alone.append(not states.requires_grad)
        return (value_loss * torch.inf if alone[-1] else value_loss), metrics

    monkeypatch.setattr(Critic, "loss", loss)
    with pytest.raises(TrainError, match=r"Lower `train.critic.lr` or `train.critic.update_epochs`") as caught:
        learner.step(rows, 1)
    assert (caught.value.kind, learner.updates, alone) == ("diverged", 1, [False, True])
    after = weights(learner)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(KINDS, "head"))
def test_a_critic_learns_and_only_a_head_changes_the_policy(kind: str, tiny_model_dir: Path) -> None:
    """In the warm-up the critic alone is trained. The gradient of a value reaches the policy from a `head` only."""
    rows = valued(make_rows())
    learner = learner_of(tiny_model_dir, KINDS[kind] | {"warmup_steps": 20})
    before = weights(learner)
    told = [learner.step(rows, step) for step in range(20)]
    after = weights(learner)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(name.startswith("critic.") for name in moved)
    assert told[0]["critic/value_mean"] == 0.0
    assert told[0]["critic/explained_variance"] == 0.0
    assert told[-1]["critic/loss"] < 0.9 * told[0]["critic/loss"]
    assert told[-1]["critic/explained_variance"] > 0.1
    assert told[0]["critic/return_mean"] == pytest.approx(told[-1]["critic/return_mean"], abs=1e-6)  # lam 1: returns

    values_in(learner, rows).sum().backward()  # type: ignore[no-untyped-call]
    assert any(each.grad is not None and bool(each.grad.any()) for each in learner._parameters) == (kind == "head")


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_cut_episodes_are_those_of_the_last_state(kind: str, tiny_model_dir: Path) -> None:
    """Appending the state's own next token to a row and training it gives the same value as the row that was cut."""
    learner = learner_of(tiny_model_dir, KINDS[kind] | {"warmup_steps": 9})
    rows = valued(make_rows(groups=1))
    learner.step(rows, 0)
    cut = values_of(learner, [with_credit(row, cut=True) for row in rows])
    whole = values_of(learner, rows)
    for row, one, other in zip(rows, cut, whole, strict=True):
        assert len(one) == len(other) + 1
        np.testing.assert_allclose(one[:-1], other, atol=1e-5)
        longer = with_branch(row, input_ids=np.append(row.branch.input_ids, 17))
        longer = replace(longer, places=np.append(row.places, len(row.branch.input_ids)))
        np.testing.assert_allclose(values_of(learner, [longer])[0][-1], one[-1], atol=1e-5)


@pytest.mark.parametrize("kind", slow_but(KINDS, "network"))
def test_a_checkpoint_brings_the_critic_back(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = valued(make_rows())
    whole = learner_of(tiny_model_dir, KINDS[kind], minibatches=2)
    whole.step(rows, 0)
    checkpoint = write_checkpoint(tmp_path, 1, State(step=1, version=1), whole)
    fresh = learner_of(tiny_model_dir, KINDS[kind], minibatches=2)
    read_checkpoint(checkpoint, fresh)
    assert all(torch.equal(weights(whole)[name], tensor) for name, tensor in weights(fresh).items())
    again = valued(make_rows(seed=1))
    assert whole.step(again, 1) == fresh.step(again, 1)
    assert all(torch.equal(weights(whole)[name], tensor) for name, tensor in weights(fresh).items())
    other = "head" if kind != "head" else "probe"
    with pytest.raises(TrainError, match="the critic of the checkpoint is another one"):
        read_checkpoint(checkpoint, learner_of(tiny_model_dir, KINDS[other]))


@pytest.mark.parametrize("kind", slow_but(["probe", "head"], "head"))
def test_with_lora_the_head_is_whole_and_the_trunk_moves_by_its_adapter(kind: str, tiny_model_dir: Path) -> None:
    """The value loss reaches the adapter from a `head` only; the base model never moves."""
    rows = valued(make_rows())
    learner = learner_of(tiny_model_dir, KINDS[kind], lora={"rank": 2}, update_epochs=2)
    base = {name: each.clone() for name, each in learner.policy.model.state_dict().items() if ".lora_" not in name}
    before = weights(learner)
    learner.step(rows, 0)
    learner.step(rows, 1)
    after = learner.policy.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in base.items())
    moved = {name for name, tensor in weights(learner).items() if not torch.equal(before[name], tensor)}
    assert {"critic.last.weight", "critic.last.bias"} <= moved
    assert any(".lora_" in name for name in moved)
    values_in(learner, rows).sum().backward()  # type: ignore[no-untyped-call]
    reached = [
        name for name, each in learner.policy.model.named_parameters() if each.grad is not None and each.grad.any()
    ]
    assert all(".lora_" in name for name in reached)
    assert bool(reached) == (kind == "head")


def test_a_value_that_is_not_finite_changes_nothing(tiny_model_dir: Path) -> None:
    learner = learner_of(tiny_model_dir, KINDS["probe"] | {"lr": 1.0})
    before = weights(learner)
    rows = valued(make_rows())
    rows[0] = with_credit(rows[0], members={rows[0].episode.episode_id: Member(ledger=sealed(0.0, 1e30))})
    with pytest.raises(TrainError, match="the update was not applied") as caught:
        learner.step(rows, 0)
    assert (caught.value.kind, learner.updates) == ("diverged", 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(learner).items())


@pytest.mark.parametrize("precision", slow_but(["mixed", "bfloat16"], "mixed"))
@pytest.mark.parametrize("kind", slow_but(KINDS, "probe"))
def test_half_precision_and_gradient_checkpointing(kind: str, precision: str, tiny_model_dir: Path) -> None:
    memory = {"gradient_checkpointing": True}
    learner = learner_of(tiny_model_dir, KINDS[kind], precision=precision, memory=memory)
    rows = valued(make_rows())
    told = [learner.step(rows, step) for step in range(3)]
    exact = learner_of(tiny_model_dir, KINDS[kind]).step(rows, 0)
    assert told[0]["critic/loss"] == pytest.approx(exact["critic/loss"], rel=1e-6)  # values are 0 at first
    assert told[0]["critic/return_mean"] == pytest.approx(exact["critic/return_mean"], abs=1e-6)
    assert told[2]["critic/value_mean"] != 0
    assert all(values.dtype == np.float32 for values in values_of(learner, rows))


def test_a_method_without_values_has_no_critic(tiny_model_dir: Path) -> None:
    with pytest.raises(TrainError, match="the credit method reads no values"):
        learner_of(tiny_model_dir, KINDS["probe"], credit={"method": "outcome"})


# ---- whole trainings


EXACT: dict[str, Any] = {
    "steps": 4,
    "checkpoints": {"every": 2, "keep": 5},
    "rollout_correction": {"kind": "none"},
    "minibatches": 2,
}
DETERMINISTIC = {"kind": "local", "dtype": "float32", "max_batch": 16, "deterministic": True}


@pytest.mark.slow  # by default: the checkpoint of a critic above, and a resumed training in test_surviving
@pytest.mark.parametrize(
    ("method", "kind", "penalty"),
    [("turn_ppo", "probe", 0.0), ("bilevel_gae", "head", 0.0), ("gae", "network", 0.0), ("bilevel_gae", "probe", 0.5)],
)
async def test_a_resumed_training_is_the_one_that_never_stopped(
    method: str, kind: str, penalty: float, train_spec: Any, tmp_path: Path
) -> None:
    """The second launch repeats step 3 from the batch log: its values come from the checkpoint's critic, and the KL penalties of its
    tokens from the checkpoint's weights."""
    changes = {"rewards": {"credit": {"method": method}}, "backend": DETERMINISTIC}
    train = EXACT | {"critic": KINDS[kind] | {"update_epochs": 2}, "kl": {"coefficient": penalty, "in": "reward"}}
    whole = begin_training(train_spec(name="whole", train=train, **changes), tmp_path / "whole")
    await whole.run()
    parted = begin_training(train_spec(name="parted", train=train | {"steps": 3}, **changes), tmp_path / "parted")
    await parted.run()
    for file in checkpoints_of(parted.folder)[-1].iterdir():  # a kill before the checkpoint of step 3
        if file.is_file():
            file.unlink()
    loaded = folders.read_header(parted.folder).loaded_spec()
    assert loaded.spec.train is not None
    longer = loaded.spec.model_copy(update={"train": loaded.spec.train.model_copy(update={"steps": 4})})
    force_setattr(loaded, "spec", longer)
    again = Trainer(loaded, parted.folder)
    result = await again.run()
    assert (result.steps, result.repeated_steps) == (4, 1)
    for file in (
        "policy/shard-00001-model-00001-of-00001.safetensors",
        "critic/shard-00001-model-00001-of-00001.safetensors",
    ):
        one, other = (load_file(checkpoints_of(each.folder)[-1] / file) for each in (whole, again))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    names = ("step", "loss", "critic/loss", "critic/explained_variance", "critic/value_mean", "grad_norm")
    for one, other in zip(read_metrics(whole.folder), read_metrics(again.folder), strict=True):
        assert [one[name] for name in names] == [other[name] for name in names]


async def test_groups_of_one_episode_train_with_a_critic(train_spec: Any, tmp_path: Path) -> None:
    changes = {"rewards": {"credit": {"method": "gae"}}, "rollout": {"samples_per_task": 1}}
    trainer = begin_training(train_spec(train={"steps": 2, "critic": KINDS["probe"]}, **changes), tmp_path / "runs")
    result = await trainer.run()
    told = read_metrics(trainer.folder)
    assert (result.steps, len(told)) == (2, 2)
    for line in told:
        assert line["groups/equal"] == 0
        assert math.isfinite(line["critic/loss"])
        assert line["critic/grad_norm"] > 0


async def test_a_method_that_needs_a_critic_does_not_start_without_one(train_spec: Any, tmp_path: Path) -> None:
    trainer = begin_training(train_spec(rewards={"credit": {"method": "turn_ppo"}}), tmp_path / "runs")
    with pytest.raises(TrainError, match=r"`turn_ppo` needs a critic: add `train\.critic"):
        await trainer.run()


@pytest.mark.slow
async def test_the_spec_that_ships_trains_a_few_steps(tmp_path: Path) -> None:
    """specs/train_critic.yaml, with small batches and an untaught model."""
    path = Path(__file__).parents[3] / "specs/train_critic.yaml"
    small = ["train.steps=2", "train.tasks_per_step=2", "rollout.samples_per_task=2", "tasks.with.parcels=3"]
    loaded = load_spec(path, ["model.path=tiny-qwen2", *small])
    trainer = begin_training(loaded, tmp_path / "runs")
    result = await trainer.run()
    assert result.steps == 2
    assert result.checkpoint is not None
    assert (result.checkpoint / "critic/shard-00001-model-00001-of-00001.safetensors").is_file()
    for line in read_metrics(trainer.folder):
        assert (line["updates"], line["groups/used"]) == (16, 2)
        assert line["critic/loss"] > 0
    assert read_metrics(trainer.folder)[1]["critic/value_mean"] != 0
