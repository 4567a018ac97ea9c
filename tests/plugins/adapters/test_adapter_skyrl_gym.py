"""SkyRL-gym's environments run unchanged: the same observations and rewards as by SkyRL's own calls."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
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

from engine.plugins.adapters.base import load_target
from engine.schemas.environment import Environment

skyrl_gym = pytest.importorskip("skyrl_gym", reason="needs the extra `skyrl-gym`")
pytestmark = pytest.mark.adapters

PROMPT = [{"role": "system", "content": "Do sums."}, {"role": "user", "content": "3 + 4?"}]
OWN = """\
import os
import time

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Echo(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.word, self.fault = env_config.word, extras.get("fault")

    def step(self, action):
        self.turns += 1
        if self.fault == "raise":
            raise RuntimeError("no")
        if self.fault == "hang":
            time.sleep(3600)
        if self.fault == "exit":
            os._exit(3)
        if self.fault == "shape":
            return None
        if self.fault == "reward":
            return BaseTextEnvStepOutput(observations=[], reward="much", done=True, metadata={})
        said = [{"role": "user", "content": f"{self.word} {action} {self.turns}"}]
        return BaseTextEnvStepOutput(observations=said, reward=len(action) / 10, done=self.turns == 3, metadata={"n": self.turns})

    def get_metrics(self):
        return {"steps": self.turns}
"""
FAULTS = {
    "raise": "environment_error",
    "shape": "adapter_error",
    "reward": "adapter_error",
    "exit": "environment_crashed",
    "hang": "environment_timeout",
}


def by_hand(env: Any, prompt: list[Any], replies: list[str]) -> tuple[list[str], list[float]]:
    """SkyRL's loop: what the environment says, the first messages included, and each step's reward."""
    conversation, _ = env.init(prompt)
    seen = [message["content"] for message in conversation]
    rewards = []
    for reply in replies:
        answer = env.step(reply)
        rewards.append(float(answer["reward"]))
        if answer["done"]:
            break
        seen += [message["content"] for message in answer["observations"]]
    env.close()
    return seen, rewards


def settings(**values: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(values)


def went(trajectory: Any) -> tuple[list[str], list[float]]:
    said = [message.text for message in trajectory.messages if message.role != "assistant"]
    return said, earned(trajectory)


def test_it_fits_its_protocol() -> None:
    from engine.plugins.adapters.skyrl_gym import SkyRLEnvironment

    assert isinstance(SkyRLEnvironment("gsm8k"), Environment)


@pytest.mark.parametrize("replies", [["#### 6", "so it is 7", "#### 7"], ["#### 7"], ["a", "b", "c", "d"]])
def test_gsm8k_multi_turn(tmp_path: Path, tiny_tokenizer_dir: Path, replies: list[str]) -> None:
    row = {"id": "a", "prompt": PROMPT, "reward_spec": {"ground_truth": "7"}, "extra_info": {"max_turns": 3}}
    environment = {"adapter": "skyrl_gym", "use": "gsm8k_multi_turn"}
    (episode,) = run_spec(tmp_path, spec_of(tiny_tokenizer_dir, environment, [row], replies, prompt=[])).values()
    env = skyrl_gym.make("gsm8k_multi_turn", env_config=settings(), extras=row)
    assert went(episode) == by_hand(env, PROMPT, replies)
    assert episode.facts["metrics"] == {"steps": len(episode.turns)}
    assert episode.outcome.event == "done"


def test_text2sql(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    folder = tmp_path / "spider" / "database" / "shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as database:
        database.execute("create table item (name text, price int)")
        database.executemany("insert into item values (?, ?)", [("tea", 3), ("salt", 1)])
    row = {
        "id": "a",
        "prompt": PROMPT,
        "db_id": "shop",
        "data": "spider",
        "reward_spec": {"ground_truth": "select name from item where price > 2"},
    }
    replies = [
        "<think>look</think><sql>select * from item where price > 2</sql>",  # of more rows, SkyRL shows a set: in any order
        "<think>again</think><sql>select wrong</sql>",
        "<think>so</think><solution>select name from item where price > 2</solution>",
    ]
    environment = {"adapter": "skyrl_gym", "use": "text2sql", "with": {"env_config": {"db_path": str(tmp_path)}}}
    (episode,) = run_spec(tmp_path, spec_of(tiny_tokenizer_dir, environment, [row], replies, prompt=[])).values()
    env = skyrl_gym.make("text2sql", env_config=settings(db_path=str(tmp_path)), extras=row)
    assert went(episode) == by_hand(env, PROMPT, replies)
    assert len(episode.turns) == 3


@pytest.fixture
def retriever() -> Iterator[str]:
    """A retriever of the form that SkyRL's search tool asks."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = [
                [{"document": {"contents": f'"{query}"\nIt is 7.'}, "score": 1.0}] for query in self._queries(asked)
            ]
            body = json.dumps({"result": found}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        @staticmethod
        def _queries(asked: dict[str, Any]) -> list[str]:
            return asked.get("queries") or [asked["query"]]

        def log_message(self, *arguments: Any) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()


def test_search(tmp_path: Path, tiny_tokenizer_dir: Path, retriever: str) -> None:
    row = {"id": "a", "prompt": PROMPT, "reward_spec": {"ground_truth": {"target": ["7"]}}, "max_turns": 3}
    replies = ["<search>3 + 4</search>", "no search", "<answer>7</answer>"]
    config = {"search_url": retriever, "topk": 1, "timeout": 5, "log_requests": False}
    environment = {"adapter": "skyrl_gym", "use": "search", "with": {"env_config": config}}
    (episode,) = run_spec(tmp_path, spec_of(tiny_tokenizer_dir, environment, [row], replies, prompt=[])).values()
    env = skyrl_gym.make("search", env_config=settings(**config), extras=row)
    assert went(episode) == by_hand(env, PROMPT, replies)
    assert "It is 7." in went(episode)[0][2]


def test_a_class_of_ones_own(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    (tmp_path / "echo_env.py").write_text(OWN)
    environment = {"adapter": "skyrl_gym", "use": "echo_env.py:Echo", "with": {"env_config": {"word": "Heard"}}}
    document = spec_of(tiny_tokenizer_dir, environment, [{"id": "a"}], ["one", "three", "five"])
    (episode,) = run_spec(tmp_path, document).values()
    assert (shown(episode), earned(episode)) == (["Heard one 1", "Heard three 2"], [0.3, 0.5, 0.4])
    assert {key: episode.facts[key] for key in ("n", "metrics", "terminated")} == {
        "n": 3,
        "metrics": {"steps": 3},
        "terminated": True,
    }


def test_an_id_that_is_not_registered_fails_and_is_named(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    environment = {"adapter": "skyrl_gym", "use": "gsm9k"}
    (episode,) = run_spec(tmp_path, spec_of(tiny_tokenizer_dir, environment, [{"id": "a"}], ["x"])).values()
    assert episode.outcome.failure is not None
    assert "No registered env with id: gsm9k" in episode.outcome.failure.message


@LONG
def test_episodes_beside_faulty_ones_are_whole(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Whatever 5 % of the environments do, the others give what SkyRL's loop gives."""
    (tmp_path / "echo_env.py").write_text(OWN)
    environment = {
        "adapter": "skyrl_gym",
        "use": "echo_env.py:Echo",
        "timeout": 10,
        "with": {"env_config": {"word": "Heard"}},
    }
    faults = planned_faults(["raise", "shape", "reward", "exit", "hang"])
    rows = [{"id": f"t{n}", "fault": fault} for n, fault in enumerate(faults)]
    replies = ["one", "three", "five"]
    episodes = run_spec(tmp_path, spec_of(tiny_tokenizer_dir, environment, rows, replies, rollout=FEW))
    assert failures(episodes) == expected_failures(rows, faults, FAULTS)
    assert (len(episodes), len(failures(episodes))) == (EPISODES, EPISODES // FAULTY_EVERY)
    whole = by_hand(load_target("echo_env.py:Echo", str(tmp_path))(settings(word="Heard"), {}), [], replies)
    assert whole == (["Heard one 1", "Heard three 2"], [0.3, 0.5, 0.4])
    for row in rows:
        if row["fault"] is None:
            episode = episodes[f"{row['id']}/0"]
            assert (shown(episode), earned(episode)) == whole
