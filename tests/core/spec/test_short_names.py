"""A spec names what installed packages offer by short names; a stored run has the entry points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run_to_store
from installed_packages import VAULTS, install
from installed_plugins import needs_plugin
from slow_cases import slow_but

from engine.errors import SpecError
from engine.spec.access import Access
from engine.spec.load import load_spec, override_spec
from engine.validate import check_spec

CODE = """\
from engine.schemas.environment import Reset, Step, UserTurn
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent
from engine.spec.code.signature import DescribedTool


class Vault:
    events = ("continue", "done")

    def __init__(self, word="open"):
        self.word = word

    def reset(self, task, seed):
        return Reset(messages=[Message(role="user", content=f"Say {self.word}.")])

    def step(self, view):
        return Step(event="done", facts={"said": view.reply})


class LockGym(Vault):
    def __init__(self, use, base=".", word="open"):
        super().__init__(f"{word} {use}")

    def step(self, view):
        return Step(event="done", facts={"written": view.written})


class Guard:
    def respond(self, view):
        return UserTurn(satisfied=True)


class KeyRing:
    def __init__(self, use, base="."):
        self.use = use

    async def open(self):
        tool = DescribedTool("turn", "Turn a key.", {"type": "object", "properties": {}}, lambda: "turned " + self.use)
        tool.reads_only = True
        return [tool]

    def close(self): ...


def pick(lock: str) -> str:
    \"\"\"Pick a lock.\"\"\"
    return f"picked {lock}"


def opened(view):
    return [RewardEvent(value=1.0, cause="opened")]
"""


@pytest.fixture
def vaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that offers one part of each kind; its folder."""
    install(tmp_path / "site", "vaults", VAULTS, CODE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path


def write(folder: Path, model: Path | str = "m", replies: list[str] | None = None, **parts: Any) -> Path:
    spec = {
        "spec": "episode/v1",
        "name": "names",
        "model": {"path": str(model), "tool_calls": "plain", "tool_role": "user"},
        "backend": {"kind": "scripted", "replies": replies or ["Open."]},
        "tasks": {"source": "inline", "rows": [{"q": "a"}]},
        "prompt": [{"role": "user", "content": "{{q}}"}],
        **parts,
    }
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    return folder / "spec.yaml"


ALL = {
    "environment": {"use": "vault", "with": {"word": "please"}},
    "tools": [{"use": "pick"}],
    "user": {"use": "guard"},
    "rewards": {"scorer": {"use": "opened"}},
    "machine": "tools_and_user",
}


def test_names_become_entry_points(vaults: Path) -> None:
    spec = load_spec(write(vaults, **ALL)).spec
    assert spec.environment is not None
    assert spec.user is not None
    assert spec.rewards.scorer is not None
    found = (spec.environment.use, spec.tools[0].use, spec.user.use, spec.rewards.scorer.use)
    assert found == ("vaults:Vault", "vaults:pick", "vaults:Guard", "vaults:opened")


def test_a_name_given_later_is_one_too(vaults: Path) -> None:
    loaded = load_spec(write(vaults, **ALL), ["tools.0.use=pick"])
    assert loaded.spec.tools[0].use == "vaults:pick"
    environment = override_spec(loaded, ["environment.use=vault"]).spec.environment
    assert environment is not None
    assert environment.use == "vaults:Vault"


def test_several_users_have_names(vaults: Path) -> None:
    users = {"one": {"use": "guard"}, "two": {"use": "own:Guard"}}
    tasks = {"source": "inline", "rows": [{"q": "a", "who": "one"}], "user": "who"}
    parts: dict[str, Any] = {**ALL, "users": users, "tasks": tasks}
    del parts["user"]
    loaded = load_spec(write(vaults, **parts))
    assert [user.use for user in loaded.spec.users_by_name.values()] == ["vaults:Guard", "own:Guard"]


def test_an_episode_runs_by_names_and_the_run_has_the_entry_points(vaults: Path, tiny_tokenizer_dir: Path) -> None:
    path = write(vaults, tiny_tokenizer_dir, ["<call>pick(lock='x')</call>", "Open."], **ALL)
    with run_to_store(path, vaults / "runs") as store:
        (episode,) = store.trajectories()
        assert store.header.spec["environment"]["use"] == "vaults:Vault"
    assert [message.text for message in episode.messages if message.text] == ["a", "Say please.", "picked x", "Open."]
    assert [posting.delta for posting in episode.postings] == [1.0]


@needs_plugin("isolation")
def test_an_adapter_of_a_package(vaults: Path, tiny_tokenizer_dir: Path) -> None:
    """It runs in a worker process, is given `use` and reads the reply as it was written."""
    parts = {"environment": {"adapter": "lockgym", "use": "Door-v1", "with": {"word": "shut"}}, "machine": "step"}
    path = write(vaults, tiny_tokenizer_dir, ["<call>pick(lock='x')</call>"], **parts)
    assert [item for item in check_spec(load_spec(path)) if item.severity == "error"] == []
    with run_to_store(path, vaults / "runs") as store:
        (episode,) = store.trajectories()
    assert episode.outcome.failure is None
    assert episode.messages[1].text == "Say shut Door-v1."
    assert episode.facts["written"] == "<call>pick(lock='x')</call>"


def test_a_kind_of_tool_servers_of_a_package(vaults: Path, tiny_tokenizer_dir: Path) -> None:
    parts = {"tools": [{"adapter": "keyring", "use": "gold"}], "machine": "tools"}
    path = write(vaults, tiny_tokenizer_dir, ["<call>turn()</call>", "Open."], **parts)
    with run_to_store(path, vaults / "runs") as store:
        (episode,) = store.trajectories()
    assert episode.messages[2].text == "turned gold"


@pytest.mark.parametrize(
    ("parts", "rule", "words"),
    [
        ({"environment": {"use": "valt"}}, "code.import", "did you mean `vault`?"),
        ({"tools": [{"use": "pic"}]}, "code.import", "did you mean `pick`?"),
        ({"user": {"use": "gard"}}, "code.import", "did you mean `guard`?"),
        ({"user": {"use": "stranger"}}, "code.import", "known: guard"),
        ({"rewards": {"scorer": {"use": "open"}}}, "code.import", "did you mean `opened`?"),
        ({"rewards": {"scorer": {"use": "math_verify"}}}, "code.import", "did you mean `math-verify`?"),
    ],
)
@pytest.mark.parametrize("imports", slow_but([True, False], False))
def test_an_unknown_name_has_a_hint(vaults: Path, parts: dict[str, Any], rule: str, words: str, imports: bool) -> None:
    path = write(vaults, **{**ALL, **parts})
    found = check_spec(load_spec(path, access=Access(imports=imports)))
    (finding,) = [item for item in found if item.rule == rule]
    assert "is no entry point" in finding.message
    assert words in (finding.fix or "")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"environment": {"adapter": "lockgim", "use": "x"}},
            "there is no `adapter: lockgim`; did you mean `lockgym`?",
        ),
        ({"tools": [{"adapter": "keyrin", "use": "x"}]}, "there is no `adapter: keyrin`; did you mean `keyring`?"),
    ],
)
def test_an_unknown_adapter_has_a_hint(vaults: Path, parts: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(write(vaults, **{**ALL, **parts}))
    assert words in str(caught.value)


def test_a_name_that_two_packages_offer_is_refused(vaults: Path) -> None:
    install(
        vaults / "site",
        "safes",
        "[episode_engine.environments]\nvault = safes:Vault\n\n[episode_engine.adapters]\nlockgym = safes:Gym\n",
    )
    with pytest.raises(
        SpecError, match=r"several packages offer the environment `vault`: `safes:Vault` \(safes 1.2\), `vaults:Vault`"
    ):
        load_spec(write(vaults, **ALL))
    with pytest.raises(SpecError, match=r"several packages offer the adapter `lockgym`: safes 1.2, vaults 1.2"):
        load_spec(write(vaults, **{**ALL, "environment": {"adapter": "lockgym", "use": "x"}}))
