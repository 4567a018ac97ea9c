"""Which workers serve the next episode: those in which nothing of an object still runs. And what counts for its deadline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_but
from structlog.testing import capture_logs
from written_specs import save_spec, scripted_spec

WORLD = """\
import asyncio
import os
import threading
import time

from engine.schemas.environment import Reset

time.sleep(float(os.environ.get("IMPORT_SECONDS", "0")))


class World:
    def __init__(self, leaves: str) -> None:
        self.leaves = leaves

    async def reset(self, task, seed: int) -> Reset:
        if self.leaves == "a pool's thread":
            await asyncio.to_thread(time.sleep, 0)
        elif self.leaves == "tqdm's monitor":
            from tqdm import tqdm

            assert list(tqdm([1, 2])) == [1, 2]
            assert "tqdm_monitor" in [thread.name for thread in threading.enumerate()]
        elif self.leaves == "a thread":
            threading.Thread(target=time.sleep, args=(3600,), name="mine", daemon=True).start()
        return Reset(facts={"pid": os.getpid()})
"""


def spec(tokenizer: Path, folder: Path, leaves: str, timeout: float) -> Path:
    (folder / "worlds_that_leave.py").write_text(WORLD)
    document: dict[str, Any] = {
        **scripted_spec("warm", tokenizer, ["Done."], 4, ask="Begin.", tool_calls=None),
        "environment": {
            "use": "worlds_that_leave:World",
            "isolation": "process",
            "timeout": timeout,
            "with": {"leaves": leaves},
        },
        "machine": "tools",
        "rollout": {"concurrency": 1, "live_episodes": 1},
    }
    return save_spec(folder / "warm.yaml", document)


@pytest.mark.parametrize("leaves", slow_but(["nothing", "a pool's thread", "tqdm's monitor"], "tqdm's monitor"))
async def test_a_worker_serves_the_next_episode(
    tmp_path: Path, tiny_tokenizer_dir: Path, run_here: Callable[..., Any], leaves: str
) -> None:
    found = await run_here(spec(tiny_tokenizer_dir, tmp_path, leaves, 60))
    assert [episode.outcome.failure for episode in found.values()] == [None] * 4
    assert len({episode.facts["pid"] for episode in found.values()}) == 1


async def test_one_with_a_thread_of_the_last_episode_does_not_and_the_log_says_so_once(
    tmp_path: Path, tiny_tokenizer_dir: Path, run_here: Callable[..., Any]
) -> None:
    with capture_logs() as logs:
        found = await run_here(spec(tiny_tokenizer_dir, tmp_path, "a thread", 60))
    assert len({episode.facts["pid"] for episode in found.values()}) == 4
    (told,) = [entry for entry in logs if "not used again" in entry["event"]]
    assert (told["use"], told["still_running"]) == ("worlds_that_leave:World", "the thread `mine`")


@pytest.mark.slow
async def test_imports_do_not_count_for_the_deadline(
    tmp_path: Path, tiny_tokenizer_dir: Path, run_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module takes longer to import than the environment's deadline, and each episode imports it anew."""
    monkeypatch.setenv("IMPORT_SECONDS", "4")
    found = await run_here(spec(tiny_tokenizer_dir, tmp_path, "a thread", 3))
    assert [episode.outcome.failure for episode in found.values()] == [None] * 4
