"""Logs are text on a terminal and JSON lines elsewhere."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from engine.logs import configure_logging


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    handlers, level = logging.getLogger().handlers, logging.getLogger().level
    yield
    logging.getLogger().handlers = handlers
    logging.getLogger().setLevel(level)
    structlog.reset_defaults()


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_without_a_terminal_each_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    structlog.get_logger("x").info("episode begins", episode="t/0", seed=3)
    out = capsys.readouterr()
    assert out.out == ""
    (line,) = lines(out.err)
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "episode begins", "episode": "t/0", "seed": 3, "level": "info"}


def test_an_exception_is_told_inside_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(json=True)
    try:
        raise KeyError("gone")
    except KeyError:
        structlog.get_logger().exception("failed")
    (line,) = lines(capsys.readouterr().err)
    assert line["level"] == "error"
    assert line["exception"].splitlines()[-1] == "KeyError: 'gone'"


def test_libraries_speak_in_the_same_form_from_warnings_on(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    logging.getLogger("library").info("chatter")
    logging.getLogger("library").warning("careful: %d", 3)
    (line,) = lines(capsys.readouterr().err)
    line.pop("timestamp")
    assert line == {"event": "careful: 3", "level": "warning", "logger": "library"}


def test_people_get_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(json=False)
    structlog.get_logger().warning("slow", seconds=3)
    words = capsys.readouterr().err.split()
    assert words[1:] == ["[warning", "]", "slow", "seconds=3"]


def test_the_level_is_the_variables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPISODE_ENGINE_LOG", "error")
    configure_logging()
    structlog.get_logger().warning("quiet")
    structlog.get_logger().error("loud")
    assert [line["event"] for line in lines(capsys.readouterr().err)] == ["loud"]
    with pytest.raises(ValueError, match="unknown log level 'shout'; use one of debug, info, warning, error"):
        configure_logging("shout")


def test_a_replaced_stderr_is_followed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging()
    log = structlog.get_logger()
    log.info("first")
    capsys.readouterr()
    written: list[str] = []

    class Other:
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stderr", Other())
    log.info("second")
    assert [line["event"] for line in lines("".join(written))] == ["second"]
