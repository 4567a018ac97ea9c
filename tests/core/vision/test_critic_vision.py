"""A critic of a model that sees: its values depend on the images, and a packed step is the step of each row by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_policy_vision import gallery_rows

from engine.rewards.credit import Member
from engine.rewards.ledger import Ledger
from engine.schemas.credit import GaeCredit
from engine.schemas.reward import RewardEvent
from engine.schemas.train import TrainSpec
from engine.train.critic import Critic
from engine.train.distributed import SingleProcessGroup
from engine.train.learner import Learner
from engine.train.policy import Policy, open_model


@pytest.mark.slow  # by default: the critics of rows without images in tests/core/train, and a policy's rows with images
@pytest.mark.parametrize("kind", ["probe", "head", "network"])
async def test_values_of_rows_with_images(kind: str, make_spec: Any, run_spec: Any, vlm: Any) -> None:
    rows, vision = await gallery_rows(make_spec, run_spec, "qwen2_5_vl")
    for number, row in enumerate(rows):
        ledger = Ledger()
        ledger.post(RewardEvent(turn=1, value=float(number)), 1)
        row |= {"group": {row["episode_id"]: Member(ledger.seal(len(row["turn_rewards"])))}, "cut": number == 0}
        row["advantages"] = np.zeros(len(row["input_ids"]), np.float32)
    learners, told = [], []
    for most in (1, 8192):
        spec = TrainSpec.model_validate(
            {"device": "cpu", "memory": {"max_tokens_per_microbatch": most}, "loss": {"kind": "ppo"}}
            | {"critic": {"kind": kind, "max_grad_norm": None}}
        )
        assert spec.critic is not None
        folder = vlm("qwen2_5_vl")
        policy = Policy.load(folder, spec, temperature=1.0, vocab=None, vision=vision)
        own = open_model(folder, spec, temperature=1.0, vocab=None, vision=vision) if spec.critic.own_model else None
        critic = Critic(spec.critic, GaeCredit(), policy, SingleProcessGroup(), model=own)
        torch.nn.init.normal_(critic.head.last.weight, generator=torch.Generator().manual_seed(0))
        learners.append(Learner(policy, spec, critic=critic))
        told.append(learners[-1].step(rows, 0))
    # Eight images of three: three in the pass of each row, or three in one pass.
    assert [metrics.pop("images/encoded") for metrics in told] == [6 / 8, 3 / 8]
    assert told[0] == pytest.approx(told[1], rel=1e-3, abs=1e-5)
    whole = learners[1]
    values = whole._values(rows)
    assert len(values[0]) == int(rows[0]["loss_mask"].sum()) + 1
    other = [image["image"] for row in rows for image in row["images"]][-1]
    first = dict(rows[0]["images"][0])
    if first["image"] != other:  # of one size: only the pixels differ
        swapped = rows[0] | {"images": [first | {"image": other}, *rows[0]["images"][1:]]}
        assert not np.allclose(whole._values([swapped])[0], values[0], atol=1e-6)
