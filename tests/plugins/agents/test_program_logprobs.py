"""Log-probs that agent programs ask for are those of the training rows, token by token, in the form of each API."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from agent_kit import Played, play
from tokenizers import Tokenizer, decoders, models, normalizers
from wire_kit import Answers, endpoint

from engine.backends.scripted import ScriptedBackend
from engine.plugins.agents.wire.chat import ChatCompletions
from engine.plugins.agents.wire.requests import ApiError, ModelReply, SampledToken, Session
from engine.plugins.agents.wire.responses import Responses
from engine.schemas.generation import GenerateRequest, Generation
from engine.schemas.message import Message
from engine.tokens.tokenizer import FastTokenizer

CALL = {"tool_calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}]}
ASKING = """
said = []
one = post({"messages": [ASK], "tools": TOOLS, "logprobs": True, "top_logprobs": 0})[1]
said.append(one["choices"][0]["logprobs"]["content"])
two = post({"messages": [ASK], "n": 2, "logprobs": True})[1]
said += [choice["logprobs"]["content"] for choice in two["choices"]]
include = ["message.output_text.logprobs"]
for answer in (respond("Q", include=include), respond("Why?", include=include, tools=[{"type": "function", **TOOLS[0]["function"]}])):
    [message] = [item for item in answer["output"] if item["type"] == "message"]
    said.append(message["content"][0]["logprobs"])
for body, path in (({"messages": [ASK]}, "chat/completions"), ({"input": "Q"}, "responses")):
    assert "0." not in json.dumps(post(body, path)[1].get("choices") or post(body, path)[1]["output"])
json.dump(said, open("said.json", "w"))
reward()
"""


def expected(played: Played) -> list[list[float]]:
    """By turn: the log-probs of its row."""
    found = []
    for turn in played.trajectory.turns:
        branch = played.trajectory.branches[turn.branch]
        found.append(
            [float(each) for each in branch.logprobs[(branch.turn_ids == turn.index) & (branch.loss_mask == 1)]]
        )
    return found


async def test_the_log_probs_of_replies_are_those_of_the_rows(
    tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, numbers = ScriptedBackend.generate, np.random.default_rng(0)

    async def varied(self: ScriptedBackend, request: GenerateRequest) -> Generation:
        """A script has one log-prob for all tokens of a reply."""
        generation = await generate(self, request)
        return replace(generation, logprobs=-numbers.random(len(generation.output_ids), np.float32))

    monkeypatch.setattr(ScriptedBackend, "generate", varied)
    replies: list[Any] = [CALL, "It is é 42.", "Yes 😀", "So.", {"text": "Hm", **CALL}, "a", "b", "c", "d"]
    played = await play(tmp_path, tiny_tokenizer_dir, ASKING, replies, limits={"assistant_turns": 20})
    assert played.trajectory.outcome.event == "exited", played.records[-1].output
    said = json.loads((tmp_path / "said.json").read_text())
    rows = expected(played)[: len(said)]
    assert [[token["logprob"] for token in reply] for reply in said] == rows
    assert all(rows)
    assert {token["top_logprobs"] == [] for reply in said for token in reply} == {True}
    texts = [bytes(byte for token in reply for byte in token["bytes"]).decode() for reply in said]
    assert [text.removesuffix("<|im_end|>") for text in texts[1:4]] == ["It is é 42.", "Yes 😀", "So."]
    assert '"name": "add"' in texts[0]
    assert texts[4].startswith("Hm")


REPLY = ModelReply(
    message=Message(role="assistant", content="é!"),
    finish="stop",
    prompt_tokens=1,
    reply_tokens=3,
    sampled=[
        SampledToken(data=b"\xc3", logprob=-0.5),
        SampledToken(data=b"\xa9!", logprob=-0.25),
        SampledToken(data=b"<end>", logprob=0.0),
    ],
)
WRITTEN = [
    {"token": "\ufffd", "logprob": -0.5, "bytes": [195], "top_logprobs": []},
    {"token": "\ufffd!", "logprob": -0.25, "bytes": [169, 33], "top_logprobs": []},
    {"token": "<end>", "logprob": 0.0, "bytes": [60, 101, 110, 100, 62], "top_logprobs": []},
]


@pytest.fixture
def openai() -> Any:
    return pytest.importorskip("openai")


async def test_the_package_of_openai_reads_them_whole_and_streamed(openai: Any) -> None:
    async with endpoint() as (address, answers):
        answers.reply = REPLY
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="key", max_retries=0) as client:
            ask: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "Q"}], "logprobs": True}
            whole = await client.chat.completions.create(**ask)
            assert [token.model_dump() for token in whole.choices[0].logprobs.content] == WRITTEN
            streamed = []
            async for chunk in await client.chat.completions.create(**ask, stream=True, n=2):
                for choice in chunk.choices:
                    streamed += (
                        [(choice.index, token.model_dump()) for token in choice.logprobs.content]
                        if choice.logprobs
                        else []
                    )
            assert streamed == [(index, token) for index in range(2) for token in WRITTEN]
            ask = {"model": "policy", "input": "Q", "include": ["message.output_text.logprobs"]}
            response = await client.responses.create(**ask)
            assert [token.model_dump() for token in response.output[0].content[0].logprobs] == WRITTEN
            events = [event async for event in await client.responses.create(**ask, stream=True)]
            for kind in ("response.output_text.delta", "response.output_text.done"):
                [event] = [event for event in events if event.type == kind]
                assert [(token.token, token.logprob) for token in event.logprobs] == [
                    (token["token"], token["logprob"]) for token in WRITTEN
                ]
            assert events[-1].response.output[0].content == response.output[0].content
            without = await client.responses.create(model="policy", input="Q")
            assert without.output[0].content[0].logprobs == []
            await check_no_log_probs(client, answers)


async def check_no_log_probs(client: Any, answers: Answers) -> None:
    made = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Q"}])
    assert made.choices[0].logprobs is None
    assert not answers.asked[-1].logprobs


@pytest.mark.parametrize(
    ("body", "logprobs", "param"),
    [
        ({"logprobs": True, "top_logprobs": 5}, True, "top_logprobs"),
        ({"top_logprobs": 1}, True, "top_logprobs"),
        ({"top_logprobs": True}, True, "top_logprobs"),
        ({"logprobs": 5}, True, "logprobs"),
        ({"logprobs": True}, False, "logprobs"),
    ],
)
def test_what_is_not_known_is_refused(body: dict[str, Any], logprobs: bool, param: str) -> None:
    session = Session(logprobs=logprobs)
    with pytest.raises(ApiError) as refused:
        ChatCompletions().read({"model": "policy", "messages": [{"role": "user", "content": "Q"}], **body}, session)
    assert refused.value.param == param
    if "logprobs" in body:
        body["include"] = ["message.output_text.logprobs"]
    if body.pop("logprobs", True) is True:
        with pytest.raises(ApiError) as refused:
            Responses().read({"model": "policy", "input": "Q", **body}, session)
        assert refused.value.param == ("include" if param == "logprobs" else param)


def sentencepiece() -> FastTokenizer:
    """A tokenizer as Llama 2 has it: spaces are part of tokens, and other characters are bytes."""
    bytes_ = {f"<0x{byte:02X}>": byte for byte in range(256)}
    letters = {
        token: 256 + at
        for at, token in enumerate(["▁", "S", "a", "y", "n", "d", "t", "w", "i", "c", "e", ",", "▁a", "▁t"])
    }
    model = models.BPE(bytes_ | letters, [("▁", "a"), ("▁", "t")], byte_fallback=True, fuse_unk=True)
    found = Tokenizer(model)
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found.add_special_tokens(["<|im_end|>"])
    return FastTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=found))


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str, tiny_tokenizer_dir: Path) -> None:
    if kind == "sentencepiece":
        fast = sentencepiece()
    else:
        fast = FastTokenizer(transformers.AutoTokenizer.from_pretrained(tiny_tokenizer_dir))
    text = "Say twice é, 😀 and\n and<|im_end|>"
    ids = fast.encode(text)
    assert b"".join(map(fast.data_of, ids)).decode().lstrip() == text
    assert fast.data_of(ids[-1]) == b"<|im_end|>"
    assert [fast.data_of(id_) for id_ in fast.encode("😀")[-4:]] == [bytes([byte]) for byte in "😀".encode()]
