"""An instant stand-in for SGLang's /generate: for measuring what a client costs, and for misbehaving on purpose.

It samples nothing: each reply is the same ids with the same log-probs. What it does like SGLang is the wire: the
shape of the reply, the prompt's ids echoed, latency, a number of slots, aborts. As a process of its own:

    python bench/fake_sglang.py --port 31999 --reply reply.json --latency 0.2 --slots 256

`GET /fake/stats` tells what went through it, `POST /fake/reset` sets that to zero.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import random
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from fake_vllm import COMPLETIONS, GENERATE, FakeVLLM

PROMPT = b'"input_ids":['
RID = b'"rid":"'
LENGTH = b'"max_new_tokens":'

Fault = Callable[["Call"], Awaitable[None]]
"""What is done in place of a reply."""


class Call:
    """One request to /generate, as a fault sees it."""

    def __init__(self, server: FakeSGLang, connection: _Connection, body: bytes) -> None:
        self.server = server
        self.connection = connection
        self.body = body
        at = body.find(PROMPT) + len(PROMPT)
        self.prompt = server.expanded(body[at : body.find(b"]", at)], body)
        at = body.find(RID) + len(RID)
        self.rid = body[at : body.find(b'"', at)]
        self.session: tuple[str, str] | None = None
        """The session and the request that it goes on after; empty: none."""
        self.earlier: list[bytes] = []
        """The JSON of the ids that its session has, in pieces."""
        self.before = 0
        """How many ids these are."""
        if b'"session_params":' in body[-4096:]:
            fields = body[body.rfind(b'"session_params":') :].partition(b":")[2].partition(b"}")[0]
            names = json.loads(fields + b"}")
            self.session = names["id"], names.get("rid", "")
        self.experts_from: int | None = None
        if b'"return_routed_experts":true' in body:
            _, start, number = body.rpartition(b'"routed_experts_start_len":')
            self.experts_from = int(number.partition(b",")[0].rstrip(b"} ")) if start else 0
        self.echo = b'"return_prompt_token_ids":true' in body[at if server.image else -4096 :]
        at = body.find(LENGTH) + len(LENGTH)
        self.most = int(body[at:].partition(b",")[0].rstrip(b"}")) if at >= len(LENGTH) else 128

    def reply(self, **changes: Any) -> bytes:
        """The body of a good reply. `changes` replace keys of `meta_info`, or `output_ids`, `prompt_token_ids`."""
        most = self.most
        if self.experts_from is not None and self.server.same_experts is not None:
            tokens = self.before + self.prompt.count(b",") + 1
            tokens += min(most, len(self.server.output)) - 1 - self.experts_from
            chosen = base64.b64encode(np.repeat(self.server.same_experts, tokens, 0).tobytes())
            if most < len(self.server.output):
                self.experts_from = None
                return self.reply(routed_experts=chosen.decode(), **changes)
            good = self.server.good(self.rid, self.prompt, self.echo, self.before)
            return good.replace(b'"queue_time"', b'"routed_experts":"%b","queue_time"' % chosen, 1)
        if self.experts_from is not None and self.server.experts is not None and "routed_experts" not in changes:
            output = changes.get("output_ids", self.server.output[:most])
            prompt = b",".join([*self.earlier, self.prompt])
            ids = [*map(int, prompt.split(b",")), *output][self.experts_from : -1]
            chosen = self.server.experts(ids, self.experts_from)
            changes = changes | {"routed_experts": base64.b64encode(chosen.astype("<i4").tobytes()).decode()}
        if most >= len(self.server.output):
            if not changes:
                return self.server.good(self.rid, self.prompt, self.echo, self.before)
        else:
            version = self.server.weight_version
            rows = list(zip(self.server.logprobs, self.server.output, itertools.repeat(None)))[:most]
            cut: dict[str, Any] = {
                "output_ids": self.server.output[:most],
                "output_token_logprobs": rows,
                "completion_tokens": most,
            }
            cut["finish_reason"] = {"type": "length", "length": most}
            cut["weight_versions"] = [{"version": version, "start": 0, "end": most}]
            changes = cut | changes
        data = json.loads(self.server.good(self.rid, self.prompt, self.echo, self.before))
        for name, value in changes.items():
            (data if name in ("output_ids", "prompt_token_ids", "text") else data["meta_info"])[name] = value
        return json.dumps(data, separators=(",", ":")).encode()

    def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self.connection.write(data)

    def answer(self, body: bytes, status: int = 200) -> None:
        """A whole reply."""
        self.send(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (status, len(body), body)
        )

    def drop(self) -> None:
        """Reset the connection."""
        self.connection.drop()


def _completion(tokens: int) -> dict[str, Any]:
    """A chat completion that calls `calculate`."""
    function = {"name": "calculate", "arguments": '{"expression": "17 * 25 - 3"}'}
    said = "First I work out how many apples there are in all of the crates together. " * 7
    calls = [{"id": "call_0", "type": "function", "function": function}]
    message = {"role": "assistant", "content": said, "tool_calls": calls}
    return {
        "id": "fake",
        "object": "chat.completion",
        "created": 0,
        "model": "fake",
        "choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}],
        "usage": {"prompt_tokens": 347, "completion_tokens": tokens, "total_tokens": 347 + tokens},
    }


class FakeSGLang:
    """The server. In a test it runs in the test's own loop:

    fake = FakeSGLang(output=[5, 6, 7])
    url = await fake.start()
    fake.faults.append(drop_connection)      # the next call only
    """

    def __init__(
        self,
        *,
        output: list[int],
        latency: float = 0.0,
        slots: int = 1 << 30,
        vocab_size: int = 1000,
        context: int = 4090,
        text: str = "",
    ) -> None:
        rng = random.Random(0)
        logprobs = [round(-rng.expovariate(1.0), 6) for _ in output]
        self.output = output
        self.logprobs = logprobs
        self.latency = latency
        self.vocab_size = vocab_size
        self.context = context
        self.weight_version = "default"
        self.model_path = "fake"
        self.seeded = False
        self.experts: Callable[[list[int], int], Any] | None = None
        """Gives the experts of ids at the positions from a number on, an integer array [ids, layers, top_k]; None: no routing."""
        self.same_experts: Any = None
        """The experts of every token, int32 [1, layers, top_k]: at once, while `experts` reads the ids."""
        self.image: tuple[int, int] | None = None
        """Id that stands for an image, and pixels of one token's side; None: images are not looked at."""
        self.hung = False
        """Takes connections and requests, and never answers anything."""
        self.down = False
        """Answers 503 to health checks."""
        self.paused = False
        """Samples nothing, and so fails health checks, which sample a token."""
        self.faults: list[Fault] = []
        self.calls: list[bytes] = []
        """Bodies of the requests to /generate, where `keep` is set."""
        self.keep = False
        self.control: list[tuple[str, Any]] = []
        """Path and body of the control calls."""
        self.aborted: list[str] = []
        self.running: dict[str, Call] = {}
        self.sessions: dict[str, dict[str, tuple[list[bytes], int]]] = {}
        """By session, by request: the JSON of its ids with its reply's, in pieces, and how many these are."""
        self.bytes_in = self.bytes_out = 0
        self.tokenize: Callable[[str], list[int]] | None = None
        self.requests = 0
        self.prompt_tokens = 0
        """Ids of all prompts."""
        self.scored = 0
        """Requests that asked for log-probs."""
        self.busy = 0.0
        """Seconds of slots that were taken."""
        self.began: list[float] = []
        """When each reply got its slot."""
        self.ended: list[float] = []
        self._vllm = FakeVLLM(output, logprobs, text)
        self._slots = asyncio.Semaphore(slots)
        self._many = slots < 1 << 30
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        rows = ",".join(f"[{value},{token},null]" for value, token in zip(logprobs, output, strict=True))
        self._meta = (
            f'","finish_reason":{{"type":"stop","matched":{output[-1]}}},"weight_version":"@","num_retractions":0,'
            f'"queue_time":0.0004,"input_token_logprobs":[[null,0,null]],"output_token_logprobs":[{rows}],'
            f'"output_token_logprobs_length":{len(output)},"reasoning_tokens":0,"completion_tokens":{len(output)},'
            f'"cached_tokens":0,"weight_versions":[{{"version":"@","start":0,"end":{len(output)}}}],'
            f'"e2e_latency":{latency},"prompt_tokens":'
        )
        self._metas: dict[str, bytes] = {}
        self._head = (
            f'{{"text":{json.dumps(text)},"output_ids":[{",".join(map(str, output))}],"meta_info":{{"id":"'.encode()
        )

    def good(self, rid: bytes, prompt: bytes, echo: bool = True, before: int = 0) -> bytes:
        """What SGLang would answer."""
        if self._metas.get(self.weight_version) is None:
            self._metas[self.weight_version] = self._meta.replace("@", self.weight_version).encode()
        meta = self._metas[self.weight_version]
        count = before + prompt.count(b",") + 1
        if not echo:
            return b"%b%b%b%d}}" % (self._head, rid, meta, count)
        return b'%b%b%b%d},"prompt_token_ids":[%b]}' % (self._head, rid, meta, count, prompt)

    def expanded(self, prompt: bytes, body: bytes) -> bytes:
        """A prompt's ids with as many for each image of a request as its PNG's size takes."""
        if self.image is None or b'"image_data":' not in body:
            return prompt
        marker, side = b"%d" % self.image[0], self.image[1]
        pieces = prompt.split(b",%b," % marker)
        for place, data in enumerate(body.split(b"data:image/png;base64,")[1:]):
            width, height = struct.unpack(">II", base64.b64decode(data[:32])[16:24])
            pieces[place] += b",%b" % marker * (round(width / side) * round(height / side)) + b","
        return b"".join(pieces)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; the URL."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), host, port, backlog=4096)
        return f"http://{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close the port and every connection, as a process that was killed does."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.drop()
        await asyncio.sleep(0)

    async def handle(self, connection: _Connection, path: str, body: bytes) -> None:
        """Answer one request."""
        if self.hung:
            return
        if path == "/generate":
            await self._generate(Call(self, connection, body))
            return
        if path in (GENERATE, COMPLETIONS):
            data, prompt, asked = self._vllm.reply(path, body)
            self._count(prompt, asked)
            connection.write(
                b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)
            )
            return
        status, reply = self._other(path, body)
        data = json.dumps(reply).encode() if reply is not None else b""
        connection.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(data), data))

    def _count(self, prompt: bytes, scored: bool) -> None:
        self.requests += 1
        self.prompt_tokens += prompt.count(b",") + 1
        self.scored += scored

    async def _generate(self, call: Call) -> None:
        if b'"2147483647"' in call.body:
            message = f"logit_bias must has keys in [0, {self.vocab_size - 1}], got 2147483647."
            call.answer(json.dumps({"error": {"message": message}}).encode(), 400)
            return
        while self.paused:  # noqa: ASYNC110  (tests set it)
            await asyncio.sleep(0.01)
        self._count(call.prompt, b'"return_logprob":true' in call.body or b'"return_logprob": true' in call.body)
        if self.keep:
            self.calls.append(call.body)
        if call.session is not None:
            requests, after = self.sessions.get(call.session[0]), call.session[1]
            if requests is None or (after and after not in requests):
                call.answer(b'{"error":{"message":"Invalid request session id"}}', 400)
                return
            call.earlier, call.before = requests[after] if after else ([], 0)
            output = b",".join(b"%d" % token for token in self.output[: call.most])
            count = call.before + call.prompt.count(b",") + output.count(b",") + 2
            requests[call.rid.decode()] = [*call.earlier, call.prompt, output], count
        if self.faults:
            await self.faults.pop(0)(call)
            return
        if self.latency or self._many:
            async with self._slots:
                self.running[call.rid.decode()] = call
                began = time.perf_counter()
                await asyncio.sleep(self.latency)
                ended = time.perf_counter()
                self.busy += ended - began
                self.began.append(began)
                self.ended.append(ended)
                if self.running.pop(call.rid.decode(), None) is None:
                    return  # aborted meanwhile, and answered there
        call.answer(call.reply())

    def _other(self, path: str, body: bytes) -> tuple[int, Any]:
        if path in ("/health", "/health_generate"):
            return (503 if self.down or self.paused else 200), None
        if path == "/model_info":
            return 200, {"model_path": self.model_path, "is_generation": True, "weight_version": self.weight_version}
        if path == "/server_info":
            return 200, {
                "max_req_input_len": self.context,
                "enable_deterministic_inference": self.seeded,
                "enable_return_routed_experts": self.experts is not None or self.same_experts is not None,
                "version": "fake",
            }
        if path == "/tokenize" and self.tokenize is not None:
            return 200, {"tokens": self.tokenize(json.loads(body)["prompt"])}
        if path == "/v1/chat/completions":  # for peers that talk to a chat endpoint
            self.requests += 1
            return 200, _completion(len(self.output))
        if path == "/workers":  # of a router in front of servers
            return 200, {"workers": []}
        if path == "/v1/loads":
            return 200, {"loads": [{"num_running_reqs": len(self.running), "num_waiting_reqs": 0}]}
        if path in ("/open_session", "/close_session"):
            settings = json.loads(body)
            self.control.append((path, settings))
            if path == "/open_session":
                self.sessions[settings["session_id"]] = {}
            else:
                self.sessions.pop(settings["session_id"], None)
            return 200, settings["session_id"]
        if path == "/abort_request":
            return self._abort(json.loads(body)["rid"])
        if path == "/update_weights_from_disk":
            self.control.append((path, json.loads(body)))
            self.weight_version = json.loads(body)["weight_version"]
            return 200, {"success": True, "message": "ok"}
        if path in ("/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"):
            told = json.loads(body)
            self.control.append((path, told))
            self.weight_version = told.get("weight_version", self.weight_version)
            return 200, {"success": True, "message": "ok"}
        if path == "/fake/stats":
            return 200, {
                "requests": self.requests,
                "prompt_tokens": self.prompt_tokens,
                "scored": self.scored,
                "busy_seconds": self.busy,
                "bytes_in": self.bytes_in,
                "bytes_out": self.bytes_out,
                "aborted": len(self.aborted),
                "cpu_seconds": time.process_time(),
            }
        if path == "/fake/times":
            return 200, {"began": self.began, "ended": self.ended}
        if path == "/fake/reset":
            self.requests, self.prompt_tokens, self.scored, self.busy = 0, 0, 0, 0.0
            self.began, self.ended = [], []
            return 200, {}
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
            self.control.append((path, json.loads(body) if body else None))
            return 200, {"success": True}
        if path in (
            "/load_lora_adapter",
            "/unload_lora_adapter",
            "/flush_cache",
            "/finish_session",
        ):
            self.control.append((path, json.loads(body) if body else None))
            return 200, {"success": True}
        return 404, {"detail": "Not Found"}

    def _abort(self, rid: str) -> tuple[int, Any]:
        self.aborted.append(rid)
        call = self.running.pop(rid, None)
        if call is not None:
            empty = {"output_ids": [], "output_token_logprobs": [], "completion_tokens": 0, "weight_versions": []}
            call.answer(call.reply(finish_reason={"type": "abort", "message": "Aborted"}, **empty))
        return 200, None


class _Connection(asyncio.Protocol):
    def __init__(self, server: FakeSGLang) -> None:
        self._fake = server
        self._buffer = bytearray()
        self._transport: Any = None
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._fake._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fake._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._fake.bytes_in += len(data)
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end])
            at = head.find(b"Content-Length: ")
            length = int(head[at + 16 :].partition(b"\r\n")[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = bytes(self._buffer[end + 4 : end + 4 + length])
            del self._buffer[: end + 4 + length]
            path = head.split(b" ", 2)[1].partition(b"?")[0].decode()
            task = asyncio.ensure_future(self._fake.handle(self, path, body))
            self._tasks.add(task)
            task.add_done_callback(self._handled)

    def _handled(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.drop()  # an error of this server: the client fails at once instead of waiting for a reply
            task.get_loop().call_exception_handler({"message": "the fake server failed", "exception": task.exception()})

    def write(self, data: bytes) -> None:
        self._fake.bytes_out += len(data)
        if not self._transport.is_closing():
            self._transport.write(data)

    def drop(self) -> None:
        self._transport.abort()


async def _serve(arguments: argparse.Namespace, output: list[int], text: str) -> None:
    fake = FakeSGLang(
        output=output,
        latency=arguments.latency,
        slots=arguments.slots or 1 << 30,
        vocab_size=arguments.vocab,
        context=1 << 20,
        text=text,
    )
    if arguments.experts:
        layers, top_k, experts = arguments.experts
        fake.same_experts = np.arange(layers * top_k, dtype=np.int32).reshape(1, layers, top_k) % experts
    if arguments.image:
        fake.image = tuple(arguments.image)
    print(await fake.start(port=arguments.port), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Run until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one; the URL is printed")
    parser.add_argument("--reply", help="JSON file with the `ids` of every reply and their `text`")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds that a reply takes")
    parser.add_argument("--slots", type=int, default=0, help="replies that are worked on at once; 0 is no limit")
    parser.add_argument("--vocab", type=int, default=1 << 20, help="number of ids of its model")
    parser.add_argument("--experts", type=int, nargs=3, metavar=("LAYERS", "TOP_K", "EXPERTS"), help="of its model")
    parser.add_argument("--image", type=int, nargs=2, metavar=("ID", "SIDE"), help="see FakeSGLang.image")
    arguments = parser.parse_args()
    reply = (
        json.loads(Path(arguments.reply).read_text()) if arguments.reply else {"ids": list(range(100, 228)), "text": ""}
    )
    asyncio.run(_serve(arguments, reply["ids"], reply["text"]))


if __name__ == "__main__":
    main()
