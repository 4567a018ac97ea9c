"""Tools of MCP servers: real servers over stdio and HTTP, and one that dies, hangs and answers garbage."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from adapters_kit import EPISODES, FAULTY_EVERY, LONG, failures, planned_faults, run_spec, spec_of
from structlog.testing import capture_logs
from waiting import until

from engine.errors import AdapterError
from engine.plugins.adapters.mcp import McpServer
from engine.schemas.environment import ToolReply
from engine.schemas.trajectory import Trajectory

HERE = Path(__file__).parent
needs_library = pytest.mark.skipif(
    find_spec("mcp") is None, reason="mcp is not installed: pip install 'episode-engine[mcp]'"
)
RAW, REAL = f"{sys.executable} mcp_raw.py", f"{sys.executable} mcp_real.py"
TOOL = "<tool_call>{}</tool_call>"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("mcp_raw.py", "mcp_real.py"):
        shutil.copy(HERE / name, tmp_path)
    return tmp_path


def served(
    use: str, folder: Path, work: Callable[[McpServer, list[Any]], Coroutine[Any, Any, Any]], **with_: Any
) -> Any:
    """What some work with an open server gives."""
    server = McpServer(use, str(folder), env={"PYTHONPATH": os.environ.get("PYTHONPATH", "")}, **with_)

    async def whole() -> Any:
        return await work(server, await server.open())

    with closing(server):
        return asyncio.run(whole())


def call(name: str, **arguments: Any) -> str:
    return TOOL.format(json.dumps({"name": name, "arguments": arguments}))


def results(trajectory: Trajectory) -> list[str]:
    return [message.text for message in trajectory.messages if message.role == "tool"]


@pytest.mark.parametrize(
    ("use", "keys", "message"),
    [
        ("", {}, "is a command line or an http address"),
        ("http://127.0.0.1:1/mcp", {"env": {"A": "b"}}, "`env` is for servers that are started by a command"),
        ("python x.py", {"headers": {"A": "b"}}, "`headers` are for servers with an address"),
    ],
)
def test_keys_that_would_have_no_effect_are_refused(use: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        McpServer(use, **keys)


def test_a_missing_library_says_what_to_install() -> None:
    if find_spec("mcp") is not None:
        pytest.skip("mcp is installed")
    with pytest.raises(AdapterError, match=r"needs `mcp`: pip install 'episode-engine\[mcp\]'"):
        asyncio.run(McpServer("python x.py").open())


@pytest.mark.adapters
@needs_library
@pytest.mark.parametrize("use", [RAW, f"{REAL} stdio"], ids=["raw", "real"])
def test_tools_and_answers_of_a_process(folder: Path, use: str) -> None:
    async def work(server: McpServer, tools: list[Any]) -> Any:
        answers = await asyncio.gather(*(server.call("add", {"a": n, "b": 1}) for n in range(20)))
        return tools[0].shape().schema["function"], [answer.content for answer in answers]

    schema, answers = served(use, folder, work)
    assert (schema["name"], schema["description"]) == ("add", "Add two integers.")
    assert schema["parameters"]["required"] == ["a", "b"]
    assert answers == [str(n + 1) for n in range(20)]


@pytest.mark.adapters
@needs_library
@pytest.mark.parametrize("use", [RAW, f"{REAL} stdio"], ids=["raw", "real"])
def test_tools_and_answers_are_those_of_the_librarys_client(folder: Path, use: str) -> None:
    """The list of tools, and the texts and errors of the same calls, by the library's own session."""
    calls = [("add", {"a": 1, "b": 2}), ("add", {"a": -3, "b": 3}), ("add", {"a": 10**9, "b": 1})]

    async def work(server: McpServer, tools: list[Any]) -> Any:
        shapes = [tool.shape().schema["function"] for tool in tools]
        return shapes, [(await server.call(name, arguments)).content for name, arguments in calls]

    async def by_hand() -> Any:
        import mcp
        from mcp.client.stdio import stdio_client

        command, *arguments = use.split()
        place = mcp.StdioServerParameters(
            command=command, args=arguments, cwd=folder, env={"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        )
        async with stdio_client(place) as (read, write), mcp.ClientSession(read, write) as session:
            await session.initialize()
            tools = (await session.list_tools()).tools
            answers = [await session.call_tool(name, given) for name, given in calls]
        shapes = [
            (tool.name, tool.description, getattr(tool, "input_schema", None) or tool.inputSchema) for tool in tools
        ]
        return shapes, [answer.content[0].text for answer in answers]

    shapes, answers = served(use, folder, work)
    expected_shapes, expected_answers = asyncio.run(by_hand())
    assert answers == expected_answers
    assert [(item["name"], item["description"]) for item in shapes] == [item[:2] for item in expected_shapes]
    for item, (_, _, schema) in zip(shapes, expected_shapes, strict=True):
        assert item["parameters"]["properties"] == schema["properties"]
        assert item["parameters"].get("required", []) == schema.get("required", [])


@pytest.fixture
def address(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes], Callable[[], subprocess.Popen[bytes]]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        running.append(subprocess.Popen([*REAL.split(), "http", str(port)], cwd=folder, stderr=subprocess.DEVNULL))
        while running[-1].poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return running[-1]
            time.sleep(0.1)
        raise AssertionError(f"the server ended with status {running[-1].returncode} before it listened")

    yield f"http://127.0.0.1:{port}/mcp", start(), start
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.adapters
@needs_library
def test_a_server_over_http_which_is_started_again(folder: Path, address: Any) -> None:
    use, first, start = address

    async def work(server: McpServer, tools: list[Any]) -> list[str]:
        said = [str((await server.call("add", {"a": 1, "b": 2})).content)]
        with pytest.raises(AdapterError, match=r"not today|tool refuse"):
            await server.call("refuse", {})
        first.kill()
        first.wait()
        said.append(await told(server, "add", a=1, b=2))
        start()
        said.append(await told(server, "add", a=1, b=2))
        return said

    said = asyncio.run(_on(McpServer(use), work))
    assert (said[0], said[2]) == ("3", "3")
    assert said[1] not in ("3", "")


async def _on(server: McpServer, work: Any) -> Any:
    try:
        return await work(server, await server.open())
    finally:
        server.close()


async def told(server: McpServer, tool: str, seconds: float = 120.0, **arguments: Any) -> str:
    """A call's answer, or the error's words; `timeout` after some seconds without either."""
    try:
        answer: ToolReply = await asyncio.wait_for(server.call(tool, arguments), seconds)
        return str(answer.content)
    except TimeoutError:
        return "timeout"
    except AdapterError as error:
        return str(error)


@pytest.mark.adapters
@needs_library
@pytest.mark.parametrize(
    ("how", "words", "starts", "seconds"),
    [
        ("die", "ended during the call; its stderr ends with: I was told to die", 2, 120.0),
        ("hang", "timeout", 2, 2.0),
        ("garbage", "timeout", 1, 2.0),
        ("shape", "failed", 1, 120.0),
        ("error", "I was told to fail", 1, 120.0),
        ("other", "no other", 1, 120.0),
    ],
)
def test_a_failed_call_is_an_error_and_the_next_is_served(
    folder: Path, how: str, words: str, starts: int, seconds: float
) -> None:
    async def work(server: McpServer, tools: list[Any]) -> list[str]:
        return [
            await told(server, "misbehave", seconds, how=how),
            str((await server.call("add", {"a": 1, "b": 2})).content),
        ]

    first, second = served(RAW, folder, work, ping_seconds=10, start_seconds=120)
    assert words in first
    assert second == "3"
    assert len((folder / "starts.txt").read_text()) == starts


@pytest.mark.adapters
@needs_library
def test_a_flood_of_garbage_fills_neither_the_log_nor_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.plugins.adapters import mcp

    monkeypatch.setattr(mcp, "_TRIM_SECONDS", 0.05)

    async def work(server: McpServer, tools: list[Any]) -> tuple[str, int]:
        reply = str((await server.call("misbehave", {"how": "flood"})).content)
        assert server._connection is not None
        fd = server._connection._stderr.fileno()
        await until(lambda: os.fstat(fd).st_size <= mcp.STDERR_BYTES)
        return reply, os.fstat(fd).st_size

    with capture_logs() as lines:
        reply, size = served(RAW, folder, work)
    assert reply == "flooded"
    assert size <= mcp.STDERR_BYTES
    assert len(lines) == 3
    assert not logging.getLogger("mcp.client.stdio").isEnabledFor(logging.ERROR)


@pytest.mark.adapters
@needs_library
def test_other_tools_after_a_restart_are_refused(folder: Path) -> None:
    async def work(server: McpServer, tools: list[Any]) -> str:
        await told(server, "misbehave", how="die")
        return await told(server, "add", a=1, b=2)

    assert "offers other tools than before its restart" in served(f"{RAW} changed", folder, work)


@pytest.mark.adapters
@needs_library
@pytest.mark.parametrize(
    ("use", "with_", "words"),
    [
        (f"{sys.executable} -c 'import sys; sys.exit(\"bad key\")'", {}, "did not start: .*bad key"),
        (f"{sys.executable} -c 'import time; time.sleep(60)'", {"start_seconds": 1}, "no answer within 1 s"),
        ("no-such-command-here", {}, "did not start: .*no-such-command-here"),
        (f"{RAW} endless", {}, "it offers more than 4096 tools"),
        (f"{RAW} control", {}, r"a tool with the name 'a\\x1b\[2Jb', which a model cannot call"),
        (RAW, {"only": ["subtract"]}, "has no tool `subtract`; it has add, next, misbehave"),
    ],
)
def test_a_server_that_cannot_be_used_says_why(folder: Path, use: str, with_: Any, words: str) -> None:
    async def work(server: McpServer, tools: list[Any]) -> None:
        raise AssertionError("it was opened")

    with pytest.raises(AdapterError, match=words):
        served(use, folder, work, **with_)


def mcp_spec(model: Path, rows: list[dict[str, Any]], replies: Any, **tool: Any) -> dict[str, Any]:
    document = spec_of(model, {}, rows, replies, machine="tools", limits={"assistant_turns": 4, "tool_seconds": 60})
    del document["environment"]
    document["tools"] = [{"adapter": "mcp", "use": RAW, **tool}]
    return document


@pytest.mark.adapters
@needs_library
def test_episodes_call_tools_of_one_server(folder: Path, tiny_tokenizer_dir: Path) -> None:
    """One server for all episodes: its state is theirs together, and it ends with the run."""
    rows = [{"id": f"t{n}"} for n in range(10)]
    document = mcp_spec(tiny_tokenizer_dir, rows, [call("next"), "Done."], **{"with": {"prefix": "raw_"}})
    document["backend"]["replies"] = [call("raw_next"), "Done."]
    episodes = run_spec(folder, document)
    assert sorted(int(results(episode)[0]) for episode in episodes.values()) == list(range(1, 11))
    assert (folder / "starts.txt").read_text() == "x"
    assert [name for name in _commands() if str(folder) in name or "mcp_raw.py" in name] == []


def _commands() -> list[str]:
    """The command lines of this process's children."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if int((place / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append((place / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.mark.adapters
@needs_library
def test_a_server_that_does_not_start_fails_the_episodes(folder: Path, tiny_tokenizer_dir: Path) -> None:
    document = mcp_spec(tiny_tokenizer_dir, [{"id": "a"}], ["Done."], use="no-such-command-here")
    (episode,) = run_spec(folder, document).values()
    assert episode.outcome.failure is not None
    assert (episode.outcome.failure.blame, episode.outcome.failure.kind) == ("tool", "tool_server")
    assert "did not start" in episode.outcome.failure.message


@LONG
@pytest.mark.adapters
@needs_library
def test_episodes_beside_faulty_ones_are_whole(folder: Path, tiny_tokenizer_dir: Path) -> None:
    """In 5 % the server dies, hangs or answers garbage: each is an error result of that call, and the rest is right."""
    faults = planned_faults(["die", "error", "shape", "hang", "garbage"])
    rows = [{"id": f"t{n}"} for n in range(EPISODES)]
    cases: list[dict[str, Any]] = []
    for n, row in enumerate(rows):
        fault = faults[n]
        first = call("misbehave", how=fault) if fault else call("add", a=n, b=1)
        cases.append({"task": row["id"], "replies": [first, call("add", a=n, b=2), "Done."]})
    document = mcp_spec(
        tiny_tokenizer_dir, rows, cases, timeout=15, **{"with": {"ping_seconds": 5, "start_seconds": 120}}
    )
    document["rollout"] = {"concurrency": 1, "live_episodes": 1}  # a hung server hangs for all of them
    episodes = run_spec(folder, document)
    assert (len(episodes), failures(episodes)) == (EPISODES, {})
    words = {
        "die": f"`misbehave` failed: the MCP server `{RAW}` ended during the call",
        "error": "`misbehave` failed: I was told to fail",
        "shape": "`misbehave` failed: ",
        "hang": "`misbehave` did not answer within 15 s",
        "garbage": "`misbehave` did not answer within 15 s",
    }
    errors = Counter()
    for n, row in enumerate(rows):
        first, second = results(episodes[f"{row['id']}/0"])
        assert second == str(n + 2)
        if (fault := faults[n]) is None:
            assert first == str(n + 1)
        else:
            assert first.startswith(words[fault])
            errors[fault] += 1
    assert errors.total() == EPISODES // FAULTY_EVERY
