"""The base of the contracts: a validator is built when its class is first used."""

from __future__ import annotations

import subprocess
import sys

FIRST_USE = """
import threading
from engine.schemas.episode import EpisodeSpec

whole = {"spec": "episode/v1", "name": "n", "model": {"path": "org/m"}, "machine": "single_turn",
         "tasks": {"source": "inline", "rows": [{"a": 1}]}, "prompt": [{"role": "user", "content": "x"}]}
assert not EpisodeSpec.__pydantic_complete__
start, specs = threading.Barrier(8), []

def read():
    start.wait()
    specs.append(EpisodeSpec.model_validate(whole))

threads = [threading.Thread(target=read) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(specs) == 8 and all(spec == specs[0] for spec in specs)
"""


def test_threads_may_use_a_class_for_the_first_time_at_once() -> None:
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True)
