"""Which backend a part speaks through, and where its files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from service_inputs import service_inputs
from written_specs import save_spec

from engine.backends.scripted import ScriptedBackend
from engine.errors import SpecCodeError
from engine.plugins.roles.models import RoleModels
from engine.plugins.roles.players import role_section
from engine.schemas.message import Message
from engine.schemas.script import Script
from engine.spec.added import played_roles
from engine.spec.load import LoadedSpec, load_spec
from engine.tokens.loading import load_format

PROMPT = [{"role": "user", "content": "{{reply}}"}]


def loaded(tmp_path: Path, tokenizer: Path, user: dict[str, Any], **changes: Any) -> LoadedSpec:
    document = {
        "spec": "episode/v1",
        "name": "demo",
        "model": {"path": str(tokenizer)},
        "backend": {"kind": "scripted", "replies": ["policy"]},
        "tasks": {"source": "inline", "rows": [{}]},
        "prompt": [{"role": "user", "content": "hi"}],
        "user": {"prompt": PROMPT, **user},
        **changes,
    }
    path = save_spec(tmp_path / "s.yaml", document)
    return load_spec(path)


@pytest.mark.parametrize(
    ("user", "backend", "shares"),
    [
        ({}, {"kind": "local"}, True),
        ({"model": {"path": "TOK", "template_kwargs": {"a": 1}}}, {"kind": "local"}, True),
        ({"model": {"path": "other"}}, {"kind": "local"}, False),
        ({"model": {"path": "TOK", "revision": "x"}}, {"kind": "local"}, False),
        ({"backend": {"kind": "local"}}, {"kind": "local"}, True),
        ({"backend": {"kind": "local", "max_batch": 1}}, {"kind": "local"}, False),
        ({"backend": {"kind": "scripted", "replies": ["a"]}}, {"kind": "scripted", "replies": ["a"]}, False),
    ],
)
def test_a_part_with_the_policys_weights_shares_its_backend(
    tmp_path: Path, tiny_tokenizer_dir: Path, user: dict[str, Any], backend: dict[str, Any], shares: bool
) -> None:
    if user.get("model", {}).get("path") == "TOK":
        user = {"model": {**user["model"], "path": str(tiny_tokenizer_dir)}}
    spec = loaded(tmp_path, tiny_tokenizer_dir, user, backend=backend).spec
    (role,) = played_roles(spec).values()
    assert role.shares_policy(spec) is shares


async def roles_of_spec(spec: LoadedSpec, **kwargs: Any) -> tuple[RoleModels, ScriptedBackend]:
    form = load_format(spec.spec.model, spec.base)
    backend = ScriptedBackend(Script.model_validate(["policy"]), form)
    await backend.start()
    roles = RoleModels(service_inputs(spec, form, backend, **kwargs))
    await roles.start()
    return roles, backend


async def test_in_a_shared_backend_a_part_has_an_id_of_its_own(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    roles, backend = await roles_of_spec(loaded(tmp_path, tiny_tokenizer_dir, {}))
    model = roles.model("user")
    said = await model.reply([Message(role="user", content="hi")], episode_id="a/0", turn=0, seed=1)
    assert (said.text, said.cut) == ("policy", False)
    assert model.request_episode("a/0") == "user@a/0"
    assert roles.stats() == {}
    await roles.close()
    assert backend.stats()["requests"] == 1


async def test_parts_with_the_same_weights_and_backend_share_one(tmp_path: Path, tiny_model_dir: Path) -> None:
    judge = {"prompt": PROMPT, "backend": {"kind": "local", "max_batch": 2}}
    spec = loaded(tmp_path, tiny_model_dir, {"backend": {"kind": "local", "max_batch": 2}}, rewards={"scorer": judge})
    roles, _ = await roles_of_spec(spec)
    assert list(roles.stats()) == ["0:local"]
    assert roles.model("user").request_episode("a/0") == "a/0"
    await roles.close()


async def test_a_scenario_opens_no_model(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    roles, _ = await roles_of_spec(loaded(tmp_path, tiny_tokenizer_dir, {}), only_scripted=True)
    with pytest.raises(SpecCodeError, match="no model plays `user` here") as caught:
        roles.model("user")
    assert (caught.value.blame, caught.value.kind) == ("user", "user_not_played")
    await roles.close()


def test_a_part_sees_the_spec_with_itself_in_the_policys_place(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    user = {"backend": {"kind": "scripted", "replies": "user.yaml"}, "sampling": {"temperature": 0.25}}
    spec = loaded(tmp_path, tiny_tokenizer_dir, user)
    section = role_section(spec, ("user",))
    assert section.spec.backend.model_dump()["replies"] == "user.yaml"
    assert section.spec.sampling.temperature == 0.25
    assert section.spec.model == spec.spec.model
    place = section.origin(("backend", "replies"))
    assert place == spec.origin(("user", "backend", "replies"))
    assert section.resolve("user.yaml", ("backend", "replies")) == tmp_path / "user.yaml"
    assert list(played_roles(spec.spec)) == [("user",)]
