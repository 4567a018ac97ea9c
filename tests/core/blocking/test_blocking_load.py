"""Deadlines under load, in whole runs: many slow users at once, and busy threads past their deadline."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import ended
from test_blocking import start, told, write_spec

LOAD = {"concurrency": 256, "live_episodes": 256}


def slow(seconds: float, timeout: float) -> dict[str, Any]:
    return {"use": "blocking_code:SlowUser", "timeout": timeout, "with": {"seconds": seconds}}


@pytest.mark.slow
def test_256_slow_users_at_once_all_answer_in_time(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Each takes 0.5 s of its 2.5 s; how many threads there are and who waits for one makes no difference."""
    tasks = [{"id": f"t{n}"} for n in range(512)]
    plain = {"environment": None, "tools": [], "rewards": {}, "rollout": LOAD, "user": slow(0.5, 2.5)}
    asked = {"prompt": [{"role": "user", "content": "What is it?"}]}
    replies = {"backend": {"kind": "scripted", "replies": ["It is 42."] * 3}}
    spec = write_spec(tmp_path, tiny_tokenizer_dir, tasks, **plain, **asked, **replies)
    code, out, err = ended(start("run", spec, cwd=tmp_path))
    assert code == 0, out + err
    ends = Counter((episode.outcome.failure, episode.outcome.solved) for episode in told(tmp_path).values())
    assert ends == {(None, True): 512}


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "timeout"), [pytest.param(0.05, 2.5, marks=pytest.mark.exhaustive), (0.5, 1.0)])
def test_busy_threads_past_their_deadline_fail_no_healthy_episode(
    seconds: float, timeout: float, tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    bad = [{"id": f"bad-{n}", "where": "tool", "how": "busy"} for n in range(10)]
    healthy = [{"id": f"healthy-{n}", "where": "", "how": ""} for n in range(790)]
    call = {"tool_calls": [{"name": "probe", "arguments": {}}]}
    spec = write_spec(
        tmp_path,
        tiny_tokenizer_dir,
        bad + healthy,
        backend={"kind": "scripted", "replies": [call, *["It is 42."] * 3]},
        user=slow(seconds, timeout),
        rollout=LOAD,
    )
    code, out, err = ended(start("run", spec, cwd=tmp_path))
    assert code == 0, out + err
    episodes = told(tmp_path)
    ends = Counter((episode.outcome.failure, episode.outcome.solved) for episode in episodes.values())
    assert ends == {(None, True): 800}
    results = Counter(
        (name.partition("-")[0], message.text)
        for name, episode in episodes.items()
        for message in episode.messages
        if message.role == "tool"
    )
    assert results == {("bad", "`probe` did not answer within 1 s."): 10, ("healthy", "looked up"): 790}
    assert "10 calls kept computing after their deadline: 10 were interrupted" in out
