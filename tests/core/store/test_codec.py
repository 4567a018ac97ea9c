"""Contracts survive the store bit for bit."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_kit import make_trajectory

from engine.errors import SpecCodeError, StoreError
from engine.schemas.environment import Reset, Step, UserTurn
from engine.schemas.generation import FinishReason, Generation, VersionSpan
from engine.schemas.journal import (
    FailureRecord,
    GenerationRecord,
    JournalEntry,
    LimitRecord,
    Record,
    ResetRecord,
    ScoreRecord,
    StepRecord,
    ToolsRecord,
    UserRecord,
)
from engine.schemas.message import ImagePart, Message, TextPart, ToolCall, ToolResult
from engine.schemas.reward import RewardEvent
from engine.schemas.trajectory import Branch, Failure, Outcome, Span, Trajectory
from engine.store import codec, results


def through(record: Record, at: float = 1.5, seconds: float = 0.25) -> JournalEntry:
    written = codec.encode_record(record)
    return codec.read_entry((3, "A", "e", "B", written.kind, written.payload, written.tokens, at, seconds))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('abc\u00e9\n"\\'), inner, max_size=3),
    max_leaves=8,
)


@given(bits=st.lists(st.integers(0, 2**32 - 1), max_size=50), ids=st.data())
def test_token_arrays_return_bit_equal_whatever_the_bits(bits: list[int], ids: Any) -> None:
    logprobs = np.array(bits, np.uint32).view(np.float32)
    output = ids.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=len(bits), max_size=len(bits)))
    generation = Generation.read({"output_ids": output, "logprobs": logprobs, "finish": FinishReason(type="length")})
    back = through(GenerationRecord(generation=generation)).record
    assert isinstance(back, GenerationRecord)
    assert back.generation.output_ids.dtype == np.int32
    assert back.generation.output_ids.tolist() == output
    assert back.generation.logprobs.dtype == np.float32
    assert back.generation.logprobs.view(np.uint32).tolist() == bits


@given(
    facts=st.dictionaries(st.text("xyz"), json_values, max_size=4),
    value=st.floats(allow_nan=False, allow_infinity=False),
)
def test_records_return_equal(facts: dict[str, Any], value: float) -> None:
    event = RewardEvent(value=value, cause="c", source="user")
    records: list[Record] = [
        ResetRecord(reset=Reset(messages=[Message(role="user", content="q")], facts=facts)),
        ToolsRecord(results=[ToolResult(call_id="call_0_0", name="t", content="x", rewards=[event], facts=facts)]),
        UserRecord(turn=UserTurn(content="no", rewards=[event], facts=facts), canned=True),
        StepRecord(step=Step(event="e", rewards=[event], facts=facts)),
        ScoreRecord(rewards=[event, RewardEvent(turn=1, op="transfer", to="first", share=0.3)]),
        LimitRecord(limit="user_turns", value=value),
        FailureRecord(failure=Failure(kind="k", blame="tool", message="m", trace="t")),
    ]
    for record in records:
        entry = through(record, at=abs(value))
        assert entry.record == record
        assert (entry.seq, entry.state, entry.event, entry.dest, entry.at) == (3, "A", "e", "B", abs(value))


def test_a_generation_keeps_what_is_beside_its_arrays() -> None:
    generation = Generation.read(
        {
            "output_ids": [5, 6, 7],
            "logprobs": [-0.5, -1.25, -0.0],
            "finish": FinishReason(type="stop", matched="</answer>"),
            "versions": [VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=3)],
            "prompt_tokens": 11,
            "cached_tokens": 9,
            "seconds": 0.1,
            "queue_seconds": 0.05,
        }
    )
    back = through(GenerationRecord(generation=generation)).record.generation  # type: ignore[attr-defined]
    assert back.plain() == generation.plain()


texts = st.text(st.characters(exclude_categories=["Cs"]))
seconds = st.floats(0, 1e9)


@given(name=texts, content=texts, matched=st.none() | st.integers(-1, 2**31) | texts, took=seconds, waited=seconds)
def test_payloads_have_the_bytes_that_pydantic_writes(
    name: str, content: str, matched: int | str | None, took: float, waited: float
) -> None:
    result = ToolResult(call_id="call_0_0", name=name, content=content, error="raised", seconds=took)
    tools = ToolsRecord(results=[result, replace(result, error=None)])
    assert codec.encode_record(tools).payload == codec.json_of(tools)
    generation = Generation(
        output_ids=np.zeros(2, np.int32),
        logprobs=np.zeros(2, np.float32),
        finish=FinishReason(type="stop", matched=matched),
        versions=[VersionSpan(version=3, start=0, end=2)],
        seconds=took,
        queue_seconds=waited,
    )
    arrays = ("output_ids", "logprobs", "routed_experts")
    beside = {key: value for key, value in generation.plain().items() if key not in arrays}
    for whole in (False, True):
        columns = {"kind": "generation", "generation": beside} | ({"whole": True} if whole else {})
        encoded = codec.encode_record(GenerationRecord(generation=generation, whole=whole))
        assert encoded.payload == codec.json_of(columns)


free = st.floats() | json_values | st.sampled_from([1e16, 1e22, -1e300, 2**70, (1, 2), np.float32(0.1), np.arange(2)])


@given(fact=free, argument=free, reward=st.floats(), cost=st.floats(0))
def test_trajectories_have_the_bytes_that_pydantic_writes(fact: Any, argument: Any, reward: float, cost: float) -> None:
    call = ToolCall(id="c", name="add", arguments={"a": argument})
    made = make_trajectory(
        facts={"x": fact}, messages=[Message(role="assistant", content="é\u2028", tool_calls=[call])]
    )
    turns = [replace(turn, rewards={"reward": reward}, cost=cost) for turn in made.turns]
    made = replace(made, turns=turns, outcome=replace(made.outcome, reward=-reward, rewards={"reward": reward}))
    columns = {
        field.name: getattr(made, field.name) for field in fields(made) if field.name not in ("branches", "postings")
    }
    assert results.encode_trajectory(made).trajectory == codec.json_of(columns)


def test_what_json_cannot_represent_in_a_trajectory_is_refused() -> None:
    for fact in (object(), "\ud800"):
        with pytest.raises(SpecCodeError, match="cannot be stored"):
            results.encode_trajectory(make_trajectory(facts={"x": fact}))


def test_numpy_values_in_facts_become_plain_numbers() -> None:
    facts = {"score": np.float64(0.5), "row": np.arange(3), "yes": np.bool_(True)}
    back = through(UserRecord(turn=UserTurn(content="x", facts=facts))).record
    assert back.turn.facts == {"score": 0.5, "row": [0, 1, 2], "yes": True}  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [object(), "\ud800", b"\xff", math.nan, [-math.inf], 2**63, {1: 2}])
def test_what_json_cannot_represent_is_the_fault_of_its_code(value: Any) -> None:
    record = UserRecord(turn=UserTurn(content="x", facts={"bad": value}))
    with pytest.raises(SpecCodeError, match="Facts, results and task fields must be JSON") as caught:
        codec.encode_record(record)
    assert (caught.value.kind, caught.value.blame) == ("not_json", "user")


spans = st.lists(
    st.tuples(st.sampled_from(["prompt", "generated", "bridge", "closing"]), st.integers(0, 5)), max_size=8
)


@settings(deadline=None)
@given(kinds=spans, seed=st.integers(0, 2**32 - 1))
def test_a_branch_returns_equal_though_its_mask_and_turns_are_derived(kinds: list[tuple[Any, int]], seed: int) -> None:
    made, start, turn = [], 0, 0
    for kind, size in kinds:
        made.append(Span(kind=kind, start=start, end=start + size, turn=turn if kind == "generated" else -1))
        turn += kind == "generated"
        start += size
    rng = np.random.default_rng(seed)
    mask = np.array([kind == "generated" for kind, size in kinds for _ in range(size)], np.int32)
    branch = Branch.read(
        {
            "index": 2,
            "reason": "history rewritten",
            "spans": made,
            "input_ids": rng.integers(0, 2**31, start),
            "loss_mask": mask,
            "logprobs": rng.normal(size=start) * mask,
            "weight_versions": np.where(mask, 7, -1),
            "turn_ids": [span.turn for span in made for _ in range(span.end - span.start)],
        }
    )
    back = results.read_branch(results._write_branch(branch, "t/0"))
    assert (back.index, back.reason, back.spans) == (branch.index, branch.reason, branch.spans)
    for name in ("input_ids", "loss_mask", "logprobs", "weight_versions", "turn_ids"):
        array, expected = getattr(back, name), getattr(branch, name)
        assert array.dtype == expected.dtype
        assert array.tobytes() == expected.tobytes()


def test_a_branch_whose_mask_is_not_its_spans_is_refused() -> None:
    branch = Branch.read(
        {
            "index": 0,
            "spans": [Span(kind="prompt", start=0, end=1), Span(kind="generated", start=1, end=3, turn=0)],
            "input_ids": [1, 2, 3],
            "loss_mask": [0, 1, 0],
            "logprobs": [0, -1, -1],
            "weight_versions": [-1, 0, 0],
            "turn_ids": [-1, 0, 0],
        }
    )
    trajectory = Trajectory(
        run_id="r",
        episode_id="t/0",
        task_id="t",
        sample_index=0,
        seed=1,
        history="branch",
        outcome=Outcome(state="DONE", event="answered"),
        messages=[],
        turns=[],
        branches=[branch],
    )
    with pytest.raises(StoreError, match="t/0: the arrays of branch 0 are not those of its spans"):
        results.encode_trajectory(trajectory)


def test_messages_with_images_return_equal() -> None:
    parts = [TextPart(text="look"), ImagePart(image="sha256:00", mime="image/png", width=3, height=4)]
    record = ResetRecord(reset=Reset(messages=[Message(role="user", content=parts)]))
    assert through(record).record == record
