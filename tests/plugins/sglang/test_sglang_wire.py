"""What is written for /generate, and what is accepted back."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from generate_requests import generate_request
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import BackendError
from engine.plugins.servers import wire
from engine.plugins.servers.wire import EncodedRequest, PromptMismatch, ReplyError, read_reply
from engine.plugins.sglang.wire import SGLANG, Encoder, version_number
from engine.schemas.generation import FinishReason, GenerateRequest, SamplingParams, VersionSpan
from engine.tokens.tape import Tape

VOCAB = 1000


request = partial(generate_request, seed=41)
decode = partial(read_reply, SGLANG)


def encode(encoder: Encoder, asked: GenerateRequest, rid: str = "rid-0") -> EncodedRequest:
    return encoder.encode(asked, rid, asked.input_ids, asked.max_new_tokens)


def body(sent: EncodedRequest) -> dict[str, Any]:
    return dict(json.loads(b"".join(sent.pieces)))


def reply(sent: EncodedRequest, output: list[int] | None = None, **changes: Any) -> bytes:
    output = [5, 6, 2] if output is None else output
    meta: dict[str, Any] = {
        "id": sent.rid,
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": len(sent.ids),
        "weight_version": "default",
        "completion_tokens": len(output),
        "cached_tokens": 1,
        "queue_time": 0.25,
        "output_token_logprobs": [[-0.5, token, None] for token in output],
    }
    top = {"text": "", "output_ids": output, "prompt_token_ids": sent.ids.tolist()}
    for name, value in changes.items():
        (top if name in top else meta)[name] = value
    prompt = top.pop("prompt_token_ids")
    ordered = {**top, "meta_info": meta} | ({} if prompt is None else {"prompt_token_ids": prompt})
    return json.dumps(ordered, separators=(",", ":")).encode()


def sent(ids: list[int] | None = None) -> EncodedRequest:
    return encode(Encoder(vocab_size=VOCAB, seeded=False), request([1, 22, 333] if ids is None else ids))


# -- out


def test_a_request_holds_what_was_asked_and_nothing_else() -> None:
    assert body(sent()) == {
        "rid": "rid-0",
        "input_ids": [1, 22, 333],
        "return_logprob": True,
        "return_prompt_token_ids": True,
        "sampling_params": {"temperature": 1.0, "stop_token_ids": [2], "max_new_tokens": 8},
    }


def test_every_parameter_that_is_set_is_passed_on_by_its_name() -> None:
    sampling = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, frequency_penalty=0.1, presence_penalty=-0.1,
        repetition_penalty=1.1, min_new_tokens=2, stop=["</a>", "ü\n"], stop_token_ids=[9], stop_regex=["a+"],
        ignore_eos=False, skip_special_tokens=False, spaces_between_special_tokens=False, no_stop_trim=True,
        json_schema="{}", logit_bias={"7": -1.5}, custom_params={"a": 1}, max_new_tokens=99,
    )  # fmt: skip
    asked = request([1], sampling=sampling, stop_token_ids=[2, 9], adapter="tutor")
    written = body(encode(Encoder(vocab_size=VOCAB, seeded=True, echo=False), asked))
    assert written["sampling_params"] == {
        **sampling.model_dump(exclude_none=True),
        "stop_token_ids": [2, 9],
        "max_new_tokens": 8,
        "sampling_seed": 41,
    }
    assert (written["lora_path"], written["return_prompt_token_ids"]) == ("tutor", False)


def test_banned_ids_join_the_logit_bias() -> None:
    asked = request([1], sampling=SamplingParams(logit_bias={"7": 1.0}), banned_token_ids=[8, 9])
    assert body(encode(Encoder(vocab_size=VOCAB, seeded=False), asked))["sampling_params"]["logit_bias"] == {
        "7": 1.0,
        "8": -1e9,
        "9": -1e9,
    }


def test_what_was_sampled_already_counts_towards_the_least_length() -> None:
    asked = request([1], sampling=SamplingParams(min_new_tokens=5))
    encoder = Encoder(vocab_size=VOCAB, seeded=False)
    made = encoder.encode(asked, "r", np.array([1, 4, 4, 4], np.int32), 5, sampled=3)
    assert body(made)["sampling_params"]["min_new_tokens"] == 2
    assert body(encoder.encode(asked, "r", asked.input_ids, 8))["sampling_params"]["min_new_tokens"] == 5


@pytest.mark.parametrize(
    ("ids", "at", "bad"), [([1, VOCAB], 1, VOCAB), ([-1], 0, -1), ([5, 6, 2**31 - 1], 2, 2**31 - 1)]
)
def test_an_id_outside_the_vocabulary_is_never_sent(ids: list[int], at: int, bad: int) -> None:
    with pytest.raises(BackendError, match=rf"token {at} of the prompt is id {bad}; .*\[0, 1000\)") as caught:
        sent(ids)
    assert (caught.value.kind, caught.value.retryable) == ("bad_prompt", False)


def test_an_id_outside_the_vocabulary_is_found_in_what_is_new() -> None:
    encoder = Encoder(vocab_size=VOCAB, seeded=False)
    encode(encoder, request([1, 2, 3]))
    with pytest.raises(BackendError, match="token 4 of the prompt is id 4000"):
        encode(encoder, request([1, 2, 3, 4, 4000]))


ids = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@given(
    turns=st.lists(st.tuples(st.sampled_from(["a", "b"]), st.booleans(), ids), min_size=1, max_size=12),
    memory=st.integers(0, 400),
)
def test_the_text_spells_exactly_the_ids_whatever_came_before(
    turns: list[tuple[str, bool, list[int]]], memory: int
) -> None:
    encoder = Encoder(vocab_size=VOCAB, seeded=False, memory=memory)
    prompts: dict[str, list[int]] = {}
    for episode, continues, new in turns:
        prompt = prompts.get(episode, []) + new if continues else new
        prompts[episode] = prompt
        made = encode(encoder, request(prompt, episode=episode))
        assert body(made)["input_ids"] == prompt
        assert b"".join(made.prompt) == ",".join(map(str, prompt)).encode()


def test_no_more_is_remembered_than_allowed() -> None:
    encoder = Encoder(vocab_size=VOCAB, seeded=False, memory=1000)
    for number in range(50):
        encode(encoder, request([7] * 30, episode=str(number)))  # 120 bytes of ids, 59 of text
    assert list(encoder._known) == [str(number) for number in range(45, 50)]
    assert encoder._used == 5 * 179
    encoder.forget("49")
    encoder.forget("never there")
    assert encoder._used == 4 * 179


def on_tape(encoder: Encoder, tape: Tape) -> EncodedRequest:
    asked = request([1])
    return encoder.encode(asked, "r", tape.ids, asked.max_new_tokens)


@pytest.mark.parametrize("context", [100, 100_000])
def test_what_a_turn_encodes_depends_on_its_new_tokens_alone(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, tape, compared, encoded = Encoder(vocab_size=VOCAB, seeded=False), Tape(VOCAB), 0, 0
    dump, begins_with = wire._longer, wire.begins_with

    def longer(text: tuple[bytes, ...], new: bytes) -> tuple[bytes, ...]:
        nonlocal encoded
        encoded += len(new) + 1
        return dump(text, new)

    def begins(ids: np.ndarray, before: np.ndarray) -> bool:
        nonlocal compared
        compared += 4 * before.size * (ids.base is not before.base)
        return begins_with(ids, before)

    monkeypatch.setattr(wire, "_longer", longer)
    monkeypatch.setattr(wire, "begins_with", begins)
    tape.append("prompt", [7] * context)
    text = on_tape(encoder, tape).prompt
    encoded = copied = 0
    for _ in range(200):
        tape.append("bridge", [11] * 20)
        kept, text = {id(piece) for piece in text}, on_tape(encoder, tape).prompt
        copied += sum(len(piece) for piece in text if id(piece) not in kept)
    assert encoded == 200 * 20 * 3
    assert b"".join(text) == b",".join([b"7"] * context + [b"11"] * 4000)
    grown = max(2 * context, 8 * 4000 * 3)  # of a short text the pieces double; a long one is joined at most once
    assert copied <= grown
    assert compared <= 4 * grown


def test_a_tape_that_was_cut_is_compared_again() -> None:
    encoder, tape = Encoder(vocab_size=VOCAB, seeded=False), Tape(VOCAB)
    tape.append("prompt", [1, 2, 3])
    mark = tape.mark()
    tape.append("bridge", [4, 5])
    assert body(on_tape(encoder, tape))["input_ids"] == [1, 2, 3, 4, 5]
    tape.cut(mark)
    tape.append("bridge", [6, 7, 8])
    assert body(on_tape(encoder, tape))["input_ids"] == [1, 2, 3, 6, 7, 8]


def test_views_of_one_buffer_that_begin_elsewhere_are_other_prompts() -> None:
    encoder, ids = Encoder(vocab_size=VOCAB, seeded=False), np.arange(8, dtype=np.int32)
    ids.flags.writeable = False
    for part in (ids[:4], ids[2:], ids[:3], ids[:8]):
        assert body(encoder.encode(request([1]), "r", part, 8))["input_ids"] == part.tolist()


# -- back


def test_a_good_reply_is_read_whole() -> None:
    out = sent()
    part = decode(reply(out), out, VOCAB)
    assert part.ids.tolist() == [5, 6, 2]
    assert part.ids.dtype == np.int32
    assert part.logprobs.tolist() == [-0.5, -0.5, -0.5]
    assert part.finish == FinishReason(type="stop", matched=2)
    assert part.versions == [VersionSpan(version=0, start=0, end=3)]
    assert (part.version, part.prompt_tokens, part.cached_tokens, part.queue_seconds, part.echoed) == (
        "default",
        3,
        1,
        0.25,
        True,
    )


@given(prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), spaces=st.booleans(), first=st.booleans())
def test_an_echo_is_compared_however_it_is_written(prompt: list[int], spaces: bool, first: bool) -> None:
    out = sent(prompt)
    data = json.loads(reply(out))
    if first:
        data = {"prompt_token_ids": data.pop("prompt_token_ids"), **data}
    text = json.dumps(data, separators=None if spaces else (",", ":")).encode()
    assert decode(text, out, VOCAB).echoed


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    seen=st.lists(st.integers(0, VOCAB - 1), max_size=30),
)
def test_another_prompt_is_an_error_that_shows_the_first_difference(prompt: list[int], seen: list[int]) -> None:
    out = sent(prompt)
    text = reply(out, prompt_token_ids=seen)
    if seen == prompt:
        assert decode(text, out, VOCAB).echoed
        return
    at = next((i for i, (a, b) in enumerate(zip(prompt, seen, strict=False)) if a != b), min(len(prompt), len(seen)))
    with pytest.raises(PromptMismatch) as caught:
        decode(text, out, VOCAB)
    assert caught.value.at == at
    assert caught.value.kind == "prompt_mismatch"
    start = max(0, at - 2)
    assert str(caught.value) == (
        f"the server's prompt is not the one it was sent: they differ at token {at}. Sent {prompt[start : at + 3]} "
        f"({len(prompt)} tokens), the server saw {seen[start : at + 3]} ({len(seen)} tokens), from token {start} on"
    )


def test_a_prompt_that_merely_ends_like_ours_is_another_prompt() -> None:
    out = sent([1, 2])
    with pytest.raises(PromptMismatch):
        decode(reply(out, prompt_token_ids=[11, 2]), out, VOCAB)
    with pytest.raises(PromptMismatch):
        decode(reply(out, prompt_token_ids=[0, 1, 2]), out, VOCAB)


def test_a_reply_without_an_echo_says_that_nothing_was_compared() -> None:
    out = sent()
    assert not decode(reply(out, prompt_token_ids=None), out, VOCAB).echoed


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"id": "another"}, "it answers request 'another', not 'rid-0'"),
        ({"prompt_tokens": 4}, "it counts 4 prompt tokens where 3 were sent"),
        ({"output_ids": [5, 6]}, "its 3 log-probs are not those of its 2 tokens"),
        ({"output_token_logprobs": [[-0.5, 5, None]]}, "its 1 log-probs are not those of its 3 tokens"),
        (
            {"output_token_logprobs": [[-0.5, t, None] for t in (5, 6, 2, 2)]},
            "its 4 log-probs are not those of its 3 tokens",
        ),
        (
            {"output_token_logprobs": [[-0.5, t, None] for t in (5, 7, 2)]},
            "its 3 log-probs are not those of its 3 tokens",
        ),
        (
            {"output_token_logprobs": [[-0.5, 5, None], [None, 6, None], [-0.5, 2, None]]},
            "token 1 has no finite log-prob",
        ),
        ({"completion_tokens": 2}, "it counts 2 tokens and holds 3"),
        ({"finish_reason": {"type": "tired"}}, "it ended for an unknown reason, 'tired'"),
        ({"weight_versions": [{"version": "1", "start": 0, "end": 2}]}, "its weight versions cover 2 of 3 tokens"),
        ({"weight_versions": [{"version": "1", "start": 1, "end": 3}]}, "its weight versions leave a gap at token 0"),
    ],
)
def test_a_reply_that_contradicts_itself_or_the_request_is_refused(changes: dict[str, Any], problem: str) -> None:
    out = sent()
    if "output_ids" in changes:
        changes = {**changes, "completion_tokens": 2}
    with pytest.raises(ReplyError) as caught:
        decode(reply(out, **changes), out, VOCAB)
    assert str(caught.value) == problem


def test_a_reply_longer_than_asked_for_is_refused() -> None:
    out = sent()
    with pytest.raises(ReplyError, match="it holds 9 tokens where at most 8 were asked for"):
        decode(reply(out, [5] * 9), out, VOCAB)


@pytest.mark.parametrize("token", [VOCAB, -1, 2**40])
def test_a_sampled_id_outside_the_vocabulary_is_refused(token: int) -> None:
    out = sent()
    with pytest.raises(ReplyError, match="outside the vocabulary of 1000"):
        decode(reply(out, [token]), out, VOCAB)


@given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
def test_no_bytes_are_read_as_a_reply_by_accident(data: bytes) -> None:
    with pytest.raises(ReplyError, match="not what SGLang answers"):
        decode(data, sent(), VOCAB)


@pytest.mark.parametrize("token", [2.5, 1e22, None, "5"])
def test_an_id_that_is_no_integer_is_refused(token: Any) -> None:
    out = sent()
    body = reply(out, output_ids=[token], output_token_logprobs=[[-0.5, token, None]], completion_tokens=1)
    with pytest.raises(ReplyError, match="not what SGLang answers"):
        decode(body, out, VOCAB)


@given(st.data())
def test_a_reply_that_is_cut_anywhere_is_refused(data: st.DataObject) -> None:
    out = sent()
    whole = reply(out)
    with pytest.raises(ReplyError):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))], out, VOCAB)


def test_spans_of_versions_are_kept_and_empty_ones_are_not() -> None:
    out = sent()
    spans = [
        {"version": "7", "start": 0, "end": 2},
        {"version": "8", "start": 2, "end": 3},
        {"version": "9", "start": 3, "end": 3},
    ]
    part = decode(reply(out, weight_versions=spans), out, VOCAB)
    assert part.versions == [VersionSpan(version=7, start=0, end=2), VersionSpan(version=8, start=2, end=3)]


def test_an_interrupted_reply_without_tokens_is_read() -> None:
    out = sent()
    changes: dict[str, Any] = {"finish_reason": {"type": "abort", "message": "paused"}, "completion_tokens": None}
    part = decode(reply(out, [], weight_versions=[{"version": "default", "start": 0, "end": 0}], **changes), out, VOCAB)
    assert (part.ids.tolist(), part.finish, part.versions) == ([], FinishReason(type="abort", message="paused"), [])


@pytest.mark.parametrize(("matched", "kept"), [("</a>", "</a>"), (7, 7), ([3, 7], 7), (None, None)])
def test_what_ended_a_reply_is_told(matched: Any, kept: Any) -> None:
    out = sent()
    assert decode(reply(out, finish_reason={"type": "stop", "matched": matched}), out, VOCAB).finish.matched == kept


@pytest.mark.parametrize(("name", "number"), [("default", 0), ("0", 0), ("17", 17), (17, 17), ("000012", 12)])
def test_a_version_that_is_a_number_is_that_number(name: str | int, number: int) -> None:
    assert version_number(name) == number


@given(st.text().filter(lambda text: not (text.isascii() and text.isdigit()) and text != "default"))
def test_any_other_version_is_a_number_that_no_step_has(name: str) -> None:
    assert 2**30 <= version_number(name) < 2**31
    assert version_number(name) == version_number(name)


@given(
    values=st.lists(st.floats(-50, 0, allow_nan=False), min_size=1, max_size=8),
    texts=st.sampled_from([None, "a", "],[", '\\"[', ",null],["]),
    spaces=st.booleans(),
)
def test_logprobs_are_read_the_same_however_their_rows_are_written(
    values: list[float], texts: str | None, spaces: bool
) -> None:
    out = sent()
    tokens = [100 + at for at in range(len(values))]
    rows = [[value, token, texts] for value, token in zip(values, tokens, strict=True)]
    data = json.loads(reply(out, tokens, output_token_logprobs=rows))
    body = json.dumps(data, separators=None if spaces else (",", ":")).encode()
    assert decode(body, out, VOCAB).logprobs.tolist() == np.array(values, np.float32).tolist()


@pytest.mark.parametrize(
    "rows",
    [
        "[[-0.5,5,null],[-0.5,6],[-0.5,2,null]]",
        "[[-0.5,5,null,-0.5,6,null],[-0.5,2,null]]",
        "[-0.5]",
        "5",
        '[["a",5,null]]',
    ],
)
def test_rows_of_another_form_are_refused(rows: str) -> None:
    out = sent()
    body = reply(out, output_token_logprobs="@").replace(b'"@"', rows.encode())
    with pytest.raises(ReplyError):
        decode(body, out, VOCAB)


def test_rows_that_are_not_of_the_reply_are_not_taken() -> None:
    out = sent()
    rows = '"output_token_logprobs":[[-0.5,5,null],[-0.5,6,null],[-0.5,2,null]],'
    elsewhere = reply(out, output_token_logprobs=[]).replace(b'{"text"', b"{" + rows.encode() + b'"text"')
    with pytest.raises(ReplyError, match="its 0 log-probs"):
        decode(elsewhere, out, VOCAB)
    assert decode(reply(out, text=rows), out, VOCAB).logprobs.tolist() == [-0.5] * 3
