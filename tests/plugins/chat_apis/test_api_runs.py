"""`engine run` on a chat API: tools in its own form, cost by token, and a limit on the cost."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import DROPPED, OVERLOADED, WRONG_JSON, ApiServer, rate_limited
from command_line import engine_here, trajectories_of
from one_deleted import ROOT, engine, python
from slow_cases import each_once

from engine.known_plugins import KNOWN
from engine.schemas.trajectory import Trajectory
from engine.spec.load import load_spec
from engine.store import list_runs
from engine.store.header import changes_of, resumable_keys

PRICES = {"input": 2.0, "cached": 0.2, "output": 8.0}
FAULTS = [rate_limited("0.1"), OVERLOADED, DROPPED, WRONG_JSON, (500, {}, b"oops")]
KINDS: dict[str, dict[str, Any]] = {"openai": {"kind": "openai"}, "anthropic": {"kind": "anthropic", "cache": "5m"}}

THINKING = {"thinking": {"kind": "anthropic", "thinking": "adaptive"}}
"""The server refuses a conversation that lacks the signed reasoning of a reply with calls."""


def write_spec(folder: Path, tokenizer: Path, server: ApiServer, kind: str, tasks: int = 4, **more: Any) -> Path:
    spec: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "api",
        "model": {"path": str(tokenizer), "tool_calls": "hermes"},
        "backend": {"url": server.url, "model": "m", "prices": PRICES, "try_timeout": 20} | (KINDS | THINKING)[kind],
        "tasks": {"source": "inline", "rows": [{"id": f"t{n}"} for n in range(tasks)], "id": "id"},
        "prompt": [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "What is 17 plus 4?"}],
        "tools": [{"use": "code_for_tests:add"}],
        "machine": "tools",
        "rollout": {"concurrency": 1, "live_episodes": 1},
        **more,
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path


def stored(folder: Path) -> list[Trajectory]:
    return trajectories_of(list_runs(folder / "runs")[-1])


def notices(folder: Path) -> list[dict[str, Any]]:
    texts = (folder / "notices").read_text().replace("}{", "}\n{").splitlines()
    return [json.loads(text) for text in texts]


def costs(folder: Path) -> list[float]:
    lines = (list_runs(folder / "runs")[-1] / "costs.jsonl").read_text().splitlines()
    return [json.loads(line)["cost"] for line in lines]


@pytest.mark.parametrize(("kind", "broken"), each_once(list(KINDS), [False, True]))
@pytest.mark.usefixtures("short_pauses")
def test_tools_go_out_and_come_back_in_the_api_s_own_form(
    tiny_tokenizer_dir: Path, tmp_path: Path, kind: str, broken: bool
) -> None:
    with ApiServer(broken=broken) as server:
        server.faults = list(FAULTS)
        spec = write_spec(tmp_path, tiny_tokenizer_dir, server, kind)
        code, out, err = engine_here("run", spec, "-q", cwd=tmp_path)
    assert (code, server.refused) == (0, []), err
    assert (server.served, len(server.requests)) == (8, 8 + len(FAULTS))
    for trajectory in stored(tmp_path):
        assert [turn.event for turn in trajectory.turns] == ["malformed" if broken else "tool_calls", "answered"]
        results = [message.text for message in trajectory.messages if message.role == "tool"]
        assert results[0] == "21"
        assert ("not a JSON object" in results[1]) if broken else results[1] == "2"
        assert trajectory.messages[-1].text == "It is 21."
        assert not trajectory.outcome.trainable
    turns = [turn for trajectory in stored(tmp_path) for turn in trajectory.turns]
    expected = [
        ((turn.prompt_tokens - turn.cached_tokens) * 2 + turn.cached_tokens * 0.2 + turn.reply_tokens * 8) / 1e6
        for turn in turns
    ]
    assert [turn.cost for turn in turns] == pytest.approx(expected, rel=1e-12)
    assert [turn.reply_tokens for turn in turns] == [10] * 8
    assert all(turn.cached_tokens > 0 for turn in turns[1:])
    assert sum(costs(tmp_path)) == pytest.approx(sum(expected), rel=1e-12)
    assert f"Cost of the run: {sum(expected):.6g}, " in out


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        pytest.param("openai", "run", marks=pytest.mark.slow),
        ("anthropic", "run"),
        pytest.param("thinking", "run", marks=pytest.mark.slow),
        ("openai", "eval"),
    ],
)
@pytest.mark.usefixtures("short_pauses")
def test_a_run_that_has_cost_its_limit_stops_and_goes_on_with_a_higher_one(
    tiny_tokenizer_dir: Path, tmp_path: Path, kind: str, command: str
) -> None:
    with ApiServer() as server:
        spec = write_spec(
            tmp_path,
            tiny_tokenizer_dir,
            server,
            kind,
            rollout={"concurrency": 1, "live_episodes": 2, "max_cost": 0.0003},
            notify={"command": ["tee", "-a", str(tmp_path / "notices")], "on": ["budget", "finished"]},
        )
        code, _, err = engine_here(command, spec, "-q", cwd=tmp_path)
        assert code == 3, err
        assert re.search(r"Stopped: the run has cost [\d.]+ of at most 0\.0003", err)
        assert (
            f"To continue: engine run --resume runs/{list_runs(tmp_path / 'runs')[-1].name} --set rollout.max_cost=AMOUNT"
            in err
        )
        (event,) = notices(tmp_path)
        assert event["kind"] == "budget"
        assert event["reason"].startswith("BudgetError: the run has cost 0.0")
        run = list_runs(tmp_path / "runs")[-1]
        assert len(costs(tmp_path)) == server.served < 8
        assert engine_here("run", "--resume", run, "-q", cwd=tmp_path)[0] == 3
        assert len(costs(tmp_path)) == server.served < 8
        code, _, err = engine_here("run", "--resume", run, "--set", "limits.user_turns=9", cwd=tmp_path)
        assert (code, "a resumed run cannot change `limits.user_turns`; what may change: " in err) == (1, True)
        code, _, err = engine_here("run", "--resume", run, "-q", "--set", "rollout.max_cost=1", cwd=tmp_path)
    assert (code, server.served, server.refused) == (0, 8, []), err
    assert [event["kind"] for event in notices(tmp_path)] == ["budget", "finished"]
    assert [trajectory.outcome.failure for trajectory in stored(tmp_path)] == [None] * 4
    assert sum(costs(tmp_path)) == pytest.approx(sum(t.cost for x in stored(tmp_path) for t in x.turns), rel=1e-12)


def test_a_resume_may_change_what_is_paid_and_no_argument_of_code(tiny_tokenizer_dir: Path, tmp_path: Path) -> None:
    api = {"kind": "openai", "url": "http://127.0.0.1:9/v1", "model": "m", "prices": PRICES}
    with ApiServer() as server:
        spec = write_spec(
            tmp_path,
            tiny_tokenizer_dir,
            server,
            "openai",
            user={"backend": api, "prompt": [{"role": "user", "content": "x"}]},
            environment={"use": "code_for_tests:Board", "with": {"prices": 3, "backend": {"prices": 3}}},
        )
    paid = [
        "backend.prices.input=1",
        "backend.tokens_per_minute=9",
        "user.backend.prices.input=1",
        "rollout.max_cost=2",
    ]
    given = ["environment.with.prices=4", "environment.with.backend.prices=4", "user.backend.url=http://127.0.0.1:8/v1"]
    before, after = load_spec(spec).spec, load_spec(spec, [*paid, *given]).spec
    changed, refused = changes_of(before, after, resumable_keys())
    assert changed == sorted(text.partition("=")[0] for text in [*paid, *given])
    assert refused == sorted(text.partition("=")[0] for text in given)


@pytest.mark.slow
def test_a_stored_run_is_shown_and_exported_without_the_plugin(tiny_tokenizer_dir: Path, tmp_path: Path) -> None:
    with ApiServer() as server:
        spec = write_spec(tmp_path, tiny_tokenizer_dir, server, "openai", tasks=1)
        code, _, err = engine_here("run", spec, "-q", cwd=tmp_path)
        assert code == 0, err
    run = str(list_runs(tmp_path / "runs")[-1])
    told = f"its spec uses the plugin `chat_apis`, which is not installed: {KNOWN['chat_apis']['install'][0]}\n"
    answer = engine(ROOT, "replay", run, at=tmp_path, off="chat_apis")
    assert (answer.returncode, answer.stderr.endswith(told), answer.stderr.count("\n")) == (1, True, 1), answer.stderr
    needs_all = "from engine.store import RunStore; RunStore.open(__import__('pathlib').Path({!r})).loaded_spec()"
    answer = python(ROOT, "-c", needs_all.format(run), at=tmp_path, off="chat_apis")
    assert answer.stderr.endswith(told), answer.stderr
    shown = []
    for command in (
        ["show", run],
        ["show", run, "t0/0", "--tokens"],
        ["export", run, "--format", "sft"],
        ["export", run, "--format", "trl"],
        ["export", run, "--format", "verl", "--content", "prompts"],
    ):
        answers = [engine(ROOT, *command, at=tmp_path, off=off) for off in ("", "chat_apis")]
        assert [answer.returncode for answer in answers] == [0, 0], answers
        shown.append([answer.stdout for answer in answers])
    assert all(first == second for first, second in shown)
