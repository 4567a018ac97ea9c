"""slime's environments run unchanged: the same observations and rewards as by slime's own loop."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from env_count import build_env
from worlds_kit import FAULTY_EVERY, earned, run_spec, shown, spec_of

from engine.integrations.worlds.slime import SlimeWorld
from engine.schemas.environment import Environment

HERE = Path(__file__).parent
ROW = {"id": "a", "label": 7}


def said(*numbers: int) -> list[str]:
    """Replies with a tool call that no parser of the engine can read: the environment reads it itself."""
    return [f"Let me see. <tool_call>{number}</tool_call>" for number in numbers]


def by_hand(replies: list[str], row: dict[str, Any], **args: Any) -> tuple[list[str], list[float]]:
    """slime's loop: examples/geo3k_vlm_multi_turn/rollout.py."""
    world = build_env(sample=SimpleNamespace(label=row["label"], metadata=row), args=SimpleNamespace(**args))
    world.reset()
    seen: list[str] = []
    rewards: list[float] = []
    for reply in replies:
        observation, done, _ = world.step(reply)
        rewards.append(observation.get("tool_score", 0.0))
        if done:
            break
        seen.append(world.format_observation(observation)["content"][-1]["text"])
    world.close()
    return seen, rewards


@pytest.fixture
def count(tmp_path: Path) -> dict[str, Any]:
    """The environment of ours, beside the spec."""
    shutil.copy(HERE / "env_count.py", tmp_path)
    return {"adapter": "slime", "use": "env_count.py:build_env", "with": {"args": {"max_turns": 4}}}


def test_it_fits_its_protocol() -> None:
    assert isinstance(SlimeWorld("env_count:build_env", str(HERE)), Environment)


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize("numbers", [(3, 9, 7), (7,), (1, 2, 3, 4, 5)])
def test_episodes_are_those_of_slimes_loop(
    tmp_path: Path, tiny_tokenizer_dir: Path, count: dict[str, Any], numbers: tuple[int, ...], isolation: str
) -> None:
    document = spec_of(tiny_tokenizer_dir, count, [ROW], said(*numbers), isolation=isolation)
    (episode,) = run_spec(tmp_path, document).values()
    assert (shown(episode), earned(episode)) == by_hand(said(*numbers), ROW, max_turns=4)
    assert episode.outcome.event == "done"
    assert episode.facts["said"] == numbers[:4][-1]
    assert "object" not in episode.facts  # JSON cannot hold it


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


@pytest.mark.slow
def test_a_thousand_episodes_with_faults(tmp_path: Path, tiny_tokenizer_dir: Path, count: dict[str, Any]) -> None:
    """Whatever 5 % of the environments do, the others give what slime's loop gives."""
    faults = [*FAULTS, "hang"]
    rows = [
        {"id": f"t{n}", "label": n % 5 + 1, "fault": faults[n // FAULTY_EVERY % 4] if n % FAULTY_EVERY == 0 else None}
        for n in range(1000)
    ]
    document = spec_of(tiny_tokenizer_dir, {**count, "timeout": 5}, rows, said(1, 9, 3, 4))
    episodes = run_spec(tmp_path, document)
    assert len(episodes) == 1000
    for row in rows:
        episode = episodes[f"{row['id']}/0"]
        if row["fault"] is None:
            assert (shown(episode), earned(episode)) == by_hand(said(1, 9, 3, 4), row, max_turns=4)
        else:
            assert episode.outcome.failure is not None
            assert episode.outcome.failure.kind == FAULTS.get(row["fault"], "environment_timeout")
