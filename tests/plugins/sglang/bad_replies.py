"""Replies of an SGLang server that cannot be used: broken connections, wrong bodies, and errors."""

from __future__ import annotations

import asyncio

from sglang_cluster import OUTPUT, Call, answers, changed


async def drop(call: Call) -> None:
    call.drop()


async def drop_inside_the_body(call: Call) -> None:
    body = call.reply()
    call.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body[: len(body) // 2]))
    await asyncio.sleep(0.01)
    call.drop()


async def promise_more_than_is_sent(call: Call) -> None:
    body = call.reply()
    call.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body) + 10, body))
    await asyncio.sleep(0.01)
    call.drop()


async def promise_less_than_is_sent(call: Call) -> None:
    body = call.reply()
    call.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body) - 10, body))


async def speak_no_http(call: Call) -> None:
    call.send(b"I am not a web server\r\n\r\n")


TOO_MANY = [[-0.5, token, None] for token in [*OUTPUT, 2]]


BAD_REPLIES = {
    "no JSON": answers(b"<html>"),
    "cut JSON": answers(b'{"output_ids":[5,6'),
    "wrong shape": answers(b'{"output_ids":"abc","meta_info":{}}'),
    "empty": answers(b""),
    "too many log-probs": changed(output_token_logprobs=TOO_MANY),
    "no log-probs": changed(output_token_logprobs=[]),
    "null log-prob": changed(output_token_logprobs=[[None, token, None] for token in OUTPUT]),
    "wrong length": changed(completion_tokens=4),
    "wrong prompt length": changed(prompt_tokens=2),
    "another's reply": changed(id="another"),
    "too long a body": promise_less_than_is_sent,
}


BROKEN = {
    "dropped": drop,
    "dropped inside the body": drop_inside_the_body,
    "too short a body": promise_more_than_is_sent,
    "no HTTP": speak_no_http,
}


SERVER_ERRORS = {
    "500": answers(b"Internal Server Error", 500),
    "502": answers(b'{"error":{"message":"bad gateway"}}', 502),
    "429": answers(b'{"error":"slow down"}', 429),
}
