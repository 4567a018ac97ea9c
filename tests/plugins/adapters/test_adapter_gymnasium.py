"""Gymnasium's environments run unchanged: the same observations, frames and rewards as by hand under the same seed."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
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
from engine.schemas.environment import Environment

gymnasium = pytest.importorskip("gymnasium", reason="needs the extra `gymnasium`")
pytestmark = pytest.mark.adapters

HERE = Path(__file__).parent
LAKE = {
    "adapter": "gymnasium",
    "use": "FrozenLake-v1",
    "with": {"show": "ansi", "actions": ["left", "down", "right", "up"], "prompt": ""},
}
MOVES = ["right", "<answer>down</answer>", "I go <answer> Right </answer>", "up", "left", "down", "down", "right"]
FAULTS = {
    "raise": "environment_error",
    "shape": "environment_error",  # Gymnasium's own wrappers notice it
    "reward": "adapter_error",
    "exit": "environment_crashed",
    "hang": "environment_timeout",
}


def by_hand(env: Any, actions: list[Any], seed: int, options: Any = None, *, frames: bool = False) -> Any:
    """(what is shown, rewards, terminated, truncated)."""
    observation, _ = env.reset(seed=seed, options=options)
    seen = [env.render() if frames else observation]
    rewards = []
    terminated = truncated = False
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            break
        seen.append(env.render() if frames else observation)
    env.close()
    return seen, rewards, terminated, truncated


@pytest.fixture
def cellar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The environment of ours, beside the spec."""
    shutil.copy(HERE / "gym_envs.py", tmp_path)
    monkeypatch.syspath_prepend(str(HERE))
    return {"adapter": "gymnasium", "use": "Cellar-v0", "with": {"modules": ["gym_envs"], "prompt": ""}}


def test_it_fits_its_protocol() -> None:
    from engine.plugins.adapters.gymnasium import GymnasiumEnvironment

    assert isinstance(GymnasiumEnvironment("FrozenLake-v1"), Environment)


@pytest.mark.parametrize("seed", [0, 3, 11])
def test_frozen_lake(tmp_path: Path, tiny_tokenizer_dir: Path, seed: int) -> None:
    """A slippery lake: its own random numbers follow from the seed."""
    document = spec_of(tiny_tokenizer_dir, LAKE, [{"id": "a", "seed": seed}], MOVES, prompt=[])
    (episode,) = run_spec(tmp_path, document).values()
    env = gymnasium.make("FrozenLake-v1", render_mode="ansi")
    seen, rewards, terminated, truncated = by_hand(env, [2, 1, 2, 3, 0, 1, 1, 2], seed, frames=True)
    assert [message.text for message in episode.messages if message.role != "assistant"] == seen
    assert earned(episode)[: len(rewards)] == rewards
    assert bool(episode.facts["terminated"]) == terminated
    assert not truncated


def test_a_limit_of_the_environments_own_is_no_ending(
    tmp_path: Path, tiny_tokenizer_dir: Path, cellar: dict[str, Any]
) -> None:
    replies = ["a", "b", "c", "d"]
    rows = [{"id": "time", "seed": 1}, {"id": "night", "seed": 1}, {"id": "right", "seed": 1}]
    goal = by_hand_goal(1)
    script = [
        {"task": "time", "replies": replies},
        {"task": "night", "replies": ["a", "night"]},
        {"task": "right", "replies": ["a", "x" * goal]},
    ]
    episodes = run_spec(tmp_path, spec_of(tiny_tokenizer_dir, cellar, rows, script))
    assert episodes["time/0"].outcome.event == "truncated"
    assert episodes["time/0"].facts["truncated"] is True
    assert (episodes["right/0"].outcome.event, earned(episodes["right/0"])) == ("done", [-0.1, 1.0])
    assert episodes["right/0"].facts["truncated"] is False
    assert episodes["night/0"].outcome.event == (
        "done" if goal == 5 else "truncated"
    )  # over and out of time: it is over


def by_hand_goal(seed: int) -> int:
    import gym_envs

    return int(gym_envs.Cellar().reset(seed=seed)[1]["goal"])


def test_text_actions_are_those_by_hand(tmp_path: Path, tiny_tokenizer_dir: Path, cellar: dict[str, Any]) -> None:
    replies = ["a", "too many letters", "bb", "x"]
    (episode,) = run_spec(
        tmp_path, spec_of(tiny_tokenizer_dir, cellar, [{"id": "a", "seed": 5}], [*replies, "y"])
    ).values()
    import gym_envs  # noqa: F401  (registers)

    seen, rewards, _, truncated = by_hand(gymnasium.make("Cellar-v0"), ["a", "bb", "x", "y"], 5)
    assert episode.outcome.failure is None
    told = shown(episode)
    refused = told.pop(2)
    assert refused.startswith("`too many letters` is no action.")
    assert told == seen
    assert earned(episode) == [rewards[0], 0.0, *rewards[1:]]
    assert truncated
    assert episode.facts["letters"] == 1


def test_frames_are_images(
    tmp_path: Path, tiny_tokenizer_dir: Path, cellar: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter's own answers, without a vision model: each frame is the one that the environment renders."""
    from base64 import b64decode

    import numpy as np
    from PIL import Image

    from engine.plugins.adapters.gymnasium import GymnasiumEnvironment
    from engine.schemas.environment import Task

    options = {**cellar["with"], "show": ["observation", "rgb_array"], "prompt": "get_prompt", "feedback": "hint"}
    env = GymnasiumEnvironment("Cellar-v0", **options)
    first = env.reset(Task(id="a", index=0, fields={"seed": 2}), 7).messages[0]
    assert first.text == "Say a word.a dark cellar"
    view: Any = type("View", (), {"reply": "a", "facts": {}})()
    said = env.step(view).messages[0]
    assert said.text == "a whisperyou said a"
    (image,) = said.images
    frame = np.asarray(Image.open(io.BytesIO(b64decode(image.image.partition(",")[2]))))
    assert frame.tolist() == np.full((28, 28, 3), 1, np.uint8).tolist()
    env.close()


def first_text(use: str, **options: Any) -> str:
    """The first message."""
    from engine.plugins.adapters.gymnasium import GymnasiumEnvironment
    from engine.schemas.environment import Task

    env = GymnasiumEnvironment(use, **options)
    (message,) = env.reset(Task(id="a", index=0, fields={"seed": 2}), 7).messages
    env.close()
    return message.text


def test_the_first_message_says_what_the_task_is_and_how_to_act() -> None:
    text = first_text("CartPole-v1")
    assert text.startswith("You act in `CartPole-v1`.\n\nDescription\n")
    assert "the goal is to balance the pole" in text
    assert "- 0: Push cart to the left" in text
    assert "| 2   | Pole Angle " in text
    assert "a reward of `+1` is given for every step" in text
    assert "Termination: Pole Angle is greater than" in text
    assert "Each reply is one action: an element of Discrete(2), such as 1. It may stand between <answer>" in text
    assert "gymnasium.make" not in text
    observation = gymnasium.make("CartPole-v1").reset(seed=2)[0].tolist()
    assert text.endswith(f"</answer>.\n\n{observation}")
    assert first_text("CartPole-v1", prompt="") == str(observation)


def test_the_first_message_says_only_what_fits_the_actions_and_what_is_shown(cellar: dict[str, Any]) -> None:
    options = LAKE["with"] | {"prompt": None, "answer": "(.*)"}
    text = first_text("FrozenLake-v1", **options)
    assert text.startswith("You act in `FrozenLake-v1`.\n\nFrozen lake involves crossing")
    assert "Action Space" not in text
    assert "Observation Space" not in text
    assert "\n\nEach reply is one action: one of left, down, right, up.\n\n" in text
    text = first_text("Cellar-v0", modules=["gym_envs"], actions="text")
    assert text == (
        "You act in `Cellar-v0`.\n\nSay a word; the room's colour is the number of its letters.\n\n"
        "Each reply is one action, as text. It may stand between <answer> and </answer>.\n\na dark cellar"
    )


@pytest.mark.parametrize(("space", "numbers"), [("screen", 27_648), ("nested", 4_101), ("grid", None)])
def test_an_observation_as_large_as_a_screen_is_shown_as_text_only_where_the_spec_says_so(
    cellar: dict[str, Any], space: str, numbers: int | None
) -> None:
    options = {"modules": ["gym_envs"], "prompt": "", "kwargs": {"form": space}}
    explicit = first_text("Screen-v0", show="observation", **options)
    if numbers is None:
        assert first_text("Screen-v0", **options) == explicit
        return
    with pytest.raises(AdapterError) as refused:
        first_text("Screen-v0", **options)
    assert f"an observation of `Screen-v0` has {numbers:,} numbers" in str(refused.value)
    assert "write `show: rgb_array` or `show: observation`; the last" in str(refused.value)


@LONG
def test_episodes_beside_faulty_ones_are_whole(
    tmp_path: Path, tiny_tokenizer_dir: Path, cellar: dict[str, Any]
) -> None:
    """Whatever 5 % of the environments do, the others are those by hand."""
    import gym_envs  # noqa: F401  (registers)

    faults = planned_faults(["raise", "shape", "reward", "exit", "hang"])
    rows = [{"id": f"t{n}", "seed": n % 7, "options": {"fault": fault}} for n, fault in enumerate(faults)]
    replies = ["one", "four", "seven", "x"]
    expected = {seed: by_hand(gymnasium.make("Cellar-v0"), replies, seed) for seed in range(7)}
    document = spec_of(tiny_tokenizer_dir, {**cellar, "timeout": 10}, rows, replies, rollout=FEW)
    episodes = run_spec(tmp_path, document)
    assert failures(episodes) == expected_failures(rows, faults, FAULTS)
    assert (len(episodes), len(failures(episodes))) == (EPISODES, EPISODES // FAULTY_EVERY)
    for row, fault in zip(rows, faults, strict=True):
        if fault is None:
            episode = episodes[f"{row['id']}/0"]
            seen, rewards, terminated, truncated = expected[row["seed"]]
            assert (shown(episode), earned(episode)) == (seen, rewards)
            assert (episode.facts["terminated"], episode.facts["truncated"]) == (
                terminated,
                truncated and not terminated,
            )


VISGYM = os.environ.get("VISGYM_SOURCE", "")
MAZE_BY_HAND = """
import hashlib, json, random, sys
import gymnasium, numpy
from gymnasium.envs.registration import make
random.seed(0); numpy.random.seed(0)
env = make("maze_2d/easy")
env.reset(seed=4)
digests = [hashlib.sha256(numpy.ascontiguousarray(env.render()).tobytes()).hexdigest()]
feedback = []
for action in sys.argv[1:]:
    _, reward, terminated, truncated, info = env.step(action)
    feedback.append(env.unwrapped.env_feedback)
    digests.append(hashlib.sha256(numpy.ascontiguousarray(env.render()).tobytes()).hexdigest())
print(json.dumps([digests, feedback]))
"""
MAZE_BY_ADAPTER = """
import hashlib, io, json, random, sys
from base64 import b64decode
import numpy
from PIL import Image
from engine.plugins.adapters.gymnasium import GymnasiumEnvironment
from engine.schemas.environment import Task
random.seed(0); numpy.random.seed(0)
source, *actions = sys.argv[1:]
env = GymnasiumEnvironment("maze_2d/easy", path=[source], show="rgb_array", pass_render_mode=False, actions="text", prompt="get_prompt", feedback="env_feedback")
def digest(message):
    (image,) = message.images
    frame = numpy.asarray(Image.open(io.BytesIO(b64decode(image.image.partition(",")[2]))))
    return hashlib.sha256(numpy.ascontiguousarray(frame).tobytes()).hexdigest()
digests = [digest(env.reset(Task(id="a", index=0, fields={"seed": 4}), 0).messages[0])]
feedback = []
for action in actions:
    step = env.step(type("View", (), {"reply": f"<answer>{action}</answer>", "facts": {}})())
    (message,) = step.messages
    feedback.append(message.text)
    digests.append(digest(message))
print(json.dumps([digests, feedback]))
"""


@pytest.mark.skipif(not VISGYM, reason="set VISGYM_SOURCE to a checkout of VisGym (github.com/visgym/VisGym)")
def test_visgyms_maze() -> None:
    """VisGym is a fork of the package `gymnasium`: `path` puts it first. Each runs in a process of its own."""
    actions = ["('move', 0)", "('move', 3)", "('jump', 0)", "('move', 7)", "('move', 0)"]

    def told(program: str, *arguments: str, path: str) -> str:
        env = {**os.environ, "PYTHONPATH": path, "SDL_VIDEODRIVER": "dummy"}
        result = subprocess.run(
            [sys.executable, "-c", program, *arguments], env=env, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()[-1]

    root = str(HERE.parents[2])
    by_adapter = told(MAZE_BY_ADAPTER, VISGYM, *actions, path=root)
    assert by_adapter == told(MAZE_BY_HAND, *actions, path=VISGYM)
