"""Retries, replies that nobody received, and requests in parallel: what is sampled, recorded, trained and replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from agent_kit import most_at_once, play
from typer.testing import CliRunner

from engine.plugins.show.command import show
from engine.store import list_runs

app = typer.Typer()
app.command()(show)
CALL = {"text": "Let me add.", "tool_calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}], "delay": 0.2}
LEAVE = """
import socket
def leave(body, read=0, wait=0.0):
    "Send a request, read some bytes of its answer, and close the connection."
    address = os.environ["OPENAI_BASE_URL"].split("/")[2]
    data = json.dumps({"model": os.environ["OPENAI_MODEL"], **body}).encode()
    head = ["POST /v1/chat/completions HTTP/1.1", "host: " + address, "content-length: " + str(len(data)),
            "authorization: Bearer " + os.environ["OPENAI_API_KEY"], "", ""]
    with socket.create_connection(address.split(":")) as connection:
        connection.sendall("\\r\\n".join(head).encode() + data)
        if read:
            connection.recv(read)
        time.sleep(wait)
BODY = {"messages": [ASK], "tools": TOOLS}
"""


@pytest.mark.parametrize(
    ("how", "stream"),
    [
        pytest.param("leave(body, read=9)", True, id="in the middle of a streamed call"),
        pytest.param("leave(body)", False, id="before the reply", marks=pytest.mark.slow),
        pytest.param("leave(body, read=9)", False, id="in the middle of a reply", marks=pytest.mark.slow),
        pytest.param("leave(body)", True, id="before a streamed reply", marks=pytest.mark.slow),
    ],
)
async def test_a_reply_that_nobody_received_is_kept_and_not_trained(
    tmp_path: Path, tiny_tokenizer_dir: Path, how: str, stream: bool
) -> None:
    program = LEAVE + f"body = {{**BODY, 'stream': {stream}}}\n{how}\nchat(ASK, tools=TOOLS)\nreward()"
    played = await play(tmp_path, tiny_tokenizer_dir, program, [CALL, "It is 42."])
    first, second = played.trajectory.turns
    assert (first.unreceived, second.unreceived) == (True, False)
    assert played.reasons == ["", "repeated"]
    assert [span.kind for span in played.trajectory.branches[0].spans] == ["prompt", "unreceived"]
    assert played.trajectory.branches[0].turn_ids.max() == 0
    assert not played.trajectory.branches[0].loss_mask.any()
    assert played.trajectory.counts["unreceived_replies"] == 1
    assert played.records[-1].unreceived == [0]
    [run] = list_runs(tmp_path / "runs")
    shown = " ".join(CliRunner().invoke(app, [str(run), "a/0"], env={"COLUMNS": "1000"}).output.split())
    assert "2 training rows (1 repeated) · 1 reply not received" in shown
    assert shown.count("nobody received it, so it is not trained") == 1


async def test_a_marked_retry_receives_the_reply_that_it_repeats(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """By either header, while the reply is sampled and after it was lost; another body under the same key is refused."""
    program = (
        LEAVE
        + """
leave(BODY)
joined = post(BODY, **{"x-stainless-retry-count": "1"})
leave(BODY, read=9)
replayed = post(BODY, **{"x-stainless-retry-count": "2"})
assert joined != replayed and joined[0] == replayed[0] == 200, (joined, replayed)
named = [post({"messages": [ASK, ASK]}, **{"idempotency-key": "k"}) for _ in range(2)]
assert named[0] == named[1]
status, error = post({"messages": [ASK]}, **{"idempotency-key": "k"})
assert (status, error["code"]) == (400, "idempotency_key_reused"), error
reward()
"""
    )
    played = await play(tmp_path, tiny_tokenizer_dir, program, [CALL, CALL, "three", "never"])
    assert [turn.unreceived for turn in played.trajectory.turns] == [False, False, False]
    assert played.reasons == ["", "repeated", "edited"]


async def test_requests_in_parallel_are_sampled_at_the_same_time(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """They are answered when their replies are there, and each goes on with its own thread."""
    program = """
from concurrent.futures import ThreadPoolExecutor
def work(at):
    ask = {"role": "user", "content": f"Part {at}"}
    one = chat(ask)
    ended = time.monotonic()
    chat(ask, one, ASK)
    return one["content"], ended
with ThreadPoolExecutor(3) as pool:
    ended = dict(pool.map(work, range(3)))
assert ended["slow"] < ended["slower"] and ended["fast"] < ended["slower"], ended
status, answer = post({"messages": [ASK], "n": 4})
assert [choice["message"]["content"] for choice in answer["choices"]] == list("wxyz")
reward()
"""
    replies: list[Any] = [
        {"text": "slow", "delay": 0.4},
        {"text": "slower", "delay": 0.8},
        {"text": "fast", "delay": 0.1},
    ]
    replies += ["p", "q", "r"] + [{"text": text, "delay": 0.3} for text in "wxyz"]
    played = await play(tmp_path, tiny_tokenizer_dir, program, replies, limits={"assistant_turns": 20})
    assert len(played.trajectory.turns) == 10
    assert played.reasons == ["", "subagent", "subagent", "subagent", *["sibling"] * 3]
    threads = [[turn.index for turn in played.trajectory.turns if turn.branch == branch] for branch in range(7)]
    assert [len(thread) for thread in threads] == [2, 2, 2, 1, 1, 1, 1]
    assert len({request.seed for request in played.requests}) == 10
    assert most_at_once(played.calls) >= 4


@pytest.mark.slow
async def test_a_limit_stops_requests_in_parallel_after_those_that_it_allows(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    answers = list(pool.map(lambda at: post({"messages": [{"role": "user", "content": str(at)}]}), range(4)))
"""
    replies = [{"text": "one", "delay": 0.3}, *["other"] * 3]
    played = await play(tmp_path, tiny_tokenizer_dir, program, replies, limits={"assistant_turns": 3})
    assert played.trajectory.outcome.limit == "assistant_turns"
    assert len(played.trajectory.turns) == 3
    assert len(played.calls) == 3
