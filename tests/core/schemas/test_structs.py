"""`Struct`: a frozen msgspec struct that dataclasses, pickle and Pydantic take as a dataclass."""

from __future__ import annotations

import ast
import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python
from validated_structs import STRUCTS, structs_validated

import engine
from engine.schemas.base import Struct
from engine.schemas.generation import FinishReason, Generation, VersionSpan
from engine.schemas.journal import JournalEntry, LimitRecord
from engine.schemas.message import Message, ToolCall
from engine.schemas.trajectory import Turn
from engine.spec.code.signature import reply_of

ROOT = Path(engine.__file__).parents[1]
STANDARD_LIBRARY_ONLY = (
    "engine/plugin.py",
    "engine/plugins/serve/client.py",
    "engine/processes/",
    "engine/cli/",
    "engine/spec/access.py",
    "engine/spec/text/diagnostic.py",
    "engine/tokens/pixels.py",
)
"""What starts without msgspec: the faces of plugins, the client, the commands' options, sandboxes, workers."""
OTHER_RECORDS = (
    *("engine/tokens/vision.py",),
    *("engine/train/", "engine/validate/"),
)
"""Where frozen dataclasses and NamedTuples are left."""
STOP = FinishReason(type="stop")
CALL = ToolCall(id="call_0_0", name="add", arguments={"a": 1, "b": math.inf})
ASKED = Message(role="assistant", content="Adding.", tool_calls=[CALL])
TURN = Turn(index=0, branch=0, start=3, end=5, finish=STOP, event="answered", rewards={"exact": 1.0})
ENTRY = JournalEntry(
    seq=0, state="A", event="limit", dest="B", record=LimitRecord(limit="turns", value=3), at=1, seconds=0
)


def generation() -> Generation:
    return Generation(
        output_ids=np.array([5, 2], np.int32), logprobs=np.array([-0.5, math.nan], np.float32), finish=STOP
    )


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_a_struct_is_frozen_and_has_the_fields_of_a_dataclass(struct: type[Struct]) -> None:
    assert struct.__struct_config__.frozen
    assert is_dataclass(struct)
    assert [field.name for field in fields(struct)] == list(struct.__struct_fields__)
    with pytest.raises(TypeError, match=r"positional|Missing"):
        struct(*range(len(fields(struct))))
    with pytest.raises(TypeError, match="Unexpected keyword argument 'no_field'"):
        struct(**{field.name: None for field in fields(struct)}, no_field=1)


def test_a_subclass_has_the_fields_of_its_base_and_its_own() -> None:
    class Named(VersionSpan, frozen=True, kw_only=True):
        name: str = ""

    assert [field.name for field in fields(VersionSpan)] == ["version", "start", "end"]
    assert [field.name for field in fields(Named)] == ["version", "start", "end", "name"]
    assert Named.read({"version": 1, "start": 0, "end": 2, "name": "x"}) == Named(version=1, start=0, end=2, name="x")


def test_replace_changes_a_copy() -> None:
    for change in (replace, msgspec.structs.replace):
        longer: Turn = change(TURN, end=9, event="truncated")
        assert (longer.end, longer.event, longer.rewards) == (9, "truncated", {"exact": 1.0})
        with pytest.raises(TypeError, match="last"):
            change(TURN, last=9)
    assert TURN.end == 5


def test_asdict_goes_into_nested_structs() -> None:
    assert asdict(ASKED)["tool_calls"] == [{"id": "call_0_0", "name": "add", "arguments": {"a": 1, "b": math.inf}}]
    assert asdict(TURN)["finish"] == {"type": "stop", "matched": None, "message": None}


def test_no_field_can_be_assigned_or_deleted() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        TURN.end = 9  # type: ignore[misc]
    with pytest.raises(AttributeError):
        TURN.other = 9  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        del TURN.end


def test_copies_and_pickles_are_equal() -> None:
    for struct in (STOP, ASKED, TURN, ENTRY):
        for again in (copy.copy(struct), copy.deepcopy(struct), pickle.loads(pickle.dumps(struct))):
            assert again == struct
            assert type(again) is type(struct)
    again = pickle.loads(pickle.dumps(generation()))
    assert again.logprobs.tobytes() == generation().logprobs.tobytes()
    assert again.output_ids.tolist() == [5, 2]
    deep = copy.deepcopy(ASKED)
    assert deep.tool_calls[0].arguments is not CALL.arguments


def test_another_process_reads_a_pickle_and_answers_with_one() -> None:
    code = (
        "import pickle, sys, dataclasses; turn = pickle.load(sys.stdin.buffer);"
        "sys.stdout.buffer.write(pickle.dumps(dataclasses.replace(turn, end=turn.end + 1)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(TURN), capture_output=True, check=True)
    assert pickle.loads(answer.stdout) == replace(TURN, end=6)


def test_equality_and_hash_are_those_of_the_values() -> None:
    span = VersionSpan(version=0, start=0, end=4)
    assert span == VersionSpan(version=0, start=0, end=4) != VersionSpan(version=1, start=0, end=4)
    assert hash(span) == hash(replace(span))
    assert len({span, replace(span)}) == 1
    assert span != (0, 0, 4)
    with pytest.raises(TypeError, match="unhashable"):
        hash(TURN)
    one = generation()
    assert one == one
    assert one == replace(one)
    with pytest.raises(ValueError, match="ambiguous"):
        assert one == generation()


def test_read_validates_an_instance_once_more() -> None:
    wrong: Any = replace(TURN, end="soon")
    with pytest.raises(ValidationError, match="1 validation error for Turn\nend\n  Input should be a valid integer"):
        Turn.read(wrong)
    nested: Any = replace(ASKED, tool_calls=[replace(CALL, name=None)])
    with pytest.raises(ValidationError, match=r"Message\ntool_calls.0.name\n  Input should be a valid string"):
        Message.read(nested)
    other = STOP
    with pytest.raises(ValidationError, match="Input should be a dictionary or an instance of Turn"):
        Turn.read(other)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (lambda: STOP.read({"type": "stop", "why": 1}), "why\n  Unexpected keyword argument"),
        (lambda: FinishReason.read({}), "type\n  Field required"),
        (lambda: Message.read({"role": "user", "content": "", "tool_calls": 1}), "Input should be a valid list"),
        (
            lambda: Message.read_json('{"role": "user", "content": "", "tool_calls": 1}'),
            "Input should be a valid array",
        ),
        (lambda: Turn.read(TURN.plain() | {"cost": math.nan}), "cost\n  Input should be a finite number"),
    ],
)
def test_errors_have_the_texts_of_a_dataclass(read: Any, text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        read()
    assert text in str(caught.value)


def test_reading_checks_what_building_does_not() -> None:
    uneven = replace(generation(), logprobs=np.zeros(3, np.float32))
    with pytest.raises(ValidationError, match="for Generation\n  Value error, 2 output ids but 3 log-probs"):
        Generation.read(uneven)


def test_a_model_of_a_user_has_a_struct_in_a_field() -> None:
    class Held(BaseModel):
        turns: list[Turn]
        newest: Message | None = None

    held = Held.model_validate({"turns": [TURN.plain()], "newest": ASKED})
    assert held == Held(turns=[TURN], newest=ASKED)
    assert Held.model_validate_json(held.model_dump_json()).turns == [TURN]
    assert held.model_dump()["turns"] == [asdict(TURN)]
    assert (
        Held.model_json_schema()["$defs"]["Turn"]["properties"]["end"]["description"]
        == "One past its last sampled token."
    )
    with pytest.raises(ValidationError, match=r"turns\.0\.end"):
        Held.model_validate({"turns": [TURN.plain() | {"end": "x"}]})


def test_a_log_prob_that_is_nan_stays_nan_in_json() -> None:
    again = Generation.read_json(generation().json())
    assert again.output_ids.tolist() == [5, 2]
    assert math.isnan(again.logprobs[1])


def test_a_union_tells_structs_apart() -> None:
    either: TypeAdapter[VersionSpan | FinishReason] = TypeAdapter(VersionSpan | FinishReason)
    assert either.validate_python({"type": "stop"}) == STOP
    assert either.validate_python(STOP) == STOP
    assert either.dump_python(STOP)["type"] == "stop"


def test_free_form_values_and_tools_may_hold_structs() -> None:
    assert to_jsonable_python({"span": [VersionSpan(version=0, start=0, end=4)]}) == {
        "span": [{"version": 0, "start": 0, "end": 4}]
    }
    assert reply_of({"call": CALL}).content == '{"call":{"id":"call_0_0","name":"add","arguments":{"a":1,"b":null}}}'
    with pytest.raises(TypeError, match="not JSON serializable: object"):
        reply_of([object()])


def test_the_hook_of_the_tests_refuses_an_invalid_struct() -> None:
    invalid: Any = {"version": 0, "start": 0, "end": "four"}
    VersionSpan(**invalid)
    with structs_validated():
        VersionSpan(version=0, start=0, end=4)
        with pytest.raises(ValidationError, match="valid integer"):
            VersionSpan(**invalid)
        with pytest.raises(ValidationError, match="valid integer"):
            msgspec.structs.replace(VersionSpan(version=0, start=0, end=4), **invalid)
        with pytest.raises(AssertionError, match=r"validation changes \['value'\]"):
            LimitRecord(limit="turns", value=3)  # an int, where a float stands


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """The classes of the core, each with its file."""
    for folder in ("engine", "schemas"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(("engine/plugins/", "engine/schemas/", "engine/environments/")):
                yield from (
                    (name, node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
                )


def is_other_record(node: ast.ClassDef) -> bool:
    made = [ast.unparse(part) for part in (*node.bases, *node.decorator_list)]
    return any(part.endswith("NamedTuple") or ("dataclass(" in part and "frozen=True" in part) for part in made)


def test_records_of_the_core_are_structs() -> None:
    others = {f"{name}:{node.name}" for name, node in classes() if is_other_record(node)}
    assert {place for place in others if not place.startswith((*STANDARD_LIBRARY_ONLY, *OTHER_RECORDS))} == set()


def test_every_struct_says_that_it_is_frozen_and_a_public_one_that_it_is_keyword_only() -> None:
    for name, node in classes():
        if any(isinstance(base, ast.Name) and base.id in ("Struct", "RecordBase", "Node") for base in node.bases):
            options = {option.arg for option in node.keywords}
            assert options >= ({"frozen", "kw_only"} if name.startswith("schemas/") else {"frozen"}), node.name
