"""The least that multi-turn rollouts can cost: two loops without an engine, to measure against.

    wire   requests alone: bodies written, replies read; no tokenizer
    raw    the same, and each episode's prompt is tokenised, each reply decoded, its tool call parsed, the observation
           tokenised

Both are written for speed and nothing else: no errors, retries, journal, limits, rewards. They keep the prompt's ids
as JSON text that only grows, so a turn costs them the same at any length.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
QUESTION = (
    "You solve arithmetic problems step by step. You may call the tool `calculate`, which takes one string named "
    "`expression` and returns its value. Write a call inside <tool_call></tool_call> tags as JSON with a name and "
    "arguments. When you know the answer, write it inside <answer></answer> tags and stop.\n"
)
PROBLEM = "A shop sells {a} crates of apples, each with {b} apples, and {c} more are given away. How many are left? "
OBSERVATION = "<|im_end|>\n<|im_start|>user\n<tool_response>\nThe value of {} is {}.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@dataclass
class Workload:
    """What is said, as ids of one tokenizer."""

    tokenizer: Any
    """A `tokenizers.Tokenizer`."""
    model: str = ""
    """Where it is from."""
    question: str = ""
    """What the prompt says."""
    prompt: list[int] = field(default_factory=list)
    """Its 347 ids."""
    reply: list[int] = field(default_factory=list)
    """128 ids with one tool call; the last one is the stop id."""
    observation: list[int] = field(default_factory=list)
    """About 35 ids."""

    @classmethod
    def of(cls, tokenizer: Any, *, model: str = "", prompt: int = 347, reply: int = 128) -> Workload:
        """A workload of exactly so many ids."""
        encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
        text = "<|im_start|>system\n" + QUESTION + PROBLEM.format(a=17, b=25, c=3) * 20
        call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "17 * 25 - 3"}}\n</tool_call>'
        tail = encode("\n" + call)
        stop = encode("<|im_end|>")[-1:]
        thoughts = encode("First I work out how many apples there are in all of the crates together. " * 20)
        body = thoughts[: reply - len(tail) - 1] + tail + stop
        # cut where the text is `prompt` tokens long, and tokenised again, since a cut may fall into a word
        question = tokenizer.decode(encode(text)[:prompt], skip_special_tokens=False)
        made = cls(tokenizer, model, question, encode(question), body, encode(OBSERVATION.format("17 * 25 - 3", 422)))
        assert (len(made.prompt), len(made.reply)) == (prompt, reply)
        return made


class _Reply(msgspec.Struct):
    output_ids: list[int]
    meta_info: msgspec.Raw


class _Raw(msgspec.Struct):
    output_ids: msgspec.Raw
    meta_info: msgspec.Raw


_decode = msgspec.json.Decoder(_Reply).decode
_skim = msgspec.json.Decoder(_Raw).decode


class _Connection(asyncio.Protocol):
    """One request at a time; replies have a Content-Length."""

    def __init__(self) -> None:
        self.buffer = b""
        self.need = -1

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self, data: bytes) -> asyncio.Future[bytes]:
        self.future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.buffer, self.need = b"", -1
        self.transport.write(data)
        return self.future

    def data_received(self, data: bytes) -> None:
        self.buffer = data if not self.buffer else self.buffer + data
        if self.need < 0:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            at = self.buffer.find(b"content-length: ") + 16
            self.need = int(self.buffer[at : self.buffer.find(b"\r", at)])
            self.buffer = self.buffer[end + 4 :]
        if len(self.buffer) >= self.need:
            self.future.set_result(self.buffer)


async def rollout(url: str, workload: Workload, *, kind: str, turns: int, episodes: int, concurrency: int) -> int:
    """Run `episodes` of `turns` turns each, so many at once; the number of turns."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    left = iter(range(episodes))
    episode = _wire if kind == "wire" else _raw

    async def worker() -> None:
        _, connection = await loop.create_connection(_Connection, parts.hostname, parts.port)
        for number in left:
            await episode(connection, workload, number, turns)
        connection.transport.close()

    await asyncio.gather(*(worker() for _ in range(min(concurrency, episodes))))
    return turns * episodes


HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
START = b'{"rid":"%d-%d","input_ids":['
END = b'],"return_logprob":true,"sampling_params":{"temperature":1.0,"max_new_tokens":512,"stop_token_ids":[2]}}'


def _text(ids: list[int]) -> bytes:
    return msgspec.json.encode(ids)[1:-1]


def _ask(connection: _Connection, number: int, turn: int, prompt: list[bytes]) -> asyncio.Future[bytes]:
    start, ids = START % (number, turn), b",".join(prompt)
    return connection.ask(b"".join((HEAD % (len(start) + len(ids) + len(END)), start, ids, END)))


async def _wire(connection: _Connection, workload: Workload, number: int, turns: int) -> None:
    prompt = [_text(workload.prompt)]
    observation = _text(workload.observation)
    for turn in range(turns):
        reply = _skim(await _ask(connection, number, turn, prompt))
        prompt += (bytes(reply.output_ids)[1:-1], observation)


async def _raw(connection: _Connection, workload: Workload, number: int, turns: int) -> None:
    tokenizer = workload.tokenizer
    ids = tokenizer.encode(workload.question, add_special_tokens=False).ids
    prompt = [_text(ids)]
    for turn in range(turns):
        reply = _decode(await _ask(connection, number, turn, prompt))
        text = tokenizer.decode(reply.output_ids, skip_special_tokens=False)
        match = CALL.search(text)
        assert match is not None
        call = json.loads(match.group(1))
        said = OBSERVATION.format(call["arguments"]["expression"], 422)
        new = tokenizer.encode(said, add_special_tokens=False).ids
        ids += reply.output_ids
        ids += new
        prompt += (_text(reply.output_ids), _text(new))
