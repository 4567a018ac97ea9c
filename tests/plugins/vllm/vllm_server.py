"""A stand-in for `vllm serve`, made from the published source of vLLM 0.33: protocol, defaults, log-probs and refusals.

It samples from a distribution that depends on the prompt. Like vLLM it fills in what a request leaves out from a
`generation_config.json`, applies logit biases, penalties, temperature, top-k and top-p in vLLM's order, reports log-probs of its
`--logprobs-mode`, and ends a request whose connection is closed. It refuses keys that vLLM's `CompletionRequest` does not have
(vLLM ignores them, so they would have no effect).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np

KEYS = {
    "model", "prompt", "max_tokens", "logprobs", "seed", "stop", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "logit_bias", "structured_outputs", "request_id", "cache_salt", "return_token_ids",
    "return_tokens_as_token_ids",
}  # fmt: skip
"""The keys of vLLM's CompletionRequest that the engine may use."""
GENERATION_CONFIG = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
"""What Qwen2.5's `generation_config.json` says."""
EOS = 2
VOCAB = 1000

Fault = Callable[[dict[str, Any]], tuple[int, bytes] | None]
"""Makes status and body of one reply, out of the request; None: the connection is dropped."""


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    whole: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return whole


class VLLMServer:
    """async with VLLMServer() as server: server.url"""

    def __init__(self, *, mode: str = "raw_logprobs", echo: bool = True, context: int = 512) -> None:
        self.mode = mode
        self.echo = echo
        self.context = context
        self.tokenize: Callable[[str], list[int]] | None = None
        self.models = [{"id": "fake", "root": "/models/fake", "parent": None, "max_model_len": context}]
        self.latency = 0.0
        self.faults: list[Fault] = []
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.headers: list[bytes] = []

    async def __aenter__(self) -> VLLMServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b"\r\n")[0].decode().split()
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
                self.headers.append(head)
                answer = await self._answer(method, path, body, reader)
                if answer is None:
                    break
                status, reply = answer
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(reply), reply))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, method: str, path: str, body: bytes, reader: asyncio.StreamReader
    ) -> tuple[int, bytes] | None:
        if (method, path) == ("GET", "/health"):
            return 200, b""
        if (method, path) == ("GET", "/v1/models"):
            return 200, _dump({"object": "list", "data": self.models})
        if (method, path) == ("POST", "/tokenize") and self.tokenize is not None:
            tokens = self.tokenize(json.loads(body)["prompt"])
            return 200, _dump({"count": len(tokens), "max_model_len": self.context, "tokens": tokens})
        if (method, path) != ("POST", "/v1/completions"):
            return 404, _dump({"detail": "Not Found"})
        request = json.loads(body)
        self.requests.append(request)
        if self.faults:
            return self.faults.pop(0)(request)
        if self.latency:
            closed = asyncio.ensure_future(reader.read(1))
            done, _ = await asyncio.wait([closed], timeout=self.latency)
            if done:
                self.aborted.append(request["request_id"])
                return None
            closed.cancel()
        problem = self._refusal(request)
        if problem:
            return 400, _dump({"error": {"message": problem, "type": "BadRequestError", "param": None, "code": 400}})
        return 200, _dump(self.reply(request))

    def _refusal(self, request: dict[str, Any]) -> str:
        if unknown := set(request) - KEYS:
            return f"stand-in: {sorted(unknown)} would be ignored"
        outside = [token for token in map(int, request.get("logit_bias") or ()) if not 0 <= token < VOCAB]
        if outside:
            return f"logit_bias keys {outside} contain out-of-vocab token ids. Vocabulary size: {VOCAB}"
        tokens, most = len(request["prompt"]), request["max_tokens"]
        if tokens >= self.context:
            return (
                f"This model's maximum context length is {self.context} tokens. However, your prompt contains {tokens} input "
                "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
            )
        if tokens + most > self.context:
            return (
                f"This model's maximum context length is {self.context} tokens. However, you requested {most} output tokens and "
                f"your prompt contains at least {self.context - most + 1} input tokens"
            )
        return ""

    def logits(self, ids: list[int]) -> np.ndarray:
        """float64 [vocabulary], after `ids`."""
        return np.random.default_rng([len(ids), *ids]).normal(0, 2, VOCAB)

    def reply(self, request: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """A `CompletionResponse`; `changes` replace keys of its choice, or `usage`."""
        prompt, ids, logprobs = request["prompt"], [], []
        finish, stop = "length", None
        for _ in range(request["max_tokens"]):
            token, logprob = self._sample([*prompt, *ids], ids, request)
            ids.append(token)
            logprobs.append(max(logprob, -9999.0))
            if token == EOS and not request.get("ignore_eos"):
                finish, stop = "stop", None
                break
            if token in request.get("stop_token_ids", ()):
                finish, stop = "stop", token
                break
        names = [f"token_id:{token}" for token in ids]
        choice: dict[str, Any] = {
            "index": 0,
            "text": "",
            "logprobs": {
                "text_offset": [0] * len(ids),
                "token_logprobs": logprobs,
                "tokens": names,
                "top_logprobs": [{name: value} for name, value in zip(names, logprobs, strict=True)],
            },
            "finish_reason": finish,
            "stop_reason": stop,
            "token_ids": ids if self.echo else None,
            "prompt_logprobs": None,
            "prompt_token_ids": prompt if self.echo else None,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        usage |= {"prompt_tokens_details": {"cached_tokens": 1}}
        usage = changes.pop("usage", usage)
        choice["logprobs"] |= changes.pop("logprobs", {})
        return {
            "id": f"cmpl-{request['request_id']}", "object": "text_completion", "created": 0, "model": "fake",
            "choices": [choice | changes], "usage": usage, "kv_transfer_params": None,
        }  # fmt: skip

    def _sample(self, ids: list[int], sampled: list[int], request: dict[str, Any]) -> tuple[int, float]:
        given = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **GENERATION_CONFIG, **request}
        logits = self.logits(ids)
        raw = log_softmax(logits)
        for token, bias in (request.get("logit_bias") or {}).items():
            logits[int(token)] += min(100.0, max(-100.0, bias))
        if len(sampled) < given.get("min_tokens", 0):
            logits[[EOS, *given.get("stop_token_ids", ())]] = -np.inf
        for token in set(sampled):
            logits[token] -= given.get("frequency_penalty", 0.0) * sampled.count(token)
            logits[token] -= given.get("presence_penalty", 0.0)
        repetition = given["repetition_penalty"]
        for token in set(ids):
            logits[token] = logits[token] * repetition if logits[token] < 0 else logits[token] / repetition
        if given["temperature"] > 0:
            logits = logits / given["temperature"]
            if given["top_k"] > 0:
                logits = np.where(logits >= np.sort(logits)[-given["top_k"]], logits, -np.inf)
            if given["top_p"] < 1:
                order = np.argsort(logits)
                below = np.cumsum(np.exp(log_softmax(logits))[order]) <= 1 - given["top_p"]
                logits[order[below]] = -np.inf
        processed = log_softmax(logits)
        if given["temperature"] > 0:
            token = int(np.random.default_rng([given["seed"], len(ids)]).choice(VOCAB, p=np.exp(processed)))
        else:
            token = int(logits.argmax())
        return token, float((processed if self.mode == "processed_logprobs" else raw)[token])


def _dump(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def reply(**changes: Any) -> Fault:
    """A reply whose choice (or usage) differs from a good one."""
    return lambda request: (200, _dump(VLLMServer().reply(request, **changes)))
