"""A server in a process of its own, to be killed and started again: each reply follows from its prompt.

    python outage_server.py KIND PORT [--latency 0.1] [--refuse SECONDS] [--serve N] [--retry-after VALUE|date|none] [--status 429] [--no-echo]

KIND is `sglang` or `openai`. The port is printed once the server listens. After `--serve` requests (0) it refuses every request with
`--status` for `--refuse` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import zlib
from email.utils import formatdate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from fake_sglang import Call, FakeSGLang, _Connection

END = 2
"""`<|im_end|>` of the tests' tokenizer."""


class Server(FakeSGLang):
    """As `FakeSGLang`; what it samples is a function of the prompt."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(output=[5, 6, END], latency=arguments.latency, slots=1 << 29, vocab_size=1000, context=4090)
        self._arguments = arguments
        self._refuses_until = time.monotonic() + arguments.refuse
        self._serves = arguments.serve
        self.refused = 0

    async def handle(self, connection: _Connection, path: str, body: bytes) -> None:
        if body and path in ("/generate", "/v1/chat/completions"):
            self._serves -= 1
            if self._serves < 0 and time.monotonic() < self._refuses_until:
                self.refused += 1
                connection.write(self._refusal())
                return
        if path == "/v1/models":
            connection.write(_reply(200, {"data": []}))
            return
        if path == "/v1/chat/completions":
            await asyncio.sleep(self.latency)
            connection.write(_reply(200, _completion(json.loads(body))))
            return
        await super().handle(connection, path, body)

    def _refusal(self) -> bytes:
        told = self._arguments.retry_after
        left = self._refuses_until - time.monotonic()
        if told == "date":
            told = formatdate(time.time() + left + 1, usegmt=True)
        header = "" if told == "none" else f"retry-after: {told}\r\n"
        body = b'{"error":{"message":"slow down"}}'
        head = f"HTTP/1.1 {self._arguments.status} X\r\n{header}content-length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def good(self, rid: bytes, prompt: bytes, echo: bool = True, before: int = 0) -> bytes:
        data = json.loads(super().good(rid, prompt, echo and not self._arguments.no_echo, before))
        chosen = random.Random(zlib.crc32(prompt))
        ids = [*(chosen.randrange(20, 400) for _ in range(chosen.randrange(2, 12))), END]
        data["output_ids"] = ids
        data["meta_info"]["output_token_logprobs"] = [[-chosen.random(), token, None] for token in ids]
        data["meta_info"]["completion_tokens"] = len(ids)
        data["meta_info"]["weight_versions"][0]["end"] = len(ids)
        return json.dumps(data, separators=(",", ":")).encode()


def _reply(status: int, data: Any) -> bytes:
    body = json.dumps(data).encode()
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


def _completion(asked: dict[str, Any]) -> dict[str, Any]:
    chosen = random.Random(zlib.crc32(json.dumps(asked["messages"]).encode()))
    message = {"role": "assistant", "content": f"It is {chosen.randrange(1000)}."}
    return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"prompt_tokens": 9}}


async def _serve(arguments: argparse.Namespace) -> None:
    server = Server(arguments)
    url = await server.start(port=arguments.port)
    print(url.rpartition(":")[2], flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Run until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["sglang", "openai"])
    parser.add_argument("port", type=int)
    parser.add_argument("--latency", type=float, default=0.05)
    parser.add_argument("--refuse", type=float, default=0.0)
    parser.add_argument("--serve", type=int, default=0)
    parser.add_argument("--retry-after", default="none")
    parser.add_argument("--status", type=int, default=429)
    parser.add_argument("--no-echo", action="store_true", help="as SGLang before 0.5.23: the prompt is not reported")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()


__all__ = ["Call", "Server"]
