"""Logs: text on a terminal, JSON lines otherwise; always on stderr, so that stdout has only the command's output.

The engine logs through structlog. Libraries' messages of level warning and above in the standard library's logging get
the same form.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TextIO, cast

import structlog

from engine.masking import mask_credentials
from engine.terminal import visible, visible_json

LEVEL_VARIABLE = "EPISODE_ENGINE_LOG"
"""Environment variable that sets the level: debug, info, warning, error."""

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _Stderr:
    """A stream that looks `sys.stderr` up at each write, because a live display may have replaced it."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def _json(event: Any, **_: Any) -> str:
    import json

    import orjson

    try:
        line = orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # lone surrogates, integers of more than 64 bits
        line = json.dumps(event, default=repr, ensure_ascii=False)
    return visible_json(mask_credentials(line))


def _visible_values(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Structlog processor: escapes control characters before the renderer adds its colours."""
    for key, value in event.items():
        if not isinstance(value, str | int | float | bool | None):
            value = repr(value)
        if isinstance(value, str):
            event[key] = visible(mask_credentials(value))
    return event


def configure_logging(level: str | None = None, *, json: bool | None = None) -> None:
    """Set logging up for this process. A second call replaces the settings of the first.

    Args:
        level: `debug`, `info`, `warning` or `error`; by default the value of the variable EPISODE_ENGINE_LOG, else
            `info`.
        json: One JSON object a line, or plain text; by default JSON if stderr is not a terminal.

    Raises:
        ValueError: the level does not exist.
    """
    name = (level or os.environ.get(LEVEL_VARIABLE) or "info").lower()
    if name not in _LEVELS:
        raise ValueError(f"unknown log level {name!r}; use one of {', '.join(_LEVELS)}")
    terminal = sys.stderr.isatty()
    as_json = not terminal if json is None else json

    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json),
    ]
    ending: list[structlog.types.Processor]
    if as_json:
        ending = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_json)]
    else:
        ending = [
            structlog.processors.format_exc_info,  # without local variables, which may hold secrets
            _visible_values,
            structlog.dev.ConsoleRenderer(
                colors=terminal and "NO_COLOR" not in os.environ, exception_formatter=structlog.dev.plain_traceback
            ),
        ]

    stream = cast("TextIO", _Stderr())
    structlog.configure(
        processors=[*shared, *ending],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[name]),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(_LEVELS[name], logging.WARNING))


@contextmanager
def collected_logs(name: str, level: int = logging.WARNING, *, alone: bool = True) -> Iterator[list[str]]:
    """Collect what a library logs from a level on. `alone`: only in this thread, and no other handler gets it, since it
    may quote a URL."""
    logger, thread, messages = logging.getLogger(name), threading.get_ident(), list[str]()
    handler = logging.Handler(level)

    def emit(record: logging.LogRecord) -> None:
        if not alone or record.thread == thread:
            messages.append(record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    if alone:
        logger.propagate = False
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


class Seldom:
    """Writes of each event at most one line a second; the next line says how many were left out.

    Args:
        log: Where the lines go.
    """

    def __init__(self, log: Any) -> None:
        self._log = log
        self._written: dict[str, tuple[float, int]] = {}
        """By event: when its last line was written, and how many were left out since."""

    def warning(self, event: str, **values: Any) -> None:
        """Write a line of the level warning; `exc_info=True` adds the traceback."""
        now = time.monotonic()
        last, left_out = self._written.get(event, (-math.inf, 0))
        if now - last < 1.0:
            self._written[event] = last, left_out + 1
            return
        self._written[event] = now, 0
        self._log.warning(event, **values, **({"left_out": left_out} if left_out else {}))
