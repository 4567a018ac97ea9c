"""Folders of processes that share one: each is taken once, and left in any thread."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine.errors import TrainError
from engine.plugins.trainers.process import lock_process_number
from engine.plugins.trainers.rollouts import PROCESSES, TrainerRollouts


def test_a_folder_that_another_thread_left_is_taken_again(tmp_path: Path) -> None:
    (first, lock), (second, other) = lock_process_number(tmp_path), lock_process_number(tmp_path)
    assert (first, second) == (0, 1)
    thread = threading.Thread(target=lock.release)
    thread.start()
    thread.join()
    assert lock_process_number(tmp_path)[0] == 0
    assert other.is_locked


def test_more_processes_than_numbers_are_refused() -> None:
    with pytest.raises(TrainError, match="more than 1000 processes"):
        TrainerRollouts.number_uses_of(object.__new__(TrainerRollouts), PROCESSES)
