"""One batch of rows -> an update: the same however it is cut, and what its settings say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from slow_cases import slow_but
from training_rows import row_of

from engine.errors import TrainError
from engine.rewards.credit import Member
from engine.rewards.ledger import Ledger
from engine.rewards.sealed import SealedLedger
from engine.schemas.credit import CreditMethod, EntryCredit, TurnReturnCredit
from engine.schemas.reward import RewardEvent
from engine.schemas.train import TrainSpec
from engine.store.rows.row import RowCredit, TrainingRow
from engine.train.credited_rows import RewardKl
from engine.train.learner import Learner
from engine.train.optimizers import learning_rate
from engine.train.policy import Policy


def sealed(rewards: Sequence[float]) -> SealedLedger:
    ledger = Ledger()
    for turn, value in enumerate(rewards):
        ledger.post(RewardEvent(turn=turn, value=float(value)), turn)
    return ledger.seal(len(rewards))


def make_rows(groups: int = 3, samples: int = 4, seed: int = 0) -> list[TrainingRow]:
    """Rows of two turns; a group shares its prompt."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        prompt = rng.integers(5, 900, rng.integers(3, 40))
        for sample in range(samples):
            sizes = rng.integers(1, 9, 2)
            between = rng.integers(5, 900, 4)
            ids = np.concatenate([prompt, rng.integers(5, 900, sizes[0]), between, rng.integers(5, 900, sizes[1])])
            parts = [(0, -1, len(prompt)), (1, 0, sizes[0]), (0, -1, 4), (1, 1, sizes[1])]
            mask = np.concatenate([np.full(count, kind) for kind, _, count in parts])
            turns = np.concatenate([np.full(count, turn) for _, turn, count in parts])
            values = rng.normal(size=2)
            rows.append(row_of({
                "input_ids": ids.astype(np.int32), "loss_mask": mask.astype(np.int32),
                "turn_ids": turns.astype(np.int32), "weight_versions": np.where(mask == 1, 0, -1).astype(np.int32),
                "logprobs": np.where(mask == 1, -6.9 + 0.1 * rng.normal(size=len(ids)), 0.0).astype(np.float32),
                "advantages": np.where(mask == 1, values[np.maximum(turns, 0)], 0.0).astype(np.float32),
                "images": [], "task_id": f"t{group}", "episode_id": f"t{group}/{sample}", "branch": 0,
            }))  # fmt: skip
    return rows


def learner_of(folder: Path, credit: CreditMethod | None = None, **train: Any) -> Learner:
    spec = TrainSpec.model_validate({"optimizer": {"lr": 1e-3, "max_grad_norm": None}} | train)
    policy = Policy.load(folder, spec, temperature=1.0, vocab=None, vision=None)
    return Learner(policy, spec, objectives=[RewardKl(spec.kl.coefficient, credit)] if spec.kl.in_reward else [])


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.policy.state().items()}


@pytest.mark.parametrize(
    "loss",
    slow_but(["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "reinforce", "ppo"], "gspo"),
)
def test_the_update_is_the_same_however_the_rows_are_packed(tiny_model_dir: Path, loss: str) -> None:
    rows = make_rows()
    told, after = [], []
    for memory in (
        {"max_tokens_per_microbatch": 1},
        {"max_tokens_per_microbatch": 90, "share_prefixes": False},
        {"logits_chunk_elements": 3000},
    ):
        # so large an epsilon has AdamW move by the gradient itself, not by its sign
        learner = learner_of(
            tiny_model_dir,
            loss={"kind": loss},
            memory=memory,
            entropy_coefficient=0.01,
            optimizer={"lr": 1.0, "eps": 10.0},
        )
        told.append(learner.step(rows, 0))
        after.append(weights(learner))
    for other, moved in zip(told[1:], after[1:], strict=True):
        assert set(other) == set(told[0])
        for name, value in told[0].items():
            assert other[name] == pytest.approx(value, rel=2e-4, abs=1e-6), name
        for name, tensor in after[0].items():
            torch.testing.assert_close(moved[name], tensor, rtol=0, atol=2e-6)


def test_loss_and_gradient_are_those_of_plain_transformers(tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    rows = make_rows()
    learner = learner_of(tiny_model_dir, loss={"kind": "grpo"}, rollout_correction={"kind": "truncate", "high": 1.02})
    told = learner.step(rows, 0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    losses, difference = [], []
    for row in rows:
        ids = torch.tensor(row.branch.input_ids, dtype=torch.int64)
        logits = model(ids[None]).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        mask = torch.tensor(row.loss_mask()[1:] == 1)
        ratio = (logprobs - logprobs.detach())[mask].exp()
        sampler = torch.tensor(row.branch.logprobs[1:])[mask]
        weight = (logprobs.detach()[mask] - sampler).exp().clamp(0.0, 1.02)
        losses.append((-ratio * weight * torch.tensor(row.on_tokens(row.advantages)[1:])[mask]).mean())
        difference.append((logprobs.detach()[mask] - sampler).abs())
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert told["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert told["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert told["sampler/diff_mean"] == pytest.approx(float(torch.cat(difference).mean()), rel=1e-4)
    assert told["sampler/diff_max"] == pytest.approx(float(torch.cat(difference).max()), rel=1e-4)


def test_several_updates_are_clipped_against_the_weights_before_the_first(tiny_model_dir: Path) -> None:
    rows = make_rows()
    learner = learner_of(tiny_model_dir, update_epochs=2, minibatches=2, optimizer={"lr": 0.02})
    told = learner.step(rows, 0)
    assert told["updates"] == 4
    assert told["policy/ratio_max"] > 1.2  # greatest of all updates: later ones have moved away
    assert told["policy/clip_low"] + told["policy/clip_high"] > 0
    once = learner_of(tiny_model_dir, optimizer={"lr": 0.02}).step(rows, 0)
    assert once["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert once["policy/clip_low"] == once["policy/clip_high"] == 0


def test_against_the_samplers_log_probs_nothing_is_corrected_twice(tiny_model_dir: Path) -> None:
    told = learner_of(tiny_model_dir, proximal_logprobs="sampler").step(make_rows(), 0)
    assert told["correction/weight_mean"] == 1.0
    assert told["policy/ratio_max"] > 1.0


def test_a_mini_batch_keeps_a_task_together_and_takes_each_once(tiny_model_dir: Path) -> None:
    from engine.train.loss_columns import LossColumns, minibatches

    rows = make_rows(groups=5)
    columns = [LossColumns.of(row) for row in rows]
    parts = [[of.row for of in part] for part in minibatches(columns, 3, seed=(0, 1, 2))]
    assert [len(part) for part in parts] == [8, 8, 4]
    assert sorted(row.episode.episode_id for part in parts for row in part) == sorted(
        row.episode.episode_id for row in rows
    )
    assert all(len({row.episode.task_id for row in part}) * 4 == len(part) for part in parts)
    assert [len(part) for part in minibatches(columns[:4], 3, seed=(0, 0, 0))] == [4]
    order = [[row.episode.task_id for row in part] for part in parts]
    assert order != [[of.row.episode.task_id for of in part] for part in minibatches(columns, 3, seed=(0, 2, 2))]


def test_the_learning_rate_warms_up_and_falls() -> None:
    linear = TrainSpec.model_validate({"steps": 10, "optimizer": {"lr": 1.0, "warmup_steps": 2, "schedule": "linear"}})
    assert [round(learning_rate(linear, step), 4) for step in range(10)] == [
        0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125,
    ]  # fmt: skip
    cosine = TrainSpec.model_validate({"steps": 4, "optimizer": {"lr": 2.0, "schedule": "cosine"}})
    np.testing.assert_allclose(
        [learning_rate(cosine, step) for step in range(4)], [2.0, 1.7071068, 1.0, 0.2928932], rtol=1e-6
    )


def test_what_is_frozen_stays_and_freezing_everything_is_an_error(tiny_model_dir: Path) -> None:
    learner = learner_of(tiny_model_dir, freeze=["embed", r"layers\.0\."])
    before = {name: tensor.clone() for name, tensor in learner.policy.model.state_dict().items()}
    learner.step(make_rows(), 0)
    after = learner.policy.model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert not [name for name in moved if "layers.0." in name]
    with pytest.raises(TrainError, match="train"):
        learner_of(tiny_model_dir, freeze=["."])


def test_the_constant_of_the_default_loss_is_the_mean_length_of_the_first_step(tiny_model_dir: Path) -> None:
    batches = [make_rows(seed=seed) for seed in range(3)]
    learner = learner_of(tiny_model_dir, optimizer={"lr": 1e-3}, minibatches=2)
    told = [learner.step(rows, step) for step, rows in enumerate(batches)]
    first = sum(int(row.loss_mask().sum()) for row in batches[0]) / len(batches[0])
    assert [values["loss/length"] for values in told] == [first] * 3


def test_a_constant_that_holds_for_all_steps_changes_no_update(tiny_model_dir: Path) -> None:
    """So it may come from the first step's own episodes. `eps` and clipping, which do depend on it, are off."""
    after = []
    for length in (None, 2, 2000):
        optimizer = {"lr": 1e-3, "eps": 1e-30, "max_grad_norm": None}
        learner = learner_of(tiny_model_dir, loss={"kind": "dr_grpo", "length": length}, optimizer=optimizer)
        for step in range(2):
            learner.step(make_rows(seed=step), step)
        after.append(torch.cat([tensor.flatten() for tensor in weights(learner).values()]))
    for other in after[1:]:
        moved_otherwise = (other - after[0]).abs() > 1e-5
        assert float(moved_otherwise.float().mean()) < 1e-3  # where a gradient is a rounding error


def test_the_constant_of_the_loss_comes_back_with_a_checkpoint(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A resumed training divides by the same constant; a step that was not made leaves none."""
    whole = learner_of(tiny_model_dir)
    whole.save_state(tmp_path / "none")
    bad = make_rows()
    bad[0].advantages[:] = np.inf
    with pytest.raises(TrainError):
        whole.step(bad, 0)
    first = whole.step(make_rows(), 0)["loss/length"]
    whole.save_state(tmp_path / "state")
    fresh = learner_of(tiny_model_dir)
    fresh.load_state(tmp_path / "state")
    told = [each.step(make_rows(seed=1), 1) for each in (whole, fresh)]
    assert told[0] == told[1]
    assert told[0]["loss/length"] == first
    fresh.load_state(tmp_path / "none")
    other = fresh.step(make_rows(seed=2), 1)["loss/length"]
    assert other == learner_of(tiny_model_dir).step(make_rows(seed=2), 0)["loss/length"] != first


def test_no_update_is_made_of_what_is_no_number(tiny_model_dir: Path) -> None:
    learner = learner_of(tiny_model_dir)
    rows = make_rows()
    rows[3].advantages[:] = np.inf
    before = weights(learner)
    with pytest.raises(TrainError, match="the update was not applied") as caught:
        learner.step(rows, 0)
    assert (caught.value.kind, learner.updates) == ("diverged", 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(learner).items())


def test_the_optimizers_state_comes_back(tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = make_rows()
    whole, parted = learner_of(tiny_model_dir), learner_of(tiny_model_dir)
    whole.step(rows, 0)
    parted.step(rows, 0)
    random = torch.get_rng_state()
    parted.save_state(tmp_path / "state")
    torch.manual_seed(77)
    fresh = learner_of(tiny_model_dir)
    fresh.load_state(tmp_path / "state")
    assert torch.equal(torch.get_rng_state(), random)
    told = [learner.step(make_rows(seed=1), 1) for learner in (whole, fresh)]
    assert told[0] == told[1]
    assert all(torch.equal(weights(whole)[name], tensor) for name, tensor in weights(fresh).items())
    save_file({"model.nothing::exp_avg": torch.zeros(2)}, tmp_path / "state/optimizer/strange.safetensors")
    with pytest.raises(TrainError, match=r"`model.nothing::exp_avg` .* belongs to no trained parameter"):
        fresh.load_state(tmp_path / "state")


def test_kl_in_the_reward_is_the_update_with_credit_of_rewards_less_penalties(tiny_model_dir: Path) -> None:
    """By hand: log-probs of plain transformers for the moved policy and for the model's folder; returns against those of the group's
    other episodes. Penalties of a group's mean length are in no advantage, and a turn of a later row counts for an earlier one."""
    from transformers import AutoModelForCausalLM

    generator = np.random.default_rng(2)
    rows = make_rows()
    rewards = [generator.normal(size=2) for _ in rows]
    for place, row in enumerate(rows):
        first = place - place % 4
        members = {rows[at].episode.episode_id: Member(ledger=sealed(rewards[at])) for at in range(first, first + 4)}
        rows[place] = replace(row, credit=RowCredit(members=members), advantages=np.full_like(row.advantages, 77.0))
    optimizer = {"lr": 1.0, "eps": 10.0, "max_grad_norm": None}
    credit = TurnReturnCredit(gamma=0.5)
    learner = learner_of(tiny_model_dir, credit, kl={"coefficient": 0.5, "in": "reward"}, optimizer=optimizer)
    other = learner_of(tiny_model_dir, optimizer=optimizer)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for mine, its in zip(
            dict(learner.policy.named_parameters()).values(),
            dict(other.policy.named_parameters()).values(),
            strict=True,
        ):
            mine += 0.02 * torch.randn(mine.shape, generator=noise)
            its.copy_(mine)
    moved = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    moved.load_state_dict(learner.policy.net.model.state_dict())
    returns, whole = [], []
    for row, earned in zip(rows, rewards, strict=True):
        ids = torch.tensor(row.branch.input_ids, dtype=torch.int64)
        with torch.no_grad():
            own, its = (
                net(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
                for net in (moved, reference)
            )
        kl = (own - its)[row.loss_mask()[1:] == 1]
        turns = row.branch.turn_ids[row.loss_mask() == 1]
        last = earned[1] - 0.5 * kl[turns == 1].sum()
        returns.append([earned[0] - 0.5 * kl[turns == 0].sum() + 0.5 * last, last])
        whole.append(kl)
    of_groups = np.array(returns).reshape(3, 4, 2)
    advantages = (4 * of_groups - of_groups.sum(1, keepdims=True)) / 3
    changed = [
        replace(row, credit=None, advantages=of[row.branch.turn_ids[row.places]].astype(np.float32))
        for row, of in zip(rows, advantages.reshape(-1, 2), strict=True)
    ]
    told = learner.step(rows, 0)
    other.step(changed, 0)
    assert told["policy/kl_ref"] == pytest.approx(float(np.concatenate(whole).mean()), rel=1e-3)
    for name, tensor in weights(other).items():
        torch.testing.assert_close(weights(learner)[name], tensor, rtol=0, atol=2e-6)


@pytest.mark.parametrize("credit", [None, EntryCredit(use="m:f")])
def test_kl_in_the_reward_needs_a_credit_method_that_takes_penalties(
    credit: CreditMethod | None, tiny_model_dir: Path
) -> None:
    with pytest.raises(TrainError, match=r"the credit method takes no penalties of tokens; use `train.kl.in: loss`"):
        learner_of(tiny_model_dir, credit, kl={"coefficient": 0.5, "in": "reward"})
