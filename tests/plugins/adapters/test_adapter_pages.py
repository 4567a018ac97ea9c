"""The specs that docs/data.md prints for other libraries run as they are printed, with the real library.

A test gives its own rows, tokenizer and replies; each episode is compared with the library's own loop.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from adapters_kit import earned
from command_line import run_to_store

from engine.schemas.trajectory import Trajectory

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "data.md"
MAX_LINES = 15


def printed(name: str) -> str:
    """The spec with this file name on the page, without the line with its name."""
    found = re.search(rf"^```yaml\n# {re.escape(name)}[^\n]*\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[1]


def run(folder: Path, name: str, tokenizer: Path, replies: list[str], *settings: str) -> Trajectory:
    """Run a printed spec with scripted replies and a small tokenizer."""
    (folder / name).write_text(printed(name))
    backend = json.dumps({"kind": "scripted", "replies": replies})
    changes = [f"model.path={tokenizer}", f"backend={backend}", *settings]
    with run_to_store(folder / name, folder / "runs", settings=changes) as store:
        (episode,) = store.trajectories()
    assert episode.outcome.failure is None
    return episode


def said(episode: Trajectory) -> list[str]:
    return [message.text for message in episode.messages if message.role != "assistant"]


@pytest.mark.parametrize("name", ["slime_geo3k.yaml", "skyrl_gsm8k.yaml", "verifiers_env.yaml", "verl_gsm8k.yaml"])
def test_a_spec_has_at_most_15_lines(name: str) -> None:
    assert len(printed(name).splitlines()) <= MAX_LINES


@pytest.mark.slow
@pytest.mark.skipif("SLIME_SOURCE" not in os.environ, reason="set SLIME_SOURCE to a checkout of slime")
def test_slimes_geo3k(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Rows with the columns of slime's own data file, read by slime's own keys; slime's loop runs in its own process."""
    from test_adapter_slime import CALLS, GEO3K_BY_HAND, PROBLEM, SOURCE

    (tmp_path / "slime").symlink_to(SOURCE)
    (tmp_path / "geo3k_imgurl_processed").mkdir()
    row = {"problem": "What is 8 / 15?", "answer": PROBLEM["label"], "images": []}
    schema = pyarrow.schema(
        [("problem", pyarrow.string()), ("answer", pyarrow.string()), ("images", pyarrow.list_(pyarrow.string()))]
    )
    table = pyarrow.Table.from_pylist([row], schema)
    pyarrow.parquet.write_table(table, tmp_path / "geo3k_imgurl_processed" / "train.parquet")
    replies = [CALLS[0], CALLS[2], CALLS[3]]
    by_hand = subprocess.run(
        [sys.executable, "-c", GEO3K_BY_HAND.replace("max_turns=9", "max_turns=3"), row["answer"], json.dumps(replies)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        check=True,
    )
    episode = run(tmp_path, "slime_geo3k.yaml", tiny_tokenizer_dir, replies)
    seen, rewards = json.loads(by_hand.stdout.splitlines()[-1])
    assert (said(episode), earned(episode)) == (["What is 8 / 15?", *seen], rewards)
    assert sum(rewards) == 1.0


@pytest.mark.adapters
@pytest.mark.skipif(find_spec("skyrl_gym") is None, reason="needs the extra `skyrl-gym`")
def test_skyrls_gsm8k(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """A row as SkyRL's own script prepares it."""
    import skyrl_gym
    from test_adapter_skyrl_gym import by_hand, settings

    prompt = [{"role": "system", "content": "Do sums."}, {"role": "user", "content": "3 + 4?"}]
    row: dict[str, Any] = {
        "data_source": "openai/gsm8k",
        "prompt": prompt,
        "env_class": "gsm8k_multi_turn",
        "reward_spec": {"method": "rule", "ground_truth": "7"},
        "extra_info": {"split": "train", "index": 0, "max_turns": 3},
    }
    (tmp_path / "gsm8k_multi_turn").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "gsm8k_multi_turn" / "train.parquet")
    replies = ["#### 6", "so it is 7", "#### 7"]
    episode = run(tmp_path, "skyrl_gsm8k.yaml", tiny_tokenizer_dir, replies)
    world = skyrl_gym.make("gsm8k_multi_turn", env_config=settings(), extras={**row, "max_turns": 3})
    assert (said(episode), earned(episode)) == by_hand(world, prompt, replies)
    assert sum(earned(episode)) > 0


@pytest.mark.adapters
@pytest.mark.skipif(find_spec("verifiers") is None, reason="needs the extra `verifiers`")
def test_an_environment_of_verifiers(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    from test_adapter_verifiers import by_hand

    from engine.plugins.adapters.verifiers import rows

    shutil.copy(HERE / "env_vf.py", tmp_path / "my_env.py")
    row = next(iter(rows("env_vf.py:load_environment", str(HERE), {"max_turns": 4})))
    replies = ["1", "0"]
    episode = run(tmp_path, "verifiers_env.yaml", tiny_tokenizer_dir, replies, "tasks.limit=1")
    messages, reward = by_hand("load_environment", row, replies, max_turns=4)
    assert said(episode) == messages[:-1]  # "Right.", the last word, is shown to nobody
    assert sum(earned(episode)) == pytest.approx(reward + 0.25, abs=1e-12)


@pytest.mark.slow  # by default: test_adapter_verl
def test_verls_gsm8k(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """verl need not be installed. The tool is one of ours, in verl's form; verl's own one runs in `test_adapter_verl.py`."""
    from test_adapter_verl import ITEM, row, went, write

    write(tmp_path, [ITEM], [row()])
    (tmp_path / "tools.yaml").rename(tmp_path / "gsm8k_tool_config.yaml")
    replies = ['<call>grade(answer="41")</call>', '<call>grade(answer="42")</call>', "It is 42."]
    settings = ["model.tool_calls=plain", "model.tool_role=user"]
    episode = run(tmp_path, "verl_gsm8k.yaml", tiny_tokenizer_dir, replies, *settings)
    assert went(episode) == (
        ["Current parsed answer='41' reward=0.0", "Current parsed answer='42' reward=1.0"],
        [-0.05, 0.0],
    )
