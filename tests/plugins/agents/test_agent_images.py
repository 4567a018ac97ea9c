"""Images of an agent program's requests: prompts are exact, and a history with images is found again."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
import vision_kit
from agent_kit import most_at_once, play
from PIL import Image


def uri(colour: str) -> str:
    """A square as a `data:` URI."""
    buffer = io.BytesIO()
    Image.new("RGB", (56, 56), colour).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


async def test_images_continue_a_tape_and_begin_branches(tmp_path: Path) -> None:
    program = f"""
def see(url):
    parts = [{{"type": "text", "text": "See"}}, {{"type": "image_url", "image_url": {{"url": url}}}}]
    return {{"role": "user", "content": parts}}

a, b = see({uri("red")!r}), see({uri("blue")!r})
one = chat(a)
chat(a, one, b)
chat(a, one, a)
chat(b, one, a)
reward()
"""
    played = await play(
        tmp_path, vision_kit.build_qwen25(tmp_path / "model"), program, ["red", "blue", "red again", "red"]
    )
    assert played.trajectory.outcome.failure is None
    assert played.reasons == ["", "edited", "subagent"]
    assert [turn.branch for turn in played.trajectory.turns] == [0, 0, 1, 2]
    assert [len(branch.images) for branch in played.trajectory.branches] == [2, 2, 2]


async def test_images_in_each_api_are_one_history(tmp_path: Path) -> None:
    program = f"""
url = {uri("red")!r}
one = chat({{"role": "user", "content": [{{"type": "text", "text": "See"}}, {{"type": "image_url", "image_url": {{"url": url}}}}]}})
parts = [{{"type": "input_text", "text": "See"}}, {{"type": "input_image", "detail": "auto", "image_url": url}}]
two = respond([{{"role": "user", "content": parts}}, one, ASK])
image = {{"type": "image", "source": {{"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}}}}
history = [
    {{"role": "user", "content": [{{"type": "text", "text": "See"}}, image]}}, one, ASK,
    {{"role": "assistant", "content": two["output"][0]["content"][0]["text"]}},
    {{"role": "user", "content": [{{"type": "text", "text": "And"}}, image]}},
]
status, counted = post({{"messages": history}}, "messages/count_tokens")
assert status == 200, counted
three = message(*history)
assert counted["input_tokens"] == three["usage"]["input_tokens"], (counted, three)
reward()
"""
    played = await play(tmp_path, vision_kit.build_qwen25(tmp_path / "model"), program, ["red", "yes", "again"])
    assert played.trajectory.outcome.failure is None
    assert played.reasons == [""]
    assert len(played.trajectory.branches[0].images) == 2


@pytest.mark.slow
async def test_requests_with_images_are_sampled_at_the_same_time(tmp_path: Path) -> None:
    program = f"""
from concurrent.futures import ThreadPoolExecutor
def see(url):
    parts = [{{"type": "text", "text": "See"}}, {{"type": "image_url", "image_url": {{"url": url}}}}]
    return {{"role": "user", "content": parts}}

with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda url: chat(see(url)), [{uri("red")!r}, {uri("blue")!r}]))
assert post({{"messages": [see({uri("green")!r})], "n": 3}})[0] == 200
reward()
"""
    replies = [{"text": text, "delay": 0.5} for text in "abcde"]
    played = await play(tmp_path, vision_kit.build_qwen25(tmp_path / "model"), program, replies)
    assert played.trajectory.outcome.failure is None
    assert len(played.trajectory.branches) == 5
    assert most_at_once(played.calls) == 3
    assert len(played.calls) == 5
