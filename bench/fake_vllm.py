"""The replies of vLLM's /inference/v1/generate and /v1/completions, for peers that talk to vLLM: a part of fake_sglang.py.

Both reply the same ids with the same log-probs as the fake's /generate, in the shape that vLLM gives them.
"""

from __future__ import annotations

import json

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
_PROMPTS = {GENERATE: b'"token_ids":', COMPLETIONS: b'"prompt":'}


class FakeVLLM:
    """Bodies of replies to both endpoints.

    Args:
        output: Ids of every reply; the last one is the stop id.
        logprobs: Their log-probs.
        text: What they are as text.
    """

    def __init__(self, output: list[int], logprobs: list[float], text: str) -> None:
        entries = [(f"token_id:{token}", value) for token, value in zip(output, logprobs, strict=True)]
        top = [{"token": name, "logprob": value, "bytes": None} for name, value in entries]
        content = [entry | {"top_logprobs": [entry]} for entry in top]
        choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": "stop", "token_ids": output}
        self._generate = json.dumps({"request_id": "fake", "choices": [choice], "prompt_logprobs": None}).encode()
        completion = {
            "index": 0,
            "text": text,
            "logprobs": {
                "text_offset": list(range(0, 4 * len(output), 4)),
                "token_logprobs": logprobs,
                "tokens": [name for name, _ in entries],
                "top_logprobs": [{name: value} for name, value in entries],
            },
            "finish_reason": "stop",
            "stop_reason": output[-1],
            "token_ids": output,
            "prompt_logprobs": None,
        }
        head = {"id": "fake", "object": "text_completion", "created": 0, "model": "fake", "choices": [completion]}
        self._completion = json.dumps(head)[:-3].encode() + b', "prompt_token_ids": [%b]}]}'

    def reply(self, path: str, body: bytes) -> tuple[bytes, bytes, bool]:
        """(the reply's body, the prompt's ids as JSON without brackets, whether log-probs were asked for)."""
        at = body.index(b"[", body.index(_PROMPTS[path])) + 1
        prompt = body[at : body.index(b"]", at)]
        asked = b'"logprobs":' in body and b'"logprobs": null' not in body
        return (self._generate if path == GENERATE else self._completion % prompt), prompt, asked
