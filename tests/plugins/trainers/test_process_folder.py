"""Folders of processes that share one: each is taken once, and left in any thread."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine.errors import TrainError
from engine.plugins.trainers.process import ProcessFolder
from engine.plugins.trainers.rollouts import PROCESSES, TrainerRollouts


def test_a_folder_that_another_thread_left_is_taken_again(tmp_path: Path) -> None:
    first, second = ProcessFolder.take(tmp_path), ProcessFolder.take(tmp_path)
    assert (first.number, second.number) == (0, 1)
    thread = threading.Thread(target=first.release)
    thread.start()
    thread.join()
    assert ProcessFolder.take(tmp_path).path == tmp_path / "process-0"


def test_more_processes_than_numbers_are_refused() -> None:
    with pytest.raises(TrainError, match="more than 1000 processes"):
        TrainerRollouts.number_uses_of(object.__new__(TrainerRollouts), PROCESSES)
