"""Exit statuses of `engine run`, `engine eval` and `engine train`."""

from __future__ import annotations

from typing import NoReturn

import typer

from engine.terminal import echo

DONE = 0
"""Every episode came to an end. A failed episode is data."""
ERROR = 1
"""The spec is invalid, or something could not be read, written or finished."""
USAGE = 2
"""The command line is wrong."""
FAILED = 3
"""No server could be asked; the first episodes all failed in one way; or the backend failed more than 10 % of them."""
INTERRUPTED = 130
"""Ctrl-C, as shells have it."""
TERMINATED = 143
"""SIGTERM, as shells have it."""


def wrong_usage(words: str) -> NoReturn:
    """Print what is wrong with the command line.

    Raises:
        typer.Exit: with status 2.
    """
    echo(words, err=True)
    raise typer.Exit(USAGE)
