"""`effects: replayable`: an episode with an adapter that is stopped and resumed comes to the same, and its replay finds no difference."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from adapters_kit import LONG, spec_of
from stopping import Resumed, content

HERE = Path(__file__).parent
LAKE: dict[str, Any] = {
    "adapter": "gymnasium",
    "use": "FrozenLake-v1",
    "with": {"show": "ansi", "kwargs": {"map_name": "8x8"}, "actions": ["left", "down", "right", "up"]},
}
SUMS = {
    "id": "a",
    "prompt": [{"role": "user", "content": "3 + 4?"}],
    "reward_spec": {"ground_truth": "7"},
    "extra_info": {"max_turns": 3},
}
GUESS = {"id": "a", "prompt": [{"role": "user", "content": "Guess."}], "answer": "2", "info": {}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "gymnasium": (LAKE, {"id": "a", "seed": 3}, ["right", "down", "right", "up"]),
    "skyrl_gym": ({"adapter": "skyrl_gym", "use": "gsm8k_multi_turn"}, SUMS, ["#### 6", "so it is 7", "#### 7"]),
    "verifiers": ({"adapter": "verifiers", "use": "env_vf.py:load_environment"}, GUESS, ["1", "3", "2"]),
}


@LONG
@pytest.mark.adapters
@pytest.mark.parametrize("adapter", CASES)
async def test_a_resume_rebuilds_the_environment(tmp_path: Path, tiny_tokenizer_dir: Path, adapter: str) -> None:
    if find_spec(adapter) is None:
        pytest.skip(f"{adapter} is not installed: pip install 'episode-engine[adapters]'")
    environment, row, replies = CASES[adapter]
    shutil.copy(HERE / "env_vf.py", tmp_path)
    document = spec_of(tiny_tokenizer_dir, environment, [row], replies, limits={"assistant_turns": len(replies)})
    document["prompt"] = []
    path = tmp_path / "resumed.yaml"
    path.write_text(yaml.safe_dump(document))
    resumed = Resumed(path)
    await resumed.run(tmp_path / "whole")
    with resumed.store(tmp_path / "whole") as store:
        (wanted,) = map(content, store.trajectories())
    assert wanted["outcome"]["failure"] is None
    assert len(wanted["turns"]) == len(replies)
    for commit in (2, 4):
        out = tmp_path / str(commit)
        assert await resumed.starved(out, commit)
        await resumed.run(out)
        with resumed.store(out) as store:
            assert list(map(content, store.trajectories())) == [wanted]
    assert await resumed.differences(out) == []
