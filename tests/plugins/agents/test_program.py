"""One agent program: retries, requests after its end, and what `stop` leaves behind."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from slow_cases import slow_after

from engine.plugins.agents.command import MOST_OUTPUT, CommandProgram
from engine.plugins.agents.inbox import Exchange
from engine.plugins.agents.program import AgentProgram, ProgramEnd
from engine.plugins.agents.wire.requests import ApiError, ModelRequest, Replies
from engine.schemas.message import Message

ASKED = ModelRequest(messages=[Message(role="user", content="Q")])


def program(folder: Path, command: str, seconds: float = 60.0) -> AgentProgram:
    return AgentProgram(CommandProgram(command, folder, {"EXTRA": "yes"}, {"id": "a"}, "a/0"), seconds)


def ask(run: AgentProgram, body: bytes, **headers: str) -> Exchange:
    return run.inbox.ask(
        ASKED, "/v1/chat/completions", body, {name.replace("_", "-"): value for name, value in headers.items()}
    )


async def test_waiting_requests_are_answered_with_episode_over(tmp_path: Path) -> None:
    run = program(tmp_path, "exec sleep 600")
    await run.start()
    first, second = ask(run, b"1"), ask(run, b"2")
    await run.next()
    await run.stop()
    for answer in (first, second):
        fault = answer.answer.exception()
        assert isinstance(fault, ApiError)
        assert (fault.status, fault.code) == (400, "episode_over")
    with pytest.raises(ApiError, match="the episode is over"):
        ask(run, b"1", x_stainless_retry_count="1")


async def test_a_marked_retry_joins_a_request_that_is_still_answered(tmp_path: Path) -> None:
    run = program(tmp_path, "exec sleep 600")
    await run.start()
    first, retry, repeat = ask(run, b"1"), ask(run, b"1", x_stainless_retry_count="1"), ask(run, b"1")
    assert retry is first
    assert repeat is not first
    await run.next()
    run.answer(Replies(id="id", created=0, replies=[]))
    assert first.answer.result().id == "id"
    assert first.request.messages == []  # an answered request keeps no history in memory
    assert ask(run, b"1", x_stainless_retry_count="1") is repeat  # the newest
    await run.stop()


async def test_it_gets_its_task_and_no_secret_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    run = program(tmp_path, "env; cat $EPISODE_TASK_FILE; exit 3")
    await run.start()
    end = await run.next()
    assert isinstance(end, ProgramEnd)
    assert end.status == 3
    assert 'EPISODE_TASK={"id": "a"}' in end.output
    assert end.output.endswith('{"id": "a"}')
    assert "EXTRA=yes" in end.output
    assert "OPENAI_BASE_URL=http://127.0.0.1:" in end.output
    assert "secret" not in end.output


async def test_of_a_long_output_the_end_is_kept(tmp_path: Path) -> None:
    run = program(tmp_path, "head -c 3000000 /dev/zero | tr '\\0' x; echo end")
    await run.start()
    end = await run.next()
    assert isinstance(end, ProgramEnd)
    assert end.output == "x" * (MOST_OUTPUT - 4) + "end\n"


ASLEEP = 1_000_000 + os.getpid()
"""Seconds of the sleeps of these tests, by which their processes are found."""
STRAYS = f"""
sleep {ASLEEP} &
setsid sleep {ASLEEP} &
( setsid env -i /bin/sh -c 'sleep {ASLEEP} & sleep {ASLEEP}' & )
setsid /bin/sh -c 'trap "" TERM HUP INT; while :; do sleep {ASLEEP}; done' &
sleep 0.2
"""
"""Starts processes that stay: in its group, in another session, without its environment, and as orphans."""


@pytest.mark.parametrize(
    ("end", "status"),
    slow_after(2, [("exit 3", 3), ("kill -9 $$", -9), (f"sleep {ASLEEP}", None)], several=True),
    ids=["ends", "is killed", "never ends"],
)
async def test_no_process_of_a_program_outlives_it(tmp_path: Path, end: str, status: int | None) -> None:
    run = program(tmp_path, STRAYS + end, seconds=2)
    await run.start()
    found = await asyncio.wait_for(run.next(), 60)
    assert isinstance(found, ProgramEnd)
    assert found.status == status
    assert asleep() == []


async def test_no_process_of_a_program_outlives_its_guard(tmp_path: Path) -> None:
    """A program that kills the process that guards it: what has the episode's key in its environment is killed."""
    run = program(tmp_path, f"setsid sleep {ASLEEP} & sleep 0.2; kill -9 $PPID; sleep {ASLEEP}")
    await run.start()
    found = await asyncio.wait_for(run.next(), 60)
    assert isinstance(found, ProgramEnd)
    assert found.status == -9
    assert asleep() == []


async def test_a_program_that_prints_without_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.plugins.agents.command.MOST_PRINTED", 1 << 20)
    run = program(tmp_path, "yes & yes")
    await run.start()
    found = await asyncio.wait_for(run.next(), 60)
    assert isinstance(found, ProgramEnd)
    assert found.status == -9
    assert found.output.endswith("\n(killed: it printed more than 1 MiB)")


async def test_its_key_dies_with_it(tmp_path: Path) -> None:
    other = program(tmp_path, "exec sleep 600")
    await other.start()  # keeps the server open
    run = program(tmp_path, "echo $OPENAI_BASE_URL $OPENAI_API_KEY")
    await run.start()
    end = await run.next()
    assert isinstance(end, ProgramEnd)
    address, key = end.output.split()
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{address}/models", headers={"authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    await other.stop()


def asleep() -> list[str]:
    """The processes that sleep for `ASLEEP` seconds."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_text())
    return [words for words in found if words == f"sleep\0{ASLEEP}\0"]
