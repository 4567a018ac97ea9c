"""Records, actions and limits that plugins add: the union of records is open, and a record of a missing plugin can be shown."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import ValidationError

from engine import known_plugins, plugin
from engine.schemas.base import adapter
from engine.schemas.journal import FailureRecord, RecordBase, StepRecord, UnreadRecord
from engine.schemas.sections import OneOf
from engine.store.codec import read_entry

MODULE = '''
from typing import Literal

import msgspec

from engine.actions.action_facts import ActionFacts
from engine.schemas.limits import Limit
from engine.plugin import Plugin, Section
from engine.schemas.journal import RecordBase
from engine.schemas.message import Message
from engine.schemas.sections import SpecSection


class RainRecord(RecordBase, frozen=True, kw_only=True):
    """It rained."""

    kind: Literal["rain"] = "rain"
    heard: list[Message] = msgspec.field(default_factory=list)
    drops: int = 0


class Rain(SpecSection):
    """Rain."""

    drops: int | None = 5
    """Most drops."""


POUR = ActionFacts(
    use="strange_rain:Pour", does="Let it rain.", events=("wet", "dry"), seconds=lambda spec, state: 1.0
)
DROPS = Limit(
    "drops", "drops", "Drops so far.", "pour", lambda episode: 0, per_use="one", variable="rain.drops", budget="drops"
)
PLUGIN = Plugin(
    name="strange",
    about="Rain",
    install="pip install strange",
    sections=(Section(owner="limits", keys=("drops",), use="strange_rain:Rain", inline=True),),
    actions={"pour": "strange_rain:POUR"},
    limits={"drops": "strange_rain:DROPS"},
    records={"rain": "strange_rain:RainRecord"},
)
'''
IN_A_PROCESS = """
from engine import plugin
own = [face for face in plugin._faces() if face[2] is None]
plugin._faces = lambda: iter([*own, ("strange", "strange_rain:PLUGIN", "strange 1.2")])

from engine.actions.facts import ACTIONS
from engine.limits import COUNTERS, FIELDS, LIMITS, limit_values
from engine.machine.guards import guard_problems
from engine.schemas.journal import JournalEntry, record_kinds
from engine.schemas.limits import LimitsSpec

assert ACTIONS["pour"].events == ("wet", "dry")
drops = next(limit for limit in LIMITS if limit.name == "drops")
assert drops in COUNTERS and "drops" in FIELDS
assert limit_values(LimitsSpec())["drops"] == 5
assert limit_values(LimitsSpec().with_value("drops", 7))["drops"] == 7
assert guard_problems("rain.drops < limits.drops") == []
assert "rain" in record_kinds()
entry = {"seq": 0, "state": "A", "event": "wet", "dest": "B", "at": 1.0, "seconds": 0.5}
read = JournalEntry.read(entry | {"record": {"kind": "rain", "drops": 3}})
assert read.record.drops == 3 and JournalEntry.read_json(read.json()) == read
assert plugin.installed().broken == {}
"""
ROW = (3, "A", "wet", "B", "rain", '{"kind": "rain", "drops": 3}', None, 1.0, 0.5)


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "strange_rain.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    own = [face for face in plugin._faces() if face[2] is None]
    monkeypatch.setattr(plugin, "_faces", lambda: iter([*own, ("strange", "strange_rain:PLUGIN", "strange 1.2")]))
    plugin.installed.cache_clear()
    yield tmp_path
    plugin.installed.cache_clear()
    sys.modules.pop("strange_rain", None)


def test_the_union_of_records_has_those_of_plugins(strange: Path) -> None:
    records: OneOf[RecordBase] = OneOf(point="records", core=(StepRecord, FailureRecord))
    union = adapter(Annotated[RecordBase, records])  # type: ignore[arg-type]
    told = {"kind": "rain", "heard": [{"role": "user", "content": "wet"}], "drops": 2}
    record = union.validate_python(told)
    assert (type(record).__name__, record.drops, record.heard[0].content) == ("RainRecord", 2, "wet")
    assert union.dump_python(record, mode="json")["drops"] == 2
    assert union.validate_json(union.dump_json(record)) == record
    assert {"rain", "step", "failure"} <= records.tags()
    with pytest.raises(ValidationError, match="does not match any of the expected tags"):
        union.validate_python({"kind": "snow"})
    with pytest.raises(ValidationError, match="drops"):
        union.validate_python(told | {"drops": "many"})


def test_actions_limits_and_records_of_a_plugin_are_in_the_tables(tmp_path: Path) -> None:
    (tmp_path / "strange_rain.py").write_text(MODULE)
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_record_of_a_missing_plugin_is_shown_and_keeps_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"install": ("pip install strange",), "records": ("rain",)}
    monkeypatch.setitem(known_plugins.KNOWN, "strange", known)
    entry = read_entry(ROW)
    assert entry.record == UnreadRecord(kind="rain", data={"kind": "rain", "drops": 3})
    why = "it belongs to the plugin `strange`, which is not installed: pip install strange"
    assert entry.record.words() == why
    assert entry.record.said() == ()
    assert read_entry((*ROW[:4], "snow", '{"kind": "snow"}', *ROW[6:])).record.words() == (
        "no installed plugin knows this record"
    )
