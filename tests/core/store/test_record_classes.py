"""Every class of structs is read back as it was written, and stored bytes of another form are refused by the record's name."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import write_entries, write_result
from validated_structs import STRUCTS, check, same

from engine.errors import StoreError
from engine.plugin import entries
from engine.schemas.base import Struct
from engine.schemas.environment import Reset, Step, UserTurn
from engine.schemas.generation import Generation, SamplingParams, VersionSpan
from engine.schemas.journal import JournalEntry, RecordBase, UnreadRecord
from engine.schemas.message import ImagePart, Message, TextPart
from engine.schemas.reward import RewardEvent
from engine.schemas.sections import OneOf, mark_of
from engine.schemas.trajectory import Branch, Span, Trajectory
from engine.store import RunStore, codec, results
from engine.store.scores import EpisodeScore, read_score

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
integers = st.integers(0, 2**40)
floats = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | floats | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
facts = st.dictionaries(texts, json_values, max_size=2)
events = st.builds(RewardEvent, value=floats, name=st.none() | texts, cause=texts) | st.builds(
    RewardEvent,
    op=st.just("transfer"),
    to=st.integers(0, 9) | st.just("first"),
    share=st.floats(0, 1),
    turn=st.just("last"),
)
parts = st.builds(TextPart, text=texts) | st.builds(ImagePart, image=texts, width=st.none() | st.integers(1, 9))
unknown = texts.map(lambda text: f"of a plugin: {text}")
contents = texts | st.lists(parts, max_size=2)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    origin, inside = get_origin(kind), get_args(kind)
    if (union := mark_of(kind, OneOf)) is not None:
        return st.one_of([structs(one) for one in union.members()])
    if origin is Annotated:
        return values_of(inside[0])
    if origin in (Union, UnionType):
        return st.one_of([values_of(one) for one in inside])
    if origin is Literal:
        return st.sampled_from(inside)
    if origin is list:
        return st.lists(values_of(inside[0]), max_size=2)
    if origin is tuple:
        return st.tuples(*map(values_of, inside))
    if origin is dict:
        return st.dictionaries(texts, values_of(inside[1]), max_size=2)
    if isinstance(kind, type) and issubclass(kind, Struct):
        return structs(kind)
    return {
        Any: json_values,
        str: texts,
        int: integers.filter(bool),
        float: floats,
        bool: st.booleans(),
        NoneType: st.none(),
        TextPart: st.builds(TextPart, text=texts),
        ImagePart: st.builds(ImagePart, image=texts),
        RewardEvent: events,
        SamplingParams: st.builds(SamplingParams, temperature=st.floats(0, 2), stop=st.lists(st.just("x"), max_size=1)),
        np.ndarray: st.lists(st.integers(0, 2**31 - 1), max_size=4).map(lambda ids: np.array(ids, np.int32)),
        Reset: st.builds(Reset, messages=st.lists(structs(Message), max_size=2), facts=facts),
        Step: st.builds(Step, event=texts, rewards=st.lists(events, max_size=2), facts=facts),
        UserTurn: st.builds(
            UserTurn, content=contents, rewards=st.lists(events, max_size=1), facts=facts, fields=facts
        ),
    }[kind]


@cache
def structs(struct: type[Struct]) -> st.SearchStrategy[Any]:
    """Instances of a class of structs, every field drawn."""
    if struct is Generation:
        return generations()
    if struct is Branch:
        return branches()
    if struct is UnreadRecord:
        return st.builds(lambda kind, data: UnreadRecord(kind=kind, data=data | {"kind": kind}), unknown, facts)
    return st.deferred(
        lambda: st.builds(
            struct,
            **{name: values_of(kind) for name, kind in _hints(struct).items() if name in _fields(struct)},
        )
    )


def _hints(struct: type[Struct]) -> dict[str, Any]:
    return get_type_hints(struct, include_extras=True)


def _fields(struct: type[Struct]) -> list[str]:
    return [field.name for field in fields(struct)]


@st.composite
def generations(draw: Any) -> Generation:
    """Arrays of one length, the float ones with any bits; weight versions that cover them."""
    bits = draw(st.lists(st.integers(0, 2**32 - 1), max_size=6))
    cut = draw(st.integers(0, len(bits)))
    runs = [(0, cut), (cut, len(bits))]
    return Generation.read(
        {
            "output_ids": np.arange(len(bits), dtype=np.int32),
            "logprobs": np.array(bits, np.uint32).view(np.float32),
            "finish": draw(values_of(get_type_hints(Generation)["finish"])),
            "versions": [VersionSpan(version=draw(integers), start=start, end=end) for start, end in runs],
            "seconds": draw(floats),
            "text": draw(st.none() | texts),
        }
    )


@st.composite
def branches(draw: Any) -> Branch:
    """Arrays that are those of the spans."""
    spans, mask, turns, at = [], [], [], 0
    for turn, (kind, size) in enumerate(
        draw(st.lists(st.tuples(st.sampled_from(["prompt", "generated", "bridge"]), st.integers(0, 3)), max_size=4))
    ):
        sampled = kind == "generated"
        spans.append(Span(kind=kind, start=at, end=at + size, turn=turn if sampled else -1))
        mask += [int(sampled)] * size
        turns += [turn if sampled else -1] * size
        at += size
    return Branch.read(
        {
            "index": draw(integers),
            "reason": draw(texts),
            "spans": spans,
            "input_ids": np.arange(at, dtype=np.int32),
            "loss_mask": np.array(mask, np.int32),
            "logprobs": np.array(draw(st.lists(st.floats(width=32), min_size=at, max_size=at)), np.float32),
            "weight_versions": np.array(mask, np.int32),
            "turn_ids": np.array(turns, np.int32),
        }
    )


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_what_a_struct_says_as_json_is_read_back_as_the_same(struct: type[Struct], data: Any) -> None:
    made = data.draw(structs(struct))
    check(made)
    if not any(isinstance(getattr(made, name), np.ndarray | Generation) for name in _fields(struct)):
        text = made.json()
        assert struct.read_json(text).json() == text
        assert struct.read(made.plain()).plain() == made.plain()


def test_every_kind_of_record_is_drawn() -> None:
    records = {one for one in RecordBase.__subclasses__() if one in STRUCTS} - {UnreadRecord}
    kinds = {get_args(get_type_hints(one)["kind"])[0] for one in records}
    core = {"reset", "generation", "tools", "user", "step", "score", "limit", "failure"}
    assert kinds == core | set(entries("records"))


@pytest.mark.parametrize(
    "record", [one for one in STRUCTS if issubclass(one, RecordBase)], ids=lambda one: one.__name__
)
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_every_record_is_stored_and_read_back_as_the_same(record: Any, data: Any) -> None:
    made = data.draw(structs(record))
    entry = JournalEntry(seq=4, state="A", event="e", dest="B", record=made, at=1.5, seconds=0.25)
    row = codec.entry_row(entry)
    assert codec.entry_row(codec.read_entry(row)) == row
    assert same(codec.read_entry(row), entry)
    assert same(codec.encode_record(made).record, made)


@settings(deadline=None, max_examples=12)
@given(made=structs(Trajectory))
def test_every_trajectory_is_stored_and_read_back_as_the_same(made: Trajectory) -> None:
    written = results.encode_trajectory(made)
    beside_rows = {name: getattr(made, name) for name in _fields(Trajectory) if name not in ("branches", "postings")}
    assert written.trajectory == codec.json_of(beside_rows)
    again = results.with_rows(
        written.trajectory,
        [results.read_branch(row) for row in written.branches],
        [results.read_posting(row) for row in written.postings],
    )
    check(again)
    assert results.encode_trajectory(again) == written
    assert again.json() == made.json()


hostile = (
    st.none()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.binary(max_size=40)
    | texts
    | st.sampled_from(
        ['{"kind": "tools"}', "[]", "{}", "null", "[[1]]", '[["generated", 0]]', '[["image"]]', "NaN", "[" * 2000]
    )
)


@settings(deadline=None, max_examples=examples(100))
@given(data=st.data())
def test_stored_bytes_of_another_form_are_refused_by_the_name_of_their_record(data: Any) -> None:
    written = results.encode_trajectory(data.draw(structs(Trajectory)))
    rows: list[tuple[Any, Any, str]] = [
        (codec.read_entry, codec.entry_row(data.draw(structs(JournalEntry))), r"journal entry .* \(`.*`\)"),
        (lambda row: results.with_rows(row[0], [], []), (written.trajectory,), "the trajectory"),
        (lambda row: read_score(row[0]), (codec.json_of(data.draw(structs(EpisodeScore))),), "the score"),
        *((results.read_branch, row, "branch .*") for row in written.branches),
        *((results.read_posting, row, "posting .*") for row in written.postings),
    ]
    read, row, name = data.draw(st.sampled_from(rows))
    damaged = list(row)
    damaged[data.draw(st.integers(0, len(row) - 1))] = data.draw(hostile)
    refused = ""
    try:
        check(read(damaged))  # a number or a text in the place of another is a record all the same
    except StoreError as error:
        refused = str(error)
    assert not refused or re.match(rf"(?s){name} is damaged \(.+\)", refused)


@pytest.mark.parametrize(
    ("table", "column", "value", "what"),
    [
        ("journal", "payload", "{", r"journal entry 0 \(`reset`\)"),
        ("journal", "kind", "tools", r"journal entry 0 \(`tools`\)"),
        ("journal", "at", "soon", r"journal entry 0 \(`reset`\)"),
        ("branches", "spans", '[["generated", 0]]', "branch 0"),
        ("branches", "logprobs", b"123", "branch 0"),
        ("branches", "input_ids", b"", "branch 0"),
        ("branches", "tokens", 2**50, "branch 0"),
        ("postings", "op", "steal", "posting 0"),
        ("trajectories", "trajectory", "[]", "the trajectory"),
    ],
)
async def test_a_reader_names_the_file_the_episode_and_the_record(
    store: RunStore, maker: Any, table: str, column: str, value: Any, what: str
) -> None:
    await store.plan([maker.task()], 1)
    begun = await store.begin(maker.task(), 0)
    await write_entries(begun, maker.entry(0))
    await write_result(begun, maker.trajectory())
    store.close()
    with closing(sqlite3.connect(store.folder / "run.db")) as connection, connection:
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT min(rowid) FROM {table})", (value,))
    reader = RunStore.open(store.folder, readonly=True)
    with pytest.raises(StoreError, match=rf"run.db: t0/0: {what} is damaged \(.+\); restore the file from a copy"):
        reader.journal("t0/0") if table == "journal" else reader.trajectory("t0/0")
