"""`rollout.max_cost` of a training: its episodes and evaluations count together, and a resume goes on with a higher limit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer
from command_line import engine_here

from engine.train.metrics import read_metrics


@pytest.mark.slow
def test_a_training_that_has_cost_its_limit_stops_and_goes_on_with_a_higher_one(
    train_spec: Any, tmp_path: Path
) -> None:
    told = tmp_path / "notices"
    code = f"import sys; open({str(told)!r}, 'a').write(sys.stdin.read() + '\\n')"
    with ApiServer() as server:
        api = {"kind": "openai", "url": server.url, "model": "m", "prices": {"input": 0, "output": 1e5}}  # 1 a reply
        user = {"prompt": [{"role": "user", "content": "{{reply}}"}], "turn_tokens": 4, "backend": api}
        spec = train_spec(
            user=user | {"grader": {"use": "code_for_training:Listener"}},
            train={
                "steps": 2,
                "dynamic_sampling": False,
                "eval": {"every": 1, "tasks": {"source": "inline", "rows": [{"id": "e", "say": "a"}], "id": "id"}},
            },
            rollout={"samples_per_task": 4, "seed": 3, "max_cost": 9, "live_episodes": 4, "concurrency": 4},
            notify={"command": [sys.executable, "-c", code], "on": ["budget", "diverged", "finished"]},
        )
        status, out, err = engine_here("train", spec, "-q", "--run-name", "t", cwd=tmp_path)
        assert status == 3, err
        assert "of at most 9 (`rollout.max_cost`)" in err
        assert "--set rollout.max_cost=AMOUNT" in out
        folder = tmp_path / "runs" / "t"
        assert 9 <= costs(folder) == server.served < 9 + 4
        assert engine_here("train", "--resume", folder, "-q", cwd=tmp_path)[0] == 3
        assert costs(folder) == server.served < 9 + 4
        more = ("--set", "rollout.max_cost=1000")
        status, out, err = engine_here("train", "--resume", folder, "-q", *more, cwd=tmp_path)
        assert status == 0, err
        assert costs(folder) == server.served
    assert f"Cost of the training: {server.served}, with its evaluations" in out
    assert [line["step"] for line in read_metrics(folder)] == [0, 1, 2]
    assert [json.loads(line)["kind"] for line in told.read_text().splitlines()] == ["budget", "finished"]
    evaluated = {json.loads(line)["episode"] for line in (folder / "costs.jsonl").read_text().splitlines()}
    assert {name.partition("@")[2].partition("/")[0] or name.partition("/")[0] for name in evaluated} > {"e"}


def costs(folder: Path) -> float:
    return float(sum(json.loads(line)["cost"] for line in (folder / "costs.jsonl").read_text().splitlines()))
