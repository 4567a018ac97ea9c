"""A critic of a model that sees: its values depend on the images, and a packed step is the step of each row by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_policy_vision import gallery_rows
from training_rows import with_branch

from engine.plugins.critic.critic import Critic
from engine.plugins.critic.spec import GaeCredit, ValueCritic
from engine.rewards.credit import Member
from engine.rewards.ledger import Ledger
from engine.schemas.reward import RewardEvent
from engine.schemas.train import TrainSpec
from engine.store.rows.row import RowCredit
from engine.train.distributed import ProcessGroup
from engine.train.learner import Learner
from engine.train.loss_columns import LossColumns
from engine.train.policy import Policy, open_model


@pytest.mark.slow  # by default: the critics of rows without images in tests/core/train, and a policy's rows with images
@pytest.mark.parametrize("kind", ["probe", "head", "network"])
async def test_values_of_rows_with_images(kind: str, make_spec: Any, run_spec: Any, vlm: Any) -> None:
    rows, vision = await gallery_rows(make_spec, run_spec, "qwen2_5_vl")
    for number, row in enumerate(rows):
        ledger = Ledger()
        ledger.post(RewardEvent(turn=1, value=float(number)), 1)
        members = {row.episode.episode_id: Member(ledger=ledger.seal(len(row.episode.turn_rewards)))}
        credit = RowCredit(members=members, needs_values=True, cut=number == 0)
        rows[number] = replace(row, credit=credit, advantages=np.zeros_like(row.advantages))
    learners, told = [], []
    for most in (1, 8192):
        spec = TrainSpec.model_validate(
            {"device": "cpu", "memory": {"max_tokens_per_microbatch": most}, "loss": {"kind": "ppo"}}
            | {"critic": {"kind": kind, "max_grad_norm": None}}
        )
        assert isinstance(spec.critic, ValueCritic)
        folder = vlm("qwen2_5_vl")
        policy = Policy.load(folder, spec, temperature=1.0, vocab=None, vision=vision)
        own = open_model(folder, spec, temperature=1.0, vocab=None, vision=vision) if spec.critic.own_model else None
        critic = Critic(spec.critic, GaeCredit(), policy, ProcessGroup(), model=own)
        torch.nn.init.normal_(critic.head.last.weight, generator=torch.Generator().manual_seed(0))
        learners.append(Learner(policy, spec, objectives=[critic]))
        told.append(learners[-1].step(rows, 0))
    # Eight images of three: three in the pass of each row, or three in one pass.
    assert [metrics.pop("images/encoded") for metrics in told] == [6 / 8, 3 / 8]
    assert told[0] == pytest.approx(told[1], rel=1e-3, abs=1e-5)
    whole = learners[1]
    values = critic.values_of([LossColumns.of(row) for row in rows], whole)
    assert len(values[0]) == len(rows[0].places) + 1
    other = [image.image for row in rows for image in row.branch.images][-1]
    first, *rest = rows[0].branch.images
    if first.image != other:  # of one size: only the pixels differ
        swapped = with_branch(rows[0], images=[replace(first, image=other), *rest])
        assert not np.allclose(critic.values_of([LossColumns.of(swapped)], whole)[0], values[0], atol=1e-6)
