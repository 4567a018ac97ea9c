"""A chat API in a thread: it refuses what the real ones refuse, counts tokens and cached prefixes, and fails as it is told.

It answers a question with two tool calls (`add` with good, then with broken arguments if `broken`), and the results with text.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = tuple[int, dict[str, str], bytes]
"""Status (0: the connection is dropped), headers and body of one reply."""
OVERLOADED: Fault = (529, {}, b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}')
DROPPED: Fault = (0, {}, b"")
_MARKER = ', "cache_control": {"type": "ephemeral"}'
THOUGHT = {"type": "thinking", "thinking": "17 and 4.", "signature": "EqQBCkYIBBgC"}
WRONG_JSON: Fault = (200, {}, b'{"id": "x", "choi')


def rate_limited(seconds: str) -> Fault:
    body = b'{"error":{"message":"Rate limit reached","type":"tokens","param":null,"code":"rate_limit_exceeded"}}'
    return 429, {"Retry-After": seconds}, body


class ApiServer:
    """`with ApiServer() as server:` serves at `server.url`."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.faults: list[Fault] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.refused: list[str] = []
        self.served = 0
        self._cache: list[str] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(200, {}, b'{"object":"list","data":[]}')

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    status, headers, reply = outer._answer(self.path, body, dict(self.headers))
                if status:
                    self._send(status, headers, reply)
                else:
                    self.close_connection = True

            def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def __enter__(self) -> ApiServer:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _answer(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Fault:
        self.requests.append(body)
        self.headers.append(headers)
        self.times.append(time.monotonic())
        if self.faults:
            return self.faults.pop(0)
        problem, reply = {"/v1/chat/completions": self._chat, "/v1/messages": self._messages}[path](body)
        if problem:
            self.refused.append(problem)
            if path == "/v1/messages":
                reply = {"type": "error", "error": {"type": "invalid_request_error", "message": problem}}
                return 400, {}, json.dumps(reply).encode()
            error = {"error": {"message": problem, "type": "invalid_request_error", "param": None, "code": None}}
            return 400, {}, json.dumps(error).encode()
        self.served += 1
        return 200, {}, json.dumps(reply).encode()

    def counted(self, body: dict[str, Any]) -> tuple[int, int]:
        """Tokens of the prompt, and those in the longest prefix that an earlier prompt shares; 4 characters each."""
        prompt = json.dumps([body.get("tools"), body.get("system"), body["messages"]]).replace(_MARKER, "")
        shared = max((_shared(prompt, earlier) for earlier in self._cache), default=0)
        self._cache.append(prompt)
        return len(prompt) // 4, shared // 4

    def _chat(self, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        waiting: list[str] = []
        for at, message in enumerate(body["messages"]):
            if message["role"] == "tool":
                if message.get("tool_call_id") not in waiting:
                    return (
                        f"messages[{at}]: role 'tool' must be a response to a preceding message with 'tool_calls'",
                        {},
                    )
                waiting.remove(message["tool_call_id"])
                continue
            if waiting:
                return f"an assistant message with 'tool_calls' must be followed by responses to {waiting}", {}
            waiting = [call["id"] for call in message.get("tool_calls", ())]
            for call in message.get("tool_calls", ()):
                if not isinstance(json.loads(call["function"]["arguments"]), dict):
                    return "arguments must be an object", {}
        if waiting:
            return f"an assistant message with 'tool_calls' must be followed by responses to {waiting}", {}
        asked = body.get("tools") and not any(message["role"] == "assistant" for message in body["messages"])
        calls = [
            _call("call_9aX", '{"a": 17, "b": 4}'),
            _call("call_9aY", '{"a": 1' if self.broken else '{"a": 1, "b": 1}'),
        ]
        message = {"role": "assistant", "content": None if asked else "It is 21.", "refusal": None, "annotations": []}
        prompt, cached = self.counted(body)
        return "", {
            "id": "chatcmpl-DJ3", "object": "chat.completion", "created": 1763800000, "model": body["model"],
            "choices": [{
                "index": 0, "message": message | ({"tool_calls": calls} if asked else {}), "logprobs": None,
                "finish_reason": "tool_calls" if asked else "stop",
            }],
            "usage": {
                "prompt_tokens": prompt, "completion_tokens": 10, "total_tokens": prompt + 10,
                "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
            },
            "service_tier": "default", "system_fingerprint": None,
        }  # fmt: skip

    def _messages(self, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Anthropic's API: the refusals that it documents, and replies of its form."""
        messages = body["messages"]
        if "max_tokens" not in body:
            return "max_tokens: Field required", {}
        waiting: list[str] = []
        for at, message in enumerate(messages):
            if message["role"] != ("assistant" if at % 2 else "user"):
                return f"messages.{at}: roles must alternate between 'user' and 'assistant'", {}
            blocks = message["content"]
            results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
            if any(block["type"] == "tool_result" for block in blocks[len(results) :]) or sorted(results) != sorted(
                waiting
            ):
                return f"messages.{at}: `tool_use` ids without `tool_result` blocks immediately after: {waiting}", {}
            if not blocks or any(block["type"] == "text" and not block["text"].strip() for block in blocks):
                return f"messages.{at}: text content blocks must be non-empty", {}
            used = [block for block in blocks if block["type"] == "tool_use"]
            if used and "thinking" in body and blocks[0] != THOUGHT:
                return f"messages.{at}.content.0: `thinking` blocks must be passed back unmodified", {}
            if any(not isinstance(block["input"], dict) for block in used):
                return f"messages.{at}: input: Input should be a valid dictionary", {}
            if used and "tools" not in body:
                return "Requests which include `tool_use` or `tool_result` blocks must define tools", {}
            waiting = [block["id"] for block in used]
        if waiting:
            return f"`tool_use` ids were found without `tool_result` blocks immediately after: {waiting}", {}
        if sum("cache_control" in block for block in _blocks(body)) > 4:
            return "A maximum of 4 blocks with cache_control may be provided.", {}
        asked = body.get("tools") and len(messages) == 1
        content = [
            {"type": "tool_use", "id": "toolu_01A", "name": "add", "input": {"a": 17, "b": 4}},
            {"type": "tool_use", "id": "toolu_01B", "name": "add", "input": "{" if self.broken else {"a": 1, "b": 1}},
        ]
        prompt, cached = self.counted(body)
        marked = any("cache_control" in block for block in _blocks(body))
        cached = cached if marked else 0
        written = prompt - cached if marked else 0
        return "", {
            "id": "msg_01D", "type": "message", "role": "assistant", "model": body["model"],
            "content": [*([THOUGHT] if "thinking" in body else []), *content] if asked else [{"type": "text", "text": "It is 21."}],
            "stop_reason": "tool_use" if asked else "end_turn", "stop_sequence": None,
            "usage": {
                "input_tokens": prompt - cached - written, "output_tokens": 10, "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": written, "service_tier": "standard",
                "cache_creation": {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": 0},
            },
        }  # fmt: skip


def _blocks(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = [block for message in body["messages"] for block in message["content"]]
    return [*body.get("tools", ()), *body.get("system", ()), *messages]


def _call(id_: str, arguments: str) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": "add", "arguments": arguments}}


def _shared(one: str, other: str) -> int:
    least = min(len(one), len(other))
    return next((at for at in range(least) if one[at] != other[at]), least)
