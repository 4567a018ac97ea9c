"""slime's environments run unchanged: the same observations and rewards as by slime's own loop."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
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
from env_count import build_env
from slow_cases import slow_after
from stopping import Resumed, content

from engine.plugins.adapters.slime import SlimeEnvironment
from engine.schemas.environment import Environment

HERE = Path(__file__).parent
ROW = {"id": "a", "label": 7}


def said(*numbers: int) -> list[str]:
    """Replies with a tool call that no parser of the engine can read: the environment reads it itself."""
    return [f"Let me see. <tool_call>{number}</tool_call>" for number in numbers]


def by_hand(replies: list[str], row: dict[str, Any], **args: Any) -> tuple[list[str], list[float]]:
    """slime's loop: examples/geo3k_vlm_multi_turn/rollout.py."""
    env = build_env(sample=SimpleNamespace(label=row["label"], metadata=row), args=SimpleNamespace(**args))
    env.reset()
    seen: list[str] = []
    rewards: list[float] = []
    for reply in replies:
        observation, done, _ = env.step(reply)
        rewards.append(observation.get("tool_score", 0.0))
        if done:
            break
        seen.append(env.format_observation(observation)["content"][-1]["text"])
    env.close()
    return seen, rewards


@pytest.fixture
def count(tmp_path: Path) -> dict[str, Any]:
    """The environment of ours, beside the spec."""
    shutil.copy(HERE / "env_count.py", tmp_path)
    return {"adapter": "slime", "use": "env_count.py:build_env", "with": {"args": {"max_turns": 4}}}


def test_it_fits_its_protocol() -> None:
    assert isinstance(SlimeEnvironment("env_count:build_env", str(HERE)), Environment)


@pytest.mark.parametrize(
    ("isolation", "numbers"),
    slow_after(3, product(["thread", "process"], [(7,), (3, 9, 7), (1, 2, 3, 4, 5)]), several=True),
)
def test_episodes_are_those_of_slimes_loop(
    tmp_path: Path, tiny_tokenizer_dir: Path, count: dict[str, Any], numbers: tuple[int, ...], isolation: str
) -> None:
    document = spec_of(tiny_tokenizer_dir, count, [ROW], said(*numbers), isolation=isolation)
    (episode,) = run_spec(tmp_path, document).values()
    assert (shown(episode), earned(episode)) == by_hand(said(*numbers), ROW, max_turns=4)
    assert episode.outcome.event == "done"
    assert episode.facts["said"] == numbers[:4][-1]
    assert "object" not in episode.facts  # JSON cannot hold it


def test_a_reply_that_was_cut_off_ends_the_episode_without_a_step_as_in_slimes_loop(
    tmp_path: Path, tiny_tokenizer_dir: Path, count: dict[str, Any]
) -> None:
    replies = [said(3)[0], {"text": said(7)[0], "finish": "length"}]
    document = spec_of(tiny_tokenizer_dir, count, [ROW], replies, isolation="thread")
    (episode,) = run_spec(tmp_path, document).values()
    assert (shown(episode), earned(episode)) == (by_hand(said(3), ROW, max_turns=4)[0], [0.03, 0.0])
    assert (episode.outcome.event, episode.facts["truncated"], episode.facts["said"]) == ("truncated", True, 3)


@pytest.mark.slow
def test_a_worker_process_is_the_default(tmp_path: Path, tiny_tokenizer_dir: Path, count: dict[str, Any]) -> None:
    """A hang ends at the deadline, which only a process can enforce on code that does not wait."""
    rows = [{**ROW, "fault": "hang"}]
    document = spec_of(tiny_tokenizer_dir, {**count, "timeout": 0.5}, rows, said(3))
    (episode,) = run_spec(tmp_path, document).values()
    assert episode.outcome.failure is not None
    assert episode.outcome.failure.kind == "environment_timeout"


FAULTS = {"raise": "environment_error", "shape": "adapter_error", "reward": "adapter_error"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_its_own_episode(
    tmp_path: Path, tiny_tokenizer_dir: Path, count: dict[str, Any], fault: str
) -> None:
    rows = [{**ROW, "fault": fault}, {"id": "b", "label": 7}]
    document = spec_of(tiny_tokenizer_dir, count, rows, said(7), isolation="thread")
    episodes = run_spec(tmp_path, document)
    failed, whole = episodes["a/0"], episodes["b/0"]
    assert failed.outcome.failure is not None
    assert (failed.outcome.failure.blame, failed.outcome.failure.kind) == ("environment", FAULTS[fault])
    assert earned(whole) == [1.0]


@LONG
@pytest.mark.slow
def test_episodes_beside_faulty_ones_are_whole(tmp_path: Path, tiny_tokenizer_dir: Path, count: dict[str, Any]) -> None:
    """Whatever 5 % of the environments do, the others give what slime's loop gives."""
    kinds = {**FAULTS, "hang": "environment_timeout"}
    faults = planned_faults([*FAULTS, "hang"])
    rows = [{"id": f"t{n}", "label": n % 5 + 1, "fault": fault} for n, fault in enumerate(faults)]
    document = spec_of(tiny_tokenizer_dir, {**count, "timeout": 10}, rows, said(1, 9, 3, 4), rollout=FEW)
    episodes = run_spec(tmp_path, document)
    assert failures(episodes) == expected_failures(rows, faults, kinds)
    assert (len(episodes), len(failures(episodes))) == (EPISODES, EPISODES // FAULTY_EVERY)
    for row in rows:
        if row["fault"] is None:
            episode = episodes[f"{row['id']}/0"]
            assert (shown(episode), earned(episode)) == by_hand(said(1, 9, 3, 4), row, max_turns=4)


SOURCE = os.environ.get("SLIME_SOURCE", "")
PROBLEM = {"id": "a", "label": "\\frac{8}{15}"}
CALLS = [
    'I try. <tool_call>{"name": "calc_score", "arguments": {"answer": "3"}}</tool_call>',
    '<tool_call>{"name": "calc_score", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "calc_score", "arguments": {"answer": "8/15"}}</tool_call>',
    "Answer: \\boxed{8/15}",
]

GEO3K_BY_HAND = """
import json, sys
from types import SimpleNamespace
from examples.geo3k_vlm_multi_turn.env_geo3k import build_env
env = build_env(sample=SimpleNamespace(label=sys.argv[1], metadata={}), args=SimpleNamespace(max_turns=9))
env.reset()
seen, rewards = [], []
for reply in json.loads(sys.argv[2]):
    observation, done, _ = env.step(reply)
    rewards.append(observation.get("tool_score", 0.0))
    if done:
        break
    seen.append(env.format_observation(observation)["content"][-1]["text"])
print(json.dumps([seen, rewards]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not SOURCE, reason="set SLIME_SOURCE to a checkout of slime (github.com/THUDM/slime)")
def test_slimes_own_geo3k_environment(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """The file itself, with slime's graders, against slime's own calls in a process of its own."""
    told = subprocess.run(
        [sys.executable, "-c", GEO3K_BY_HAND, PROBLEM["label"], json.dumps(CALLS)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        check=True,
    )
    environment = {
        "adapter": "slime",
        "use": f"{SOURCE}/examples/geo3k_vlm_multi_turn/env_geo3k.py:build_env",
        "with": {"args": {"max_turns": 9}, "path": [SOURCE]},
    }
    (episode,) = run_spec(tmp_path, spec_of(tiny_tokenizer_dir, environment, [PROBLEM], CALLS)).values()
    assert episode.outcome.failure is None
    assert [shown(episode), earned(episode)] == json.loads(told.stdout.splitlines()[-1])
    assert earned(episode) == [0.0, 0.0, 1.0, 0.0]
    assert episode.outcome.event == "done"


LATER = (2, 5)
"""Commits after which an episode is stopped and resumed."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "commits", [LATER, pytest.param(range(1, 20), marks=pytest.mark.exhaustive)], ids=["some", "each"]
)
async def test_a_resume_rebuilds_the_environment(
    tmp_path: Path, tiny_tokenizer_dir: Path, count: dict[str, Any], commits: Sequence[int]
) -> None:
    """`effects: replayable`: stopped after any commit, the episode comes to the same."""
    path = tmp_path / "resumed.yaml"
    path.write_text(yaml.safe_dump(spec_of(tiny_tokenizer_dir, count, [ROW], said(3, 9, 2, 1))))
    resumed = Resumed(path)
    await resumed.run(tmp_path / "whole")
    with resumed.store(tmp_path / "whole") as store:
        (wanted,) = map(content, store.trajectories())
    for commit in commits:
        out = tmp_path / str(commit)
        struck = await resumed.starved(out, commit)
        assert struck or commit > LATER[-1]
        await resumed.run(out)
        with resumed.store(out) as store:
            assert list(map(content, store.trajectories())) == [wanted]
        assert await resumed.differences(out) == []
        if not struck:
            return
    assert commits == LATER, "more than 20 commits"
