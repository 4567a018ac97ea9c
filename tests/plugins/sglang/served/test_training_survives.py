"""Trainings on real servers: one of two dies during a push, the only one dies, and roles with frozen weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import trajectories_of
from trainings import begin_training
from written_specs import TALKS_ON_WHEN_CUT, listener_spec, save_spec

from engine.errors import OutageError, TrainError
from engine.plugins.roles.models import RoleModel, RoleReply
from engine.plugins.servers.pool import Server
from engine.schemas.generation import GenerateRequest, Generation, SamplingParams
from engine.schemas.message import Message
from engine.spec.load import load_spec
from engine.train.checkpoint import checkpoints_of
from engine.train.metrics import read_metrics
from engine.train.trainer import Trainer

Running = Any
LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
PROBE = [Message(role="user", content="Say word 1.")]


def begin(folder: Path, model: Path, backend: dict[str, Any], train: dict[str, Any], **changes: Any) -> Trainer:
    """A training of two turns per episode, with four updates."""
    spec = {
        **listener_spec("served", model),
        "backend": {"kind": "sglang", **backend},
        "machine": TALKS_ON_WHEN_CUT,
        "limits": {"turn_tokens": 6, "assistant_turns": 2, "episode_tokens": 64},
        "rewards": {"credit": {"method": "turn_return", "gamma": 0.5}},
        "rollout": {"samples_per_task": 4, "seed": 3},
        "train": {"device": "cpu", "steps": 4, "tasks_per_step": 2, "optimizer": {"lr": 0.01}, "dynamic_sampling": False,
                  "checkpoints": {"every": 100}} | train,
    } | changes  # fmt: skip
    path = save_spec(folder / "served.yaml", spec)
    loaded = load_spec(path, [])
    return begin_training(loaded, folder / "runs")


def kill_in_push(patch: pytest.MonkeyPatch, victim: Running, number: int, *, sent: bool) -> list[str]:
    """Kill a server when the request of its `number`th push of weights is about to be sent, or else just after it was sent."""
    true, seen = Server.json, list[str]()

    async def json(self: Server, method: str, path: str, body: Any = None, **more: Any) -> Any:
        here = self.url == victim.url and (path.startswith("/update_weights") or path == "/load_lora_adapter")
        if not here:
            return await true(self, method, path, body, **more)
        seen.append(path)
        if len(seen) != number:
            return await true(self, method, path, body, **more)
        if sent:
            call = asyncio.ensure_future(true(self, method, path, body, **more))
            await asyncio.sleep(0.001)
            victim.kill()
            return await call
        victim.kill()
        return await true(self, method, path, body, **more)

    patch.setattr(Server, "json", json)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "sent"),
    [
        ({"weight_sync": {"method": "disk"}}, True),
        pytest.param({"weight_sync": {"method": "tensors"}}, False, marks=pytest.mark.exhaustive),
        pytest.param({"weight_sync": {"method": "collective"}}, True, marks=pytest.mark.exhaustive),
        pytest.param({"weight_sync": {"method": "adapter"}, "lora": LORA}, True, marks=pytest.mark.exhaustive),
    ],
    ids=["disk", "tensors", "collective", "adapter"],
)
async def test_training_goes_on_when_one_of_two_servers_dies_during_a_push(
    sglang_server: Running,
    second_server: Running,
    tiny_model_dir: Path,
    tmp_path: Path,
    own_weights: None,
    monkeypatch: pytest.MonkeyPatch,
    train: dict[str, Any],
    sent: bool,
) -> None:
    """Every token of the batches after it is sampled with the weights that were trained."""
    backend = {"urls": [sglang_server.url, second_server.url], "wait": "60s", "timeout": "60s"}
    trainer = begin(tmp_path, tiny_model_dir, backend, train)
    seen = kill_in_push(monkeypatch, second_server, 2, sent=sent)
    result = await trainer.run()
    assert len(seen) >= 2
    assert (result.steps, result.faults) == (4, [])
    for line in read_metrics(trainer.folder):
        assert line["episodes/count"] == 8
        assert line["sampler/diff_max"] < 1e-4
        assert line["staleness/max"] == 0.0
    versions: set[int] = set()
    for trajectory in trajectories_of(trainer.folder / "rollouts"):
        for branch in trajectory.branches:
            versions |= set(branch.weight_versions[branch.loss_mask == 1].tolist())
    assert versions == {0, 1, 2, 3}


@pytest.mark.slow
async def test_training_stops_with_a_checkpoint_when_the_only_server_dies_during_a_push(
    second_server: Running, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint holds the update whose weights could not be sent; its folder is in the message."""
    backend = {"urls": [second_server.url], "wait": "3s", "timeout": "10s"}
    trainer = begin(tmp_path, tiny_model_dir, backend, {"weight_sync": {"method": "disk"}})
    kill_in_push(monkeypatch, second_server, 3, sent=True)  # the weights at the start, those of step 1, those of step 2
    with pytest.raises(OutageError, match=r"`backend\.wait`") as caught:
        await trainer.run()
    (kept,) = checkpoints_of(trainer.folder)
    assert kept.name == "step-000002"
    assert str(kept) in str(caught.value)


class Probes:
    """Before each answer of the user, its model and the policy are asked one fixed question at temperature 0."""

    def __init__(self, patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
        self.role: list[Generation] = []
        self.policy: dict[int, Generation] = {}
        """The first reply of each version."""
        true = RoleModel.reply

        async def probed(model: RoleModel, *args: Any, **kwargs: Any) -> RoleReply:
            asked = model._request(PROBE, "probe", 0, 1, ())
            self.role.append(await model._served.backend.generate(asked))
            version = trainer.state.version
            if version not in self.policy:
                self.policy[version] = await trainer.backend.generate(as_policy(asked))
            return await true(model, *args, **kwargs)

        patch.setattr(RoleModel, "reply", probed)

    def changes(self) -> tuple[int, int]:
        """Number of different replies of the role, and of the policy."""
        return different(self.role), different(list(self.policy.values()))


def different(replies: list[Generation]) -> int:
    """Number of different replies; log-probs within 1e-4 are equal, because rounding depends on the batch."""
    found: list[Generation] = []
    for reply in replies:
        if not any(
            reply.output_ids.tolist() == other.output_ids.tolist()
            and np.allclose(reply.logprobs, other.logprobs, rtol=0, atol=1e-4)
            for other in found
        ):
            found.append(reply)
    return len(found)


def as_policy(request: GenerateRequest) -> GenerateRequest:
    """The same question to the policy."""
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return GenerateRequest.read({**fields, "base_model": False, "sampling": SamplingParams(temperature=0.0)})


def played(**changes: Any) -> dict[str, Any]:
    user = {"prompt": [{"role": "user", "content": "{{reply}}"}], "turn_tokens": 4, "sampling": {"temperature": 0.0}}
    return user | {"grader": {"use": "code_for_training:Listener"}} | changes


@pytest.mark.parametrize("method", ["adapter", "tensors"])
async def test_a_frozen_user_on_the_policys_server_keeps_the_base_model_under_lora(
    method: str,
    sglang_server: Running,
    tiny_model_dir: Path,
    tmp_path: Path,
    own_weights: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With merged tensors the server has no base model any more, so such a spec is refused before anything is sampled."""
    train = {"weight_sync": {"method": method}, "lora": LORA, "optimizer": {"lr": 0.05}}
    trainer = begin(tmp_path, tiny_model_dir, {"urls": [sglang_server.url]}, train, user=played())
    probes = Probes(monkeypatch, trainer)
    if method == "tensors":
        with pytest.raises(TrainError, match="give it a `backend` of its own"):
            await trainer.run()
        assert not probes.role
        return
    await trainer.run()
    assert len(probes.role) >= 32
    assert probes.changes() == (1, 4)


@pytest.mark.slow
@pytest.mark.exhaustive
async def test_a_frozen_user_with_a_server_of_its_own_keeps_its_weights_when_all_are_trained(
    sglang_server: Running,
    second_server: Running,
    tiny_model_dir: Path,
    tmp_path: Path,
    own_weights: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = {"weight_sync": {"method": "disk"}, "optimizer": {"lr": 0.05}}
    user = played(backend={"kind": "sglang", "urls": [second_server.url]})
    trainer = begin(tmp_path, tiny_model_dir, {"urls": [sglang_server.url]}, train, user=user)
    probes = Probes(monkeypatch, trainer)
    await trainer.run()
    assert len(probes.role) >= 32
    assert probes.changes() == (1, 4)


async def test_a_user_with_the_policys_weights_changes_with_them(
    sglang_server: Running,
    tiny_model_dir: Path,
    tmp_path: Path,
    own_weights: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same probe sees `weights: policy` move, so it would see a frozen role move. With a larger rate the user may soon say nothing."""
    train = {"weight_sync": {"method": "disk"}, "optimizer": {"lr": 0.005}}
    trainer = begin(tmp_path, tiny_model_dir, {"urls": [sglang_server.url]}, train, user=played(weights="policy"))
    probes = Probes(monkeypatch, trainer)
    await trainer.run()
    assert probes.changes() == (4, 4)
