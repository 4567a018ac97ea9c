"""The function of docs/data.md plays an environment of OpenEnv, whose server runs with version 2 of `mcp`."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from adapters_kit import earned, run_spec, spec_of

pytestmark = pytest.mark.adapters

PAGE = Path(__file__).parents[3] / "docs" / "data.md"
WORLD = """
from openenv.core.env_server import Action, Environment, Observation, State


class Text(Action):
    text: str


class Shown(Observation):
    text: str


class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.tries = 0

    def reset(self, seed=None, episode_id=None, **more):
        self.tries = 0
        return Shown(text="Guess a letter.")

    def step(self, action, timeout_s=None, **more):
        self.tries += 1
        right = action.text == "e"
        return Shown(text=f"Try {self.tries}: no.", done=right, reward=1.0 if right else -0.25)

    @property
    def state(self):
        return State(step_count=self.tries)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server of the world above."""
    openenv = pytest.importorskip(
        "openenv.core.env_server", reason="NOT CHECKED: needs openenv-core, apart from verifiers"
    )
    import uvicorn

    (tmp_path / "guess_world.py").write_text(WORLD)
    monkeypatch.syspath_prepend(tmp_path)
    import guess_world

    app = openenv.create_fastapi_app(guess_world.Guess, guess_world.Text, guess_world.Shown, max_concurrent_envs=8)
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    running.should_exit = True
    thread.join()


def test_the_function_of_the_page_plays_it(tmp_path: Path, tiny_tokenizer_dir: Path, server: str) -> None:
    assert int(version("mcp").split(".")[0]) >= 2
    (code,) = re.findall(r"^```python\n(# openenv_world\.py\n.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "openenv_world.py").write_text(code)
    environment: dict[str, Any] = {"use": "openenv_world:world", "with": {"url": server}, "effects": "external"}
    rows = [{"id": "a"}, {"id": "b"}]
    script = [{"task": "a", "replies": ["a", "o", "e"]}, {"task": "b", "replies": ["e"]}]
    episodes = run_spec(tmp_path, spec_of(tiny_tokenizer_dir, environment, rows, script, prompt=[]))
    said = [(message.role, message.text) for message in episodes["a/0"].messages]
    assert said == [
        ("user", "Guess a letter."),
        ("assistant", "a"),
        ("user", "Try 1: no."),
        ("assistant", "o"),
        ("user", "Try 2: no."),
        ("assistant", "e"),
    ]
    assert (earned(episodes["a/0"]), earned(episodes["b/0"])) == ([-0.25, -0.25, 1.0], [1.0])
    assert {episode.outcome.event for episode in episodes.values()} == {"done"}
