"""Draws the plots of a training when it ends, also by an error. A plot that cannot be drawn is named and does no harm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.plugins.plots.plots import draw
from engine.runner.observers import TrainingObserver

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec


class DrawnTraining(TrainingObserver):
    """Draws the metrics of the training in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began = False

    def began(self) -> None:
        """See `TrainingObserver`."""
        self._began = True

    def close(self) -> str | None:
        """Draw. Returns where the plots are."""
        if not self._began:
            return None
        try:
            files = draw(self._folder)
        except EngineError as error:
            return f"plots were not written: {error}"
        return f"Plots: {files[0].parent}" if files else None


def observe(loaded: LoadedSpec, folder: Path) -> DrawnTraining:
    """The hook `observe_training`."""
    return DrawnTraining(folder)
