"""A trainer's sampler as a backend: replies, versions, and requests that cannot be sent."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from engine.errors import BackendError, ContextOverflow
from engine.plugins.local.spec import LocalBackendSpec
from engine.plugins.trainers.backend import TrainerBackend, TrainerReply, given, spans_of, unsupported
from engine.schemas.generation import GenerateRequest, Generation, SamplingParams, VersionSpan
from engine.schemas.message import ImagePart
from engine.tokens.experts import ExpertLayout


class Fixed(TrainerBackend):
    """Replies the same, or raises."""

    def __init__(self, reply: TrainerReply | Exception, context: int | None = None) -> None:
        super().__init__("Some trainer", LocalBackendSpec, context=context)
        self.fixed = reply

    async def sample(self, request: GenerateRequest) -> TrainerReply:
        if isinstance(self.fixed, Exception):
            raise self.fixed
        return self.fixed


def ask(
    reply: TrainerReply | Exception, context: int | None = None, **changes: Any
) -> tuple[Generation, dict[str, Any]]:
    """One reply to a prompt of three tokens, and the counts."""
    fields: dict[str, Any] = {
        "episode_id": "a/0",
        "turn": 0,
        "input_ids": np.array([1, 2, 3], np.int32),
        "sampling": SamplingParams(),
        "max_new_tokens": 3,
        "stop_token_ids": [9],
        "seed": 1,
    }
    backend = Fixed(reply, context)
    return asyncio.run(backend.generate(GenerateRequest(**fields | changes))), backend.stats()


def test_a_reply_keeps_its_versions() -> None:
    found, stats = ask(TrainerReply([4, 5, 9], [-1.0, -2.0, -3.0], [7, 7, 8], cut=False))
    assert found.output_ids.tolist() == [4, 5, 9]
    assert found.versions == [VersionSpan(version=7, start=0, end=2), VersionSpan(version=8, start=2, end=3)]
    assert (found.finish.type, found.finish.matched, found.prompt_tokens) == ("stop", 9, 3)
    assert stats == {"requests": 1, "tokens": 3}


@pytest.mark.parametrize(("cut", "kind"), [(True, "length"), (False, "stop")])
def test_a_reply_without_a_stop_token_ends_as_the_sampler_says(cut: bool, kind: str) -> None:
    found, _ = ask(TrainerReply([4], [-1.0], [0], cut=cut))
    assert (found.finish.type, found.finish.matched) == (kind, None)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (TrainerReply([4], None, [0], cut=False), "gave 1 tokens, no log-probs and 1 weight versions"),
        (TrainerReply([4], [-1.0, -1.0], [0], cut=False), "1 tokens, 2 log-probs"),
        (TrainerReply([4], [-1.0], [], cut=False), "1 log-probs and 0 weight versions"),
        (TrainerReply([], [], [], cut=False), "gave 0 tokens"),
    ],
)
def test_a_reply_that_lacks_something_is_no_row(reply: TrainerReply, said: str) -> None:
    with pytest.raises(BackendError, match=said) as caught:
        ask(reply)
    assert caught.value.kind == "invalid_reply"


def test_an_exception_of_the_sampler_is_an_error_of_the_backend() -> None:
    with pytest.raises(BackendError, match="Some trainer's sampler failed: KeyError: 'choices'") as caught:
        ask(KeyError("choices"))
    assert caught.value.kind == "sampler"
    with pytest.raises(BackendError, match="gone") as caught:
        ask(BackendError("gone", kind="aborted", retryable=True))
    assert caught.value.retryable


def test_a_prompt_that_fills_the_context_is_an_overflow() -> None:
    reply = TrainerReply([4], [-1.0], [0], cut=True)
    assert len(ask(reply, context=4)[0].output_ids) == 1
    with pytest.raises(ContextOverflow, match="3 tokens; Some trainer's sampler takes 3"):
        ask(reply, context=3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"images": [ImagePart(image="0" * 64, mime="image/png")], "image_spans": [(0, 1)]}, "images"),
        ({"adapter": "a"}, "a LoRA adapter or the base model"),
        ({"base_model": True}, "a LoRA adapter or the base model"),
        ({"experts_from": 0}, "the experts"),
    ],
)
def test_what_the_sampler_is_not_given_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BackendError, match=f"does not send to Some trainer's sampler: {said}"):
        ask(TrainerReply([4], [-1.0], [0], cut=False), **changes)


def test_placeholders_of_images_are_not_banned() -> None:
    """The trainer's softmax has them too. A reply with one fails its episode: see `Vision.check_sampled`."""
    assert ask(TrainerReply([4, 5], [-1.0, -1.0], [0, 0], cut=True), banned_token_ids=[5])[0].output_ids.tolist() == [
        4,
        5,
    ]


EXPERTS = np.arange(2 * 2 * 4).reshape(4, 2, 2) % 4
"""Of four tokens, in two layers, two each."""


def experts_of(experts: np.ndarray | None, start: int) -> np.ndarray | None:
    """What a reply of two tokens to a prompt of three reports from token `start` on."""
    backend = Fixed(TrainerReply([4, 5], [-1.0, -1.0], [0, 0], cut=True, experts=experts))
    backend.layout = ExpertLayout(layers=2, top_k=2, experts=4, sparse=(0, 1))
    request = GenerateRequest(
        episode_id="a/0", turn=0, input_ids=np.arange(3, dtype=np.int32), sampling=SamplingParams(), max_new_tokens=3,
        stop_token_ids=[], seed=1, experts_from=start,
    )  # fmt: skip
    return asyncio.run(backend.generate(request)).routed_experts


def test_experts_are_those_of_the_tokens_that_were_asked_for() -> None:
    found = experts_of(EXPERTS, 1)
    assert found is not None
    assert found.dtype == np.uint8
    assert found.tolist() == EXPERTS[1:].tolist()
    padded = experts_of(np.concatenate([EXPERTS, np.zeros((1, 2, 2), int)]), 0)
    assert padded is not None
    assert padded.tolist() == EXPERTS.tolist()


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        (None, "gave no experts where 4 are needed"),
        (EXPERTS[:3], "gave the experts of 3 tokens where 4 are needed"),
        (EXPERTS[:, :1], r"the shape \(4, 1, 2\) and not \[tokens, 2, 2\]"),
        (EXPERTS + 1, r"an expert outside \[0, 4\)"),
        (EXPERTS * 0, "one expert twice in one layer"),
    ],
)
def test_experts_that_are_not_those_of_the_model_are_refused(experts: np.ndarray | None, said: str) -> None:
    with pytest.raises(BackendError, match=said) as caught:
        experts_of(experts, 0)
    assert caught.value.kind == "invalid_reply"


def test_parameters_under_the_names_of_a_sampler() -> None:
    names = {"temperature": "temperature", "min_new_tokens": "min_tokens", "stop": "stop"}
    sampling = SamplingParams(
        temperature=0.5, min_new_tokens=2, top_k=3, regex="a+", max_new_tokens=4, stop_token_ids=[1]
    )
    assert given(sampling, names) == {"temperature": 0.5, "min_tokens": 2}
    assert unsupported(sampling, names) == ["top_k", "regex"]


def test_versions_as_spans() -> None:
    assert spans_of([]) == []
    assert [(span.version, span.start, span.end) for span in spans_of([1, 2, 2, 1])] == [
        (1, 0, 1),
        (2, 1, 3),
        (1, 3, 4),
    ]


def test_a_spec_does_not_open_it() -> None:
    with pytest.raises(BackendError, match="made inside a trainer"):
        Fixed.open(None, None, None)
