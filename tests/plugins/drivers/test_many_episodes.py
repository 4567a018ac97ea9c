"""The memory of a run does not grow with its episodes. `bench/many_episodes.py` runs 100,000 of them.

Needs Ray (the extra `ray`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.store import RunStore

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from many_episodes import growth, run

pytest.importorskip("ray", reason="needs Ray: pip install 'episode-engine[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

EPISODES = 12_000
BYTES = 2_000
"""Growth of each process per episode, at most. An episode of two turns has 5,400 bytes in its store, and far more as objects."""


def test_no_process_keeps_its_episodes_in_memory(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    points = run(tmp_path, str(tiny_tokenizer_dir), EPISODES, 2, 1.0, show=False)
    grown = growth(points, EPISODES)
    assert sorted(name.split()[0] for name in grown) == ["command", "coordinator", "driver", "driver"]
    assert {name: size for name, size in grown.items() if size > BYTES} == {}
    (folder,) = (tmp_path / "runs").iterdir()
    with RunStore.open(folder, readonly=True) as store:
        assert len(store.finished()) == EPISODES
