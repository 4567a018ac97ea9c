"""The failure of an episode that an exception becomes."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, get_args

import structlog

from engine.errors import EngineError
from engine.schemas.trajectory import Blame, Failure
from engine.storable import valid_text, words_of

if TYPE_CHECKING:
    from engine.episode.episode import Episode

log = structlog.get_logger(__name__)

_BLAMES = frozenset(get_args(Blame))


def failure_of(error: EngineError, episode: Episode) -> Failure:
    """The failure of a typed exception. The spec's code may raise one too, so its fields are not trusted."""
    trace = getattr(error, "trace", None)
    return Failure(
        kind=valid_text(str(error.kind), 100),
        blame=error.blame if error.blame in _BLAMES else "environment",
        message=valid_text(str(error)),
        state=episode.state,
        turn=episode.turn,
        trace=valid_text(trace) if isinstance(trace, str) else None,
    )


def unexpected(error: BaseException, episode: Episode) -> Failure:
    """The failure of an unexpected exception: an error of the engine, with its full traceback."""
    log.error("unexpected error in an episode", episode=episode.id, state=episode.state, error=words_of(error))
    return Failure(
        kind="engine_error",
        blame="engine",
        message=words_of(error),
        state=episode.state,
        turn=episode.turn,
        trace=valid_text("".join(traceback.format_exception(error))),
    )
