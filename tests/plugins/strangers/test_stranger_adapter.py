"""An adapter of environments, and one of tools, that a package in another folder adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from layers import engine, write_plugin
from written_specs import save_spec, scripted_spec

FACE = """
PLUGIN = Plugin(
    name="echo",
    about="Repeats what the model says",
    install="pip install stranger_echo",
    adapters={"echo": "echo_facts:ECHO"},
    tool_adapters={"echoes": "echo_facts:ECHOES"},
)
"""
FACTS = """
from engine.schemas.entry import AdapterFacts, ToolAdapterFacts

ECHO = AdapterFacts(
    name="echo", runs="echo_code:Echo", use="what is said before each reply", names="name", rewards="turn",
    packages=("echo_code",), install="pip install echo-code",
)
ECHOES = ToolAdapterFacts(name="echoes", runs="echo_code:Echoes", use="the name of the tool")
"""
CODE = """
from engine.schemas.environment import EpisodeView, Reset, Step, Task
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent


class Echo:
    events = ("continue", "done")

    def __init__(self, use: str, base: str = ".", times: int = 1) -> None:
        self._use, self._times = use, times

    def reset(self, task: Task, seed: int) -> Reset:
        return Reset(messages=[Message(role="user", content=self._use)])

    def step(self, view: EpisodeView) -> Step:
        said = view.messages[-1].text
        over = len(view.messages) >= 2 * self._times
        return Step(
            event="done" if over else "continue",
            messages=[] if over else [Message(role="user", content=f"{self._use} {said}")],
            rewards=[RewardEvent(turn="last", value=float(len(said)))],
        )


def repeat(text: str) -> str:
    \"\"\"Say it again.

    Args:
        text: What to say.
    \"\"\"
    return text


repeat.reads_only = True


class Echoes:
    def __init__(self, use: str, base: str = ".") -> None: ...

    async def open(self) -> list:
        return [repeat]

    def close(self) -> None: ...
"""


def layer_with(folder: Path, facts: str = FACTS) -> Path:
    """A folder with the package and the library that it adapts."""
    site = folder / "site"
    write_plugin(site, "echo", FACE)
    (site / "echo_facts.py").write_text(facts)
    (site / "echo_code.py").write_text(CODE)
    return site


def found(site: Path, folder: Path, spec: dict[str, Any]) -> list[str]:
    """What `engine validate` says of a spec."""
    answer = engine(site, "validate", save_spec(folder / "spec.yaml", spec), "--format", "json", cwd=folder)
    diagnostics = json.loads(answer.stdout)["specs"][0]["diagnostics"]
    return [f"{each['severity']} {each['rule']} {each['message']}; {each['fix']}" for each in diagnostics]


def echo_spec(tokenizer: Path, **environment: Any) -> dict[str, Any]:
    spec = scripted_spec("echo", tokenizer, ["one", "three"], ask=None, tool_calls="plain")
    return spec | {
        "environment": {"adapter": "echo", "use": "Say:", "with": {"times": 2}, **environment},
        "tools": [{"adapter": "echoes", "use": "repeat"}],
        "machine": "step",
    }


@pytest.mark.slow
def test_it_runs_and_is_needed_to_run_again(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    site, spec = layer_with(tmp_path), echo_spec(tiny_tokenizer_dir)
    assert [line for line in found(site, tmp_path, spec) if not line.startswith("info")] == []
    listed = [json.loads(line) for line in engine(site, "envs", "--json", cwd=tmp_path).stdout.splitlines()]
    stranger = {(each["kind"], each["name"]): each for each in listed if each["source"] == "stranger_echo 2.0"}
    assert set(stranger) == {("adapter", "echo"), ("tool adapter", "echoes")}
    assert stranger["adapter", "echo"]["install"] == "pip install echo-code"

    ran = engine(site, "run", tmp_path / "spec.yaml", "--quiet", "--out", tmp_path / "runs", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (run,) = (tmp_path / "runs").iterdir()
    (row,) = exported(site, run, tmp_path / "rows.jsonl")
    assert row["turn_rewards"] == [len("one"), len("three")]

    empty = tmp_path / "empty"
    empty.mkdir()
    assert exported(empty, run, tmp_path / "again.jsonl") == [row]
    again = engine(empty, "replay", run, cwd=tmp_path)
    told = "its spec uses the plugin `echo`, which is not installed: pip install stranger_echo"
    assert (again.returncode != 0, told in again.stderr) == (True, True), again.stdout + again.stderr


def exported(site: Path, run: Path, to: Path) -> list[dict[str, Any]]:
    answer = engine(site, "export", run, "--format", "jsonl", "--out", to, cwd=to.parent)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return [json.loads(line) for line in to.read_text().splitlines()]


@pytest.mark.slow
def test_what_is_wrong_with_it_is_told(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    spec = echo_spec(tiny_tokenizer_dir)
    site = layer_with(tmp_path)
    (site / "echo_code.py").unlink()
    no_package = "info code.no-package `echo_code` is not installed, and a run needs it for the adapter `echo`; pip install echo-code"
    assert no_package in found(site, tmp_path, spec)

    (site / "echo_facts.py").write_text("ECHO = ECHOES = 'echo_code:Echo'\n")
    broken = found(site, tmp_path, spec)
    cause = "cannot be used (`echo` in `adapters` names 'echo_code:Echo', not AdapterFacts): pip install stranger_echo"
    assert (
        f"error spec.bad-value `environment`: there is no `adapter: echo`; it belongs to the plugin `echo`, which {cause}"
        in broken
    )
    assert len([line for line in broken if line.startswith("error")]) == 1
