"""Imports of a trainer's own library, which is needed only where that trainer runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import TrainError


@contextmanager
def imports_of(library: str, install: str) -> Iterator[None]:
    """Import modules of a trainer inside of this block.

    Args:
        library: The trainer's name.
        install: What pip installs.

    Raises:
        TrainError: kind `train_setup`: an import failed.
    """
    try:
        yield
    except ImportError as error:
        raise TrainError(
            f"{library} cannot be imported ({error}); pip install {install}", kind="train_setup"
        ) from error
