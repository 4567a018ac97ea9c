"""Exit statuses of `engine run`, `engine eval` and `engine train`."""

from __future__ import annotations

from typing import NoReturn

import typer

from engine.terminal import echo

DONE = 0
"""Every episode has ended, one of them without a failure. A failed episode is a result."""
ERROR = 1
"""The spec is invalid, something could not be read, written or finished, or every episode failed."""
USAGE = 2
"""The command line is wrong."""
FAILED = 3
"""No server could be reached, the first episodes all failed with one cause, or the backend failed more than 10 % of the episodes."""
INTERRUPTED = 130
"""Ctrl-C: 128 plus the signal's number, as in shells."""
TERMINATED = 143
"""SIGTERM: 128 plus the signal's number, as in shells."""


def wrong_usage(words: str) -> NoReturn:
    """Print what is wrong with the command line.

    Raises:
        typer.Exit: with status 2.
    """
    echo(words, err=True)
    raise typer.Exit(USAGE)
