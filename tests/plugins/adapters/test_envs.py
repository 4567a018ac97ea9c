"""`engine envs` lists adapters, what ships, and what installed packages offer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from installed_packages import VAULTS, install
from one_deleted import ROOT, engine
from typer.testing import CliRunner

from engine.cli.main import app
from engine.known_plugins import KNOWN
from engine.plugins.adapters.offered import offered
from engine.schemas.entry import ADAPTERS, TOOL_ADAPTERS
from engine.spec.code.entry import load_entry


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that offers something of each kind."""
    install(tmp_path, "vaults", VAULTS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["import"], "import"),
        (["import", "--help"], "import"),
        (["import", "other"], "import"),
        (["import", "verl", "x.yaml"], "import verl"),
        (["envs", "--json"], "envs"),
    ],
)
def test_its_commands_say_what_to_install(words: list[str], named: str, tmp_path: Path) -> None:
    found = engine(ROOT, *words, at=tmp_path, off="adapters")
    install = KNOWN["adapters"]["install"][0]
    told = f"there is no command `{named}`: it belongs to the plugin `adapters`, which is not installed: {install}\n"
    assert (found.returncode, found.stderr) == (2, told)


@pytest.mark.usefixtures("package")
def test_an_installed_package_offers_its_own() -> None:
    """It is listed with what a spec writes, and not imported."""
    result = CliRunner().invoke(app, ["envs", "--json"])
    assert result.exit_code == 0, result.output
    listed = [json.loads(line) for line in result.output.splitlines()]
    found = {(item["kind"], item["use"], item["entry"]) for item in listed if item["source"] == "vaults 1.2"}
    assert found == {
        ("environment", "vault", "vaults:Vault"),
        ("tool", "pick", "vaults:pick"),
        ("user", "guard", "vaults:Guard"),
        ("scorer", "opened", "vaults:opened"),
        ("adapter", "adapter: lockgym", "vaults:LockGym"),
        ("tool adapter", "adapter: keyring", "vaults:KeyRing"),
    }


def test_every_adapter_is_listed_with_what_it_needs() -> None:
    listed = {(item.kind, item.name): item for item in offered()}
    for kind, table in (("adapter", ADAPTERS.of_plugins()), ("tool adapter", TOOL_ADAPTERS.of_plugins())):
        for facts in table.values():
            item = listed[kind, facts.name]
            assert (item.needs, item.install) == (facts.packages, facts.install)


def test_what_ships_can_be_loaded_as_it_is_listed() -> None:
    shipped = [item for item in offered() if item.use.startswith("engine.environments.")]
    assert {item.name for item in shipped} >= {"Gsm8k", "Countdown", "WordGuess", "calculate", "Scripted", "Attempts"}
    for item in shipped:
        assert callable(load_entry(item.use, None))


def test_the_table_shows_them() -> None:
    result = CliRunner().invoke(app, ["envs"])
    assert result.exit_code == 0
    assert "reasoning_gym" in result.output
