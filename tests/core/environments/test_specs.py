"""The specs that ship: valid, and every transition of their machines is really taken."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run_to_store
from installed_plugins import needs_plugin

from engine.machine.machine import resolve_machine
from engine.schemas.trajectory import Trajectory
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.validate import check_spec

SPECS = Path(__file__).parents[3] / "specs"
QUICKSTART = SPECS / "quickstart.yaml"
GSM8K = SPECS / "gsm8k_feedback.yaml"
NEEDED = {"geo3k_feedback": "credit_methods", "geo3k_tool": "sglang"}
VISION = [SPECS / f"{name}.yaml" for name in ("color_square", "geo3k_feedback", "geo3k_tool")]


def run(spec: Path, out: Path, *settings: str, limit: int | None = None) -> list[Trajectory]:
    """Run a spec through the command line; its episodes by id."""
    options = [] if limit is None else ["--limit", str(limit)]
    with run_to_store(spec, out, *options, settings=settings) as store:
        return sorted(store.trajectories(), key=lambda trajectory: trajectory.episode_id)


def scripted(*replies: Any) -> str:
    return "backend=" + yaml.safe_dump(
        {"kind": "scripted", "replies": list(replies)}, default_flow_style=True, width=10**6
    )


@pytest.mark.parametrize(
    "spec",
    [
        QUICKSTART,
        GSM8K,
        *(
            pytest.param(spec, marks=[needs_plugin(NEEDED[spec.stem])] if spec.stem in NEEDED else [])
            for spec in VISION
        ),
    ],
    ids=lambda spec: spec.stem,
)
def test_it_opens_with_the_schema_and_has_no_findings(spec: Path) -> None:
    first = spec.read_text(encoding="utf-8").splitlines()[0]
    assert first == "# yaml-language-server: $schema=../schemas/json/episode.schema.json"
    assert [str(item) for item in check_spec(load_spec(spec)) if item.severity != "info"] == []


def test_the_quickstart_is_at_least_64_episodes() -> None:
    loaded = load_spec(QUICKSTART)
    tasks = load_tasks(loaded)
    assert len({task.id for task in tasks}) * loaded.spec.rollout.samples_per_task == 64


def test_gsm8k_reads_the_shipped_sample_or_a_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GSM8K", raising=False)
    assert len(load_tasks(load_spec(GSM8K))) == 64
    own = tmp_path / "own.jsonl"
    own.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n', encoding="utf-8")
    monkeypatch.setenv("GSM8K", str(own))
    assert [task.fields for task in load_tasks(load_spec(GSM8K))] == [{"question": "1 + 1?", "answer": "#### 2"}]


def test_gsm8k_takes_the_hub_by_override() -> None:
    tasks = load_spec(
        GSM8K, ["tasks.source=hub", "tasks.path=openai/gsm8k", "tasks.name=main", "tasks.split=train"]
    ).spec.tasks
    assert (tasks.source, tasks.path, tasks.name, tasks.split) == ("hub", "openai/gsm8k", "main", "train")


def test_quickstart_rewards_move_as_its_rules_say(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    (episode,) = run(
        QUICKSTART,
        tmp_path,
        f"model.path={tiny_tokenizer_dir}",
        "rollout.samples_per_task=1",
        "limits.turn_tokens=64",
        scripted(
            "<call>calculate(15 *)</call>",
            "The answer is 1.",
            "<call>calculate(15 * 8 + 5)</call>",
            "The answer is 125.",
        ),
        limit=1,
    )
    assert [turn.event for turn in episode.turns] == ["tool_calls", "answered", "tool_calls", "answered"]
    assert [turn.rewards for turn in episode.turns] == [{}, {}, {"correct": 0.3}, {"correct": 0.7}]
    said = [message.text for message in episode.messages[len(load_spec(QUICKSTART).spec.prompt) :]]
    assert said[2] == "`calculate` failed: The expression ends too early: a number is missing after '*'."
    assert said[4] == "That is wrong. What is 15 * 8 + 5?"
    assert said[6] == "125"
    assert episode.outcome.solved


def test_quickstart_takes_something_off_for_a_call_that_cannot_be_read(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    (episode,) = run(
        QUICKSTART,
        tmp_path,
        f"model.path={tiny_tokenizer_dir}",
        "rollout.samples_per_task=1",
        "limits.turn_tokens=64",
        scripted("<call>15 * 8 + 5</call>", "The answer is 125."),
        limit=1,
    )
    assert [turn.event for turn in episode.turns] == ["malformed", "answered"]
    assert [turn.rewards for turn in episode.turns] == [{"format": -0.1, "correct": 0.3}, {"correct": 0.7}]


def test_gsm8k_asks_for_a_shorter_reply_and_pays_the_turn_before_the_answer(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    (episode,) = run(
        GSM8K,
        tmp_path,
        f"model.path={tiny_tokenizer_dir}",
        "rollout.samples_per_task=1",
        "limits.episode_tokens=4000",
        scripted(
            {"text": "Natalia sold", "finish": "length"},
            "<answer>24</answer>",
            "<call>calculate(48 + 48 / 2)</call>",
            "<answer>72</answer>",
        ),
        limit=1,
    )
    assert [turn.event for turn in episode.turns] == ["truncated", "answered", "tool_calls", "answered"]
    said = [message.text for message in episode.messages if message.role == "user"]
    assert said[-2:] == [
        "Your reply was cut off. Be shorter, and end with: <answer><number></answer>",
        "24 is not right. A step that helps: 48/2 = 24. Try again.",
    ]
    rewards = [turn.rewards for turn in episode.turns]
    assert rewards[:2] == [{}, {"format": 0.1}]
    assert rewards[2]["correct"] == pytest.approx(0.24)
    assert rewards[3]["correct"] == pytest.approx(0.56)
    assert episode.facts == {"steps": 2, "graded": 3}


def test_gsm8k_grades_an_answer_that_the_user_had_no_turn_left_for(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    (episode,) = run(
        GSM8K,
        tmp_path,
        f"model.path={tiny_tokenizer_dir}",
        "rollout.samples_per_task=1",
        "limits.episode_tokens=4000",
        "limits.user_turns=1",
        scripted("<answer>1</answer>", "<answer>72</answer>"),
        limit=1,
    )
    assert [turn.rewards for turn in episode.turns] == [{"format": 0.1}, {"correct": 1.0}]
    assert episode.outcome.state == "DONE"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.model
def test_the_quickstart_takes_every_transition_that_a_sound_run_can(tmp_path: Path, smollm_dir: Path) -> None:
    episodes = run(QUICKSTART, tmp_path, f"model.path={smollm_dir}")
    taken = Counter(step for episode in episodes for step in episode.path)
    machine = resolve_machine(load_spec(QUICKSTART).spec.machine)
    sound = {
        (str(item.source), str(item.trigger), item.dest)
        for item in machine.transitions
        if item.trigger not in ("failed", "aborted")  # nothing failed here
        and (item.trigger not in ("limit", "truncated") or item.source == "GENERATING")  # only there is a limit met
    }
    assert (
        set(taken) - {("AWAITING_USER_FEEDBACK", "limit", "DONE")} == sound
    )  # a malformed call after the third feedback
    assert all(taken[step] >= 3 for step in sound), taken
    assert 0.3 <= sum(episode.outcome.reward for episode in episodes) / len(episodes) <= 0.9
    corrected = [episode for episode in episodes if episode.outcome.solved and episode.counts["user_turns"] > 1]
    assert len(corrected) >= 3
