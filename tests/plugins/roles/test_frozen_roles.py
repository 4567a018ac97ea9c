"""A model-played user keeps its weights while its model is trained, unless the spec says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from service_inputs import service_inputs
from slow_cases import each_once
from trainings import begin_training

from engine.errors import TrainError
from engine.plugins.roles.models import RoleModel, RoleReply
from engine.plugins.roles.players import role_weights
from engine.schemas.message import Message
from engine.spec.added import played_roles
from engine.spec.load import load_spec

PROBE = [Message(role="user", content="Say word 1.")]


def spec_with_user(train_spec: Any, train: dict[str, Any], **changes: Any) -> Path:
    user = {"prompt": [{"role": "user", "content": "{{reply}}"}], "turn_tokens": 4}
    user |= {"grader": {"use": "code_for_training:Listener"}, **changes.pop("user", {})}
    made: Path = train_spec(
        train={"steps": 2, "tasks_per_step": 2, "optimizer": {"lr": 0.05}, "dynamic_sampling": False} | train,
        user=user,
        backend={"kind": "local", "dtype": "float32", "max_batch": 16, "deterministic": True} | changes,
    )
    return made


async def probes(spec: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[bytes, int]:
    """Train; beside each answer of the user, its model is asked one fixed question. Counts the different log-probs."""
    found: dict[bytes, int] = {}
    original = RoleModel.reply

    async def probed(self: RoleModel, *args: Any, **kwargs: Any) -> RoleReply:
        request = self._request(PROBE, "probe", 0, 1, ())
        reply = await self._served.backend.generate(request)
        key = np.asarray(reply.output_ids).tobytes() + np.asarray(reply.logprobs).tobytes()
        found[key] = found.get(key, 0) + 1
        return await original(self, *args, **kwargs)

    monkeypatch.setattr(RoleModel, "reply", probed)
    loaded = load_spec(spec)
    await begin_training(loaded, out).run()
    return found


@pytest.mark.parametrize(("lora", "weights"), each_once([None, {"rank": 4}], ["frozen", "policy"]))
async def test_the_log_probs_of_a_role_change_only_with_the_policys_weights(
    train_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, int] | None, weights: str
) -> None:
    spec = spec_with_user(train_spec, {"lora": lora} if lora else {}, user={"weights": weights})
    found = await probes(spec, tmp_path / "runs", monkeypatch)
    assert sum(found.values()) >= 16  # eight episodes in each of two steps
    assert len(found) == (1 if weights == "frozen" else 2)


SERVERS = {"kind": "sglang", "urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"]}


@pytest.mark.parametrize(
    ("train", "user", "expected"),
    [
        ({}, {}, "impossible"),
        ({"lora": {}, "weight_sync": {"method": "disk"}}, {}, "impossible"),
        ({"lora": {}, "weight_sync": {"method": "tensors"}}, {"backend": SERVERS}, "impossible"),
        ({}, {"backend": {"kind": "sglang", "urls": ["http://127.0.0.1:2/"], "retries": 1}}, "impossible"),
        ({}, {"backend": {"kind": "sglang", "urls": ["http://127.0.0.1:3"]}}, "apart"),
        ({}, {"backend": {"kind": "local"}}, "apart"),
        ({}, {"model": {"path": "another"}}, "apart"),
        ({"lora": {}}, {}, "base"),
        ({"lora": {}}, {"backend": {"kind": "sglang", "urls": ["http://127.0.0.1:2"], "retries": 1}}, "apart"),
        ({"lora": {}}, {"weights": "policy"}, "policy"),
        ({}, {"weights": "policy"}, "policy"),
    ],
)
def test_the_weights_of_a_role_on_servers(
    train_spec: Any, train: dict[str, Any], user: dict[str, Any], expected: str
) -> None:
    played = {"prompt": [{"role": "user", "content": "{{reply}}"}], **user}
    spec = load_spec(train_spec(train=train, user=played, backend=SERVERS)).spec
    (role,) = played_roles(spec).values()
    assert role_weights(spec, role) == expected
    assert role_weights(spec.model_copy(update={"train": None}), role) == "apart"


async def test_frozen_weights_that_cannot_be_had_are_refused(train_spec: Any, tiny_tokenizer_dir: Path) -> None:

    from engine.backends.scripted import ScriptedBackend
    from engine.plugins.roles.models import RoleModels
    from engine.schemas.script import Script
    from engine.tokens.loading import load_format

    loaded = load_spec(train_spec(user={"prompt": [{"role": "user", "content": "{{reply}}"}]}, backend=SERVERS))
    form = load_format(loaded.spec.model, loaded.base)
    backend = ScriptedBackend(Script.model_validate(["policy"]), form)
    await RoleModels(service_inputs(loaded, form, backend)).start()  # a run trains nothing
    with pytest.raises(
        TrainError, match="on the same servers, and all weights are trained; give it a `backend` of its own"
    ):
        await RoleModels(service_inputs(loaded, form, backend, training=True)).start()


async def test_a_role_of_the_base_model_names_no_adapter(train_spec: Any) -> None:
    from engine.backends.backend import PolicyAdapter
    from engine.backends.slots import Slots
    from engine.plugins.roles.models import RoleModels
    from engine.plugins.servers.reply_call import ReplyCall
    from engine.plugins.sglang.client import SGLangBackend
    from engine.tokens.loading import load_format

    loaded = load_spec(
        train_spec(train={"lora": {}}, user={"prompt": [{"role": "user", "content": "{{reply}}"}]}, backend=SERVERS)
    )
    form = load_format(loaded.spec.model, loaded.base)
    backend = SGLangBackend.open(loaded.spec.backend, form, loaded)
    backend.policy = PolicyAdapter(name="policy-1", version=1)
    roles = RoleModels(service_inputs(loaded, form, backend, training=True))
    await roles.start()
    sent: list[str | None] = []
    request = roles.model("user")._request(PROBE, "a/0", 0, 1, ())
    from dataclasses import replace

    for asked in (request, replace(request, base_model=False)):
        call = ReplyCall(backend, asked, Slots(1))
        call.begin_part(asked, asked.input_ids, 0)
        sent.append(call.asked.adapter)
    assert sent == [None, "policy-1"]


def test_an_evaluation_of_a_checkpoint_keeps_the_model_of_frozen_roles(train_spec: Any, tiny_model_dir: Path) -> None:
    from engine.plugins.evaluation.command import frozen_role_models

    played = {"prompt": [{"role": "user", "content": "{{reply}}"}]}
    spec = train_spec(user=played)
    loaded = load_spec(spec, ["model.path=checkpoint", *frozen_role_models(spec, [])]).spec
    assert loaded.user is not None
    assert loaded.user.model is not None
    assert (loaded.model.path, loaded.user.model.path) == ("checkpoint", str(tiny_model_dir))
    for user in ({"weights": "policy"}, {"model": {"path": "another"}}, {"backend": {"kind": "local", "max_batch": 1}}):
        assert frozen_role_models(train_spec(user=played | user), []) == []
