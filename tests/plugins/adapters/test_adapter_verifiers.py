"""Environments of verifiers run unchanged: the same messages and rewards as by the library's own `rollout`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from adapters_kit import (
    EPISODES,
    FAULTY_EVERY,
    FEW,
    LONG,
    earned,
    expected_failures,
    failures,
    planned_faults,
    run_spec,
    shown,
    spec_of,
)

from engine.errors import AdapterError
from engine.plugins.adapters.verifiers import VerifiersEnvironment, rows
from engine.schemas.entry import ADAPTERS

HERE = Path(__file__).parent
needs_library = pytest.mark.skipif(
    find_spec("verifiers") is None, reason="verifiers<0.4 is not installed: pip install 'episode-engine[verifiers]'"
)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def spec(model: Path, load: str, given: list[dict[str, Any]], replies: list[Any], **args: Any) -> dict[str, Any]:
    environment = {"adapter": "verifiers", "use": f"env_vf.py:{load}", "with": {"args": args}}
    document = spec_of(model, environment, given, replies)
    del document["prompt"]
    return document


def by_hand(load: str, row: dict[str, Any], replies: list[Any], **args: Any) -> tuple[list[str], float]:
    """The library's own `rollout`, with a client that gives the replies."""
    import env_vf
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    said = iter(replies)

    async def get_response(*_: Any, **__: Any) -> Any:
        reply, calls = next(said), None
        text, cut = (reply, False) if isinstance(reply, str) else (reply["text"], reply["finish"] == "length")
        if text.startswith("<tool_call>"):
            asked = json.loads(text[11:-12])
            calls = [ToolCall(id="c", name=asked["name"], arguments=json.dumps(asked["arguments"]))]
            text = ""
        why = "length" if cut else "stop"
        message = ResponseMessage(content=text, tool_calls=calls, finish_reason=why, is_truncated=cut)
        return Response(id="r", created=0, model="m", message=message)

    methods = dict.fromkeys(Client.__abstractmethods__, get_response) | {"get_response": get_response}

    async def whole() -> Any:
        env = getattr(env_vf, load)(**args)
        given = {key: value for key, value in row.items() if key != "id"}
        state = await env.rollout(given, type("Scripted", (Client,), methods)(None), "m", {})
        await env.rubric.score_rollout(state)
        return state

    state = asyncio.run(whole())
    listed = [*state["prompt"], *state["completion"]]
    return [str(message.content) for message in listed if message.role != "assistant"], state["reward"]


def test_the_table_says_when_its_rewards_come() -> None:
    facts = ADAPTERS["verifiers"]
    assert (facts.rewards, facts.truncates, facts.thread_safe) == ("turn and end", True, False)


def test_a_missing_library_says_what_to_install() -> None:
    if find_spec("verifiers") is not None:
        pytest.skip("verifiers is installed")
    with pytest.raises(AdapterError, match=r"needs `verifiers`: pip install 'episode-engine\[verifiers\]'"):
        VerifiersEnvironment("env_vf:load_environment")


CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "cut off": ("load_environment", ["5", {"text": "3", "finish": "length"}, "2"], {}),
    "won": ("load_environment", ["1", "3", "2"], {}),
    "out of turns": ("load_environment", ["5", "5", "5", "5"], {"max_turns": 2}),
    "single turn": ("load_single", ["2"], {}),
    "single turn, cut off": ("load_single", [{"text": "2", "finish": "length"}], {}),
    "tools, answered at the limit": ("load_tools", [call("add", a=1, b=1), "It is 2."], {"max_turns": 2}),
    "tools, called at the limit": ("load_tools", [call("add", a=1, b=1)] * 2, {"max_turns": 2}),
    "tools": ("load_tools", [call("add", a=1, b=1), call("add", a="x", b=1), "It is 2."], {}),
    "state": ("load_purse", [call("put", coin=2), call("put", coin=3), "Done."], {}),
}


TRUNCATED = ("out of turns", "single turn, cut off", "tools, called at the limit")
"""Those that the environment's limit ended before they were over."""


@pytest.mark.adapters
@needs_library
@pytest.mark.parametrize("case", CASES)
def test_episodes_are_those_of_the_librarys_rollout(tmp_path: Path, tiny_tokenizer_dir: Path, case: str) -> None:
    load, replies, args = CASES[case]
    shutil.copy(HERE / "env_vf.py", tmp_path)
    (given,) = [row for row in rows(f"env_vf.py:{load}", str(HERE), args) if row["answer"] == "2"]
    given = {**given, "id": "a", "info": {}}
    (episode,) = run_spec(tmp_path, spec(tiny_tokenizer_dir, load, [given], replies, **args)).values()
    messages, reward = by_hand(load, given, replies, **args)
    assert episode.outcome.failure is None
    said = [message.text for message in episode.messages if message.role != "assistant"]
    assert said == [text for text in messages if text != "Right."]  # the last word of an episode is shown to nobody
    texts = [reply if isinstance(reply, str) else reply["text"] for reply in replies]
    steps = 0.25 * sum(text in ("1", "3") for text in texts) if load == "load_environment" else 0.0
    assert sum(earned(episode)) == pytest.approx(reward + steps, abs=1e-12)
    assert episode.facts["truncated"] is (case in TRUNCATED)
    assert (episode.outcome.event == "truncated") is (case in TRUNCATED)


@pytest.mark.adapters
@needs_library
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("function", "by `ranks`"),
        ("inner", "by `ranks`"),
        ("method", "by `Pairs.score_group`"),
        ("advantages", "by its advantages"),
    ],
)
def test_rewards_over_groups_are_refused_by_name(kind: str, name: str) -> None:
    with pytest.raises(AdapterError, match=f"rewards all samples of a task together, {name};"):
        VerifiersEnvironment("env_vf.py:load_group", str(HERE), {"kind": kind})


@pytest.mark.adapters
@needs_library
@pytest.mark.parametrize("use", ["env_vf.py:load_best_of_n", "verifiers.v1.envs.best_of_n:BestOfNEnv"])
def test_environments_of_v1_are_refused_with_their_scoring(use: str) -> None:
    words = (
        "gave BestOfNEnv, which is no MultiTurnEnv of verifiers before 0.4; environments of v1 .* against each other"
    )
    with pytest.raises(AdapterError, match=words):
        VerifiersEnvironment(use, str(HERE))


@pytest.mark.adapters
@needs_library
def test_the_spec_gives_an_environment_the_variables_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(AdapterError, match=r"OpenAIError: .* by `with: \{env: \{OPENAI_API_KEY: …\}\}`"):
        VerifiersEnvironment("env_vf.py:load_judged", str(HERE))
    assert len([*rows("env_vf.py:load_judged", str(HERE), env={"OPENAI_API_KEY": "of the rows"})]) == 6
    assert "OPENAI_API_KEY" not in os.environ
    monkeypatch.setenv("OPENAI_API_KEY", "of the engine")
    environment = VerifiersEnvironment("env_vf.py:load_judged", str(HERE), env={"OPENAI_API_KEY": "of the spec"})
    (judged, _) = environment._env.rubric.rubrics
    assert judged.judge_client.api_key == "of the spec"


@pytest.mark.adapters
@needs_library
def test_an_environment_that_cannot_be_built_leaves_nothing_to_fail_at_the_end() -> None:
    """PythonEnv of verifiers 0.3.1 asks prime-sandboxes for what no release that it allows accepts."""
    program = f"""
from engine.errors import AdapterError
from engine.plugins.adapters.verifiers import VerifiersEnvironment
try:
    VerifiersEnvironment("env_vf.py:load_python", {str(HERE)!r})
except AdapterError as error:
    print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=HERE.parents[2], capture_output=True, text=True, check=True
    )
    assert ended.stdout.startswith("`env_vf.py:load_python` could not be built: ValidationError: ")
    assert "Traceback" not in ended.stderr


FAULTS = {
    "setup": "environment_error",
    "raise": "environment_error",
    "shape": "environment_error",  # the library refuses it
    "reward": "adapter_error",
    "exit": "environment_crashed",
    "hang": "environment_timeout",
}


@LONG
@pytest.mark.adapters
@needs_library
def test_episodes_beside_faulty_ones_are_whole(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Whatever 5 % of the environments do, the others give what the library gives."""
    shutil.copy(HERE / "env_vf.py", tmp_path)
    faults = planned_faults(["setup", "raise", "shape", "reward", "exit", "hang"])
    base = next(row for row in rows("env_vf.py:load_environment", str(HERE)) if row["answer"] == "2")
    given = [{**base, "id": f"t{n}", "info": {"fault": fault}} for n, fault in enumerate(faults)]
    document = spec(tiny_tokenizer_dir, "load_environment", given, ["1", "2"])
    document["environment"]["timeout"] = 10
    document["rollout"] = FEW
    episodes = run_spec(tmp_path, document)
    assert failures(episodes) == expected_failures(given, faults, FAULTS)
    assert (len(episodes), len(failures(episodes))) == (EPISODES, EPISODES // FAULTY_EVERY)
    whole, reward = by_hand("load_environment", given[1], ["1", "2"])
    assert reward == pytest.approx(1.0 + 0.5 / 3, abs=1e-12)
    for row, fault in zip(given, faults, strict=True):
        if fault is None:
            episode = episodes[f"{row['id']}/0"]
            assert (shown(episode), earned(episode)) == (whole[1:-1], [0.25, 1.0 + 0.5 / 3])
