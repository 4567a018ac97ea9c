"""The specs about users: retries with a discount, two attempts, a user that a model plays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run_to_store, trajectories_of
from typer.testing import CliRunner

from engine.cli.main import app
from engine.schemas.trajectory import Trajectory
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.store.store import find_run
from engine.validate import check_spec

SPECS = Path(__file__).parents[3] / "specs"
NAMES = ["retry_discount", "score", "llm_user"]
RIGHT, WRONG = "The answer is {}.", "The answer is 999."


def run(name: str, out: Path, tokenizer: Path, replies: list[Any], *settings: str) -> list[Trajectory]:
    """Run a spec on a script, and keep its exported rows beside the run."""
    backend = yaml.safe_dump({"kind": "scripted", "replies": replies}, default_flow_style=True, width=10**6)
    changes = [f"backend={backend}", f"model.path={tokenizer}", "limits.turn_tokens=64", *settings]
    with run_to_store(SPECS / f"{name}.yaml", out, "--limit", "1", settings=changes) as store:
        return sorted(store.trajectories(), key=lambda trajectory: trajectory.episode_id)


def advantages(out: Path, *credit: str) -> list[list[float]]:
    """For each row of the run: the advantage of each of its turns."""
    file = out / "rows.jsonl"
    changes = [part for change in credit for part in ("--credit", change)]
    result = CliRunner().invoke(app, ["export", "latest", "--runs", str(out), "--out", str(file), *changes])
    assert result.exit_code == 0, result.output
    found = []
    for row in map(json.loads, file.read_text().splitlines()):
        by_turn = {turn: value for turn, value in zip(row["turn_ids"], row["advantages"], strict=True) if turn >= 0}
        found.append([by_turn[turn] for turn in sorted(by_turn)])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_opens_with_the_schema_and_has_no_findings(name: str) -> None:
    path = SPECS / f"{name}.yaml"
    assert path.read_text().startswith("# yaml-language-server: $schema=../schemas/json/episode.schema.json\n")
    assert [str(item) for item in check_spec(load_spec(path)) if item.severity != "info"] == []


def answer_of(name: str) -> str:
    return str(load_tasks(load_spec(SPECS / f"{name}.yaml"))[0].fields["answer"])


def test_a_retry_pays_less_the_later_it_is_right(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    right = RIGHT.format(answer_of("retry_discount"))
    cases = [
        {"task": "sum-1-0000", "sample": sample, "replies": [*["Hm.", WRONG, WRONG][:sample], right]}
        for sample in range(4)
    ]
    episodes = run("retry_discount", tmp_path, tiny_tokenizer_dir, cases)
    assert [len(episode.turns) for episode in episodes] == [1, 2, 3, 4]
    assert [episode.turns[-1].rewards for episode in episodes] == [{"correct": 1.0}] * 4
    assert all(episode.outcome.solved for episode in episodes)
    said = [message.text for message in episodes[2].messages if message.role == "user"][-2:]
    assert said == [
        "I see no answer. Work it out, and end with: The answer is 5.",
        "That is wrong. Look for the mistake, and answer again.",
    ]
    plain = advantages(tmp_path, "method=turn_discount", "form=attempts", "gamma=0.9", "baseline=none", "scale=none")
    expected = [[1.0], [0.9] * 2, [0.81] * 3, [0.729] * 4]
    assert [[round(value, 6) for value in row] for row in plain] == expected


def test_retries_end_with_the_fourth(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    (episode,) = run("retry_discount", tmp_path, tiny_tokenizer_dir, [WRONG] * 9, "rollout.samples_per_task=1")
    assert (len(episode.turns), episode.outcome.event, episode.outcome.solved) == (4, "satisfied", False)
    assert episode.outcome.reward == 0.0


def test_the_second_attempt_earns_what_it_is_better_by(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    right = RIGHT.format(answer_of("score"))
    kinds = [(right, right), (WRONG, right), (right, WRONG), (WRONG, WRONG)]
    cases = [{"task": "sum-1-0000", "sample": sample, "replies": list(replies)} for sample, replies in enumerate(kinds)]
    episodes = run("score", tmp_path, tiny_tokenizer_dir, cases)
    assert [[turn.rewards.get("correct", 0.0) for turn in episode.turns] for episode in episodes] == [
        [1.0, 1.0],
        [0.0, 1.0],
        [1.0, 0.0],
        [0.0, 0.0],
    ]
    assert [episode.outcome.solved for episode in episodes] == [True, True, False, False]
    plain = advantages(
        tmp_path, "method=score", "reward=correct", "alpha=10.0", "gamma=0.0", "baseline=none", "scale=none"
    )
    assert plain == [[1.0, 1.0], [0.0, 11.0], [1.0, -10.0], [0.0, 0.0]]


def test_the_rule_decides_and_the_model_speaks(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    words = "Not quite! What is 15 * 8 + 5?"
    speaker = yaml.safe_dump({"kind": "scripted", "replies": [words]}, default_flow_style=True, width=10**6)
    (episode,) = run(
        "llm_user",
        tmp_path,
        tiny_tokenizer_dir,
        ["The answer is 1.", "The answer is 125."],
        f"user.backend={speaker}",
        "rollout.samples_per_task=1",
    )
    assert [message.text for message in episode.messages if message.role == "user"][-1] == words
    assert [turn.rewards for turn in episode.turns] == [{"correct": 0.3}, {"correct": 0.7}]
    assert episode.outcome.solved
    assert episode.counts["user_tokens"] > 0


def test_the_users_model_is_the_policys_where_none_is_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    """One backend for both: the tiny model talks nonsense in both parts."""
    arguments = ["run", str(SPECS / "llm_user.yaml"), "--quiet", "--out", str(tmp_path), "--limit", "1"]
    for change in (
        f"model.path={tiny_model_dir}",
        "rollout.samples_per_task=1",
        "limits.turn_tokens=8",
        "sampling.stop=[]",
    ):
        arguments += ["--set", change]
    machine = "machine.transitions=[{trigger: truncated, source: GENERATING, dest: AWAITING_USER_FEEDBACK}]"
    result = CliRunner().invoke(app, [*arguments, "--set", machine, "--set", "user.sampling.stop=[]"])
    assert result.exit_code == 0, result.output
    (episode,) = trajectories_of(find_run("latest", tmp_path))
    assert episode.outcome.failure is None
    assert episode.counts["user_tokens"] > 0
    assert episode.counts["sampled_tokens"] == sum(turn.end - turn.start for turn in episode.turns)
