"""Sections of a spec that plugins add: read at their own place, written, kept without their plugin, and in the generated pages."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from installed_commands import needs_command
from installed_plugins import needs_plugin
from pydantic import ValidationError
from spec_page import spec_page

from engine import plugin
from engine.errors import SpecError, StoreError
from engine.schemas.episode import EpisodeSpec
from engine.schemas.sections import dump, owner_classes, read_stored, used_plugins, written
from engine.spec.load import load_spec
from engine.spec.text.places import homes
from engine.store.header import RunHeader
from engine.train.setup import check_changes

MODULE = '''
from engine.plugin import Plugin, Section
from engine.schemas.base import Seconds
from engine.schemas.sections import SpecSection


class Weather(SpecSection):
    """Weather during a run."""

    wind: int = 3
    """Speed."""
    every: Seconds = 5.0
    name: str = ""
    RENAMED = {"breeze": "wind"}


class Maybe(SpecSection):
    """Perhaps."""

    NULLABLE = True
    size: int


class Paces(SpecSection):
    """Paces."""

    steps_a_day: int = 7
    """Steps a day."""
    rest: str = "sunday"


SECTIONS = (
    Section(keys=("weather",), use="strange_sections:Weather", resumable=("weather",)),
    Section(owner="train", keys=("maybe",), use="strange_sections:Maybe"),
    Section(owner="limits", keys=("steps_a_day", "rest"), use="strange_sections:Paces", inline=True),
)
PLUGIN = Plugin(name="strange", about="Strange", install="pip install strange", sections=SECTIONS)
'''
SPEC = """\
spec: episode/v1
name: demo
model: {path: tiny}
backend: {kind: scripted, replies: [hello]}
tasks: {source: inline, rows: [{id: a}]}
"""
USES = "weather: {wind: 4}\nlimits: {assistant_turns: 2, rest: monday}\ntrain: {steps: 3, maybe: {size: 1}}\n"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the engine's own plugins, and a fresh list of them."""
    plugin.installed.cache_clear()
    homes.cache_clear()
    yield
    plugin.installed.cache_clear()
    homes.cache_clear()


class Strange:
    """The plugin `strange`, whose module may be written anew."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file, self._monkeypatch = folder / "strange_sections.py", monkeypatch
        self._own = [face for face in plugin._faces() if face[2] is None]
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two texts may have the same size and time
        self.installed(MODULE)

    def installed(self, text: str) -> Any:
        """Install it with this text, and return its module."""
        self._file.write_text(text)
        sys.modules.pop("strange_sections", None)
        faces = [*self._own, ("strange", "strange_sections:PLUGIN", "strange 1.2")]
        self._monkeypatch.setattr(plugin, "_faces", lambda: iter(faces))
        plugin.installed.cache_clear()
        homes.cache_clear()
        if "strange" in plugin.installed().plugins:
            sys.modules["strange_sections"].__file__ = str(self._file)
        return sys.modules.get("strange_sections")

    def removed(self) -> None:
        """Uninstall it."""
        self._monkeypatch.setattr(plugin, "_faces", lambda: iter(self._own))
        plugin.installed.cache_clear()
        homes.cache_clear()


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: None) -> Strange:
    return Strange(tmp_path, monkeypatch)


def spec_file(folder: Path, more: str) -> Path:
    file = folder / "spec.yaml"
    file.write_text(SPEC + more)
    return file


def problems(folder: Path, more: str, overrides: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_spec(spec_file(folder, more), overrides)
    first = SPEC.count("\n")
    return [
        f"{each.origin.line - first}:{each.origin.column} {each.rule} {each.message}"
        + (f"; {each.fix}" if each.fix else "")
        for each in caught.value.diagnostics
        if each.origin is not None
    ]


def test_sections_are_read_by_their_own_classes(strange: Strange, tmp_path: Path) -> None:
    spec = load_spec(spec_file(tmp_path, USES)).spec
    module = sys.modules["strange_sections"]
    assert module.Weather.section_of(spec).wind == 4
    assert module.Paces.section_of(spec.limits).rest == "monday"
    assert spec.limits.assistant_turns == 2
    assert spec.train is not None
    assert module.Maybe.section_of(spec.train).size == 1
    assert written(spec) == used_plugins(spec) == {"strange"}
    assert pickle.loads(pickle.dumps(spec)) == spec == spec.model_copy()


def test_a_section_that_was_left_out_has_its_defaults(strange: Strange, tmp_path: Path) -> None:
    spec = load_spec(spec_file(tmp_path, "train: {maybe: null}\n")).spec
    module = sys.modules["strange_sections"]
    assert module.Weather.section_of(spec) is None
    assert module.Weather.or_default(spec).wind == 3
    assert spec.train is not None
    assert module.Maybe.section_of(spec.train) is None
    assert not written(spec)
    assert load_spec(spec_file(tmp_path, "weather: {wind: 3}\ntrain: {maybe: null}\n")).spec == spec


def test_a_key_of_an_inline_section_is_read_and_changed_as_one_of_its_owner(strange: Strange, tmp_path: Path) -> None:
    limits = load_spec(spec_file(tmp_path, USES)).spec.limits
    keys = ("assistant_turns", "rest", "steps_a_day")
    assert [limits.value_of(key) for key in keys] == [2, "monday", 7]
    changed = limits.with_value("assistant_turns", 3).with_value("steps_a_day", 8)
    assert [changed.value_of(key) for key in keys] == [3, "monday", 8]
    assert [limits.value_of(key) for key in keys] == [2, "monday", 7]
    for call in (limits.value_of, lambda key: limits.with_value(key, 1)):
        with pytest.raises(KeyError, match="weather"):
            call("weather")


@needs_plugin("drivers")
def test_a_driver_has_its_part_of_a_limit_in_a_section(strange: Strange, tmp_path: Path) -> None:
    from engine.plugins.drivers.session import of_driver

    strange.installed(MODULE.replace("wind: int", "workers: int"))
    loaded = load_spec(spec_file(tmp_path, "weather: {workers: 9}\n"))
    module = sys.modules["strange_sections"]
    assert module.Weather.section_of(of_driver(loaded, 3, 0).spec).workers == 3
    assert module.Weather.section_of(loaded.spec).workers == 9


def test_the_class_of_a_section_that_is_not_written_is_not_imported(strange: Strange, tmp_path: Path) -> None:
    strange.installed(MODULE.replace("strange_sections:Paces", "no_such_module:Paces"))
    assert load_spec(spec_file(tmp_path, "weather: {wind: 4}\n")).spec.name == "demo"
    assert "strange" in plugin.installed().plugins


def test_errors_of_all_parts_have_their_positions_in_the_order_of_the_file(strange: Strange, tmp_path: Path) -> None:
    more = "weather:\n  wind: much\n  breeze: 2\nlimits: {rest: 5, assistant_turns: 0}\ntrain: {steps: x, maybe: {siz: 1}}\nwether: 1\n"
    assert problems(tmp_path, more) == [
        "2:9 spec.wrong-type `weather.wind` must be a whole number; it is `much`",
        "3:3 spec.unknown-key unknown key `breeze`; did you mean `wind`?",
        '4:16 spec.wrong-type `limits.rest` must be a string; it is 5; quote it: "5"',
        "4:36 spec.bad-value `limits.assistant_turns` must be at least 1; it is 0",
        "5:16 spec.wrong-type `train.steps` must be a whole number; it is `x`",
        "5:19 spec.missing-key `train.maybe` needs `size`; add `size: …`",
        "5:27 spec.unknown-key unknown key `siz`; did you mean `size`?",
        "6:1 spec.unknown-key unknown key `wether`; did you mean `weather`?",
    ]
    assert problems(tmp_path, "weather: windy\n") == ["1:10 spec.wrong-type `weather` must be a mapping; it is `windy`"]
    assert problems(tmp_path, "weather: null\n") == ["1:10 spec.wrong-type `weather` must be a mapping; it is null"]
    assert "`wind` belongs under `weather`" in problems(tmp_path, "wind: 2\n")[0]


def test_text_of_an_override_is_read_as_text_in_a_section(strange: Strange, tmp_path: Path) -> None:
    spec = load_spec(spec_file(tmp_path, USES), ("weather.name=12", "limits.rest=1")).spec
    module = sys.modules["strange_sections"]
    assert (module.Weather.section_of(spec).name, module.Paces.section_of(spec.limits).rest) == ("12", "1")


def test_a_key_of_a_missing_plugin_is_one_error_that_says_what_to_install(
    strange: Strange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"install": ("pip install strange",), "sections": ("weather", "train.maybe", "limits.rest")}
    monkeypatch.setitem(sys.modules["engine.known_plugins"].KNOWN, "strange", known)
    strange.removed()
    assert problems(tmp_path, USES) == [
        "1:1 spec.unknown-key unknown key `weather`; it belongs to the plugin `strange`, which is not installed: pip install strange"
    ]


def test_the_error_of_a_broken_plugin_names_the_cause(strange: Strange, tmp_path: Path) -> None:
    strange.installed(MODULE.replace("strange_sections:Weather", "no_such_module:Weather"))
    assert problems(tmp_path, "weather: {wind: 4}\n") == [
        "1:1 spec.unknown-key unknown key `weather`; it belongs to the plugin `strange`, which cannot be used "
        "(ModuleNotFoundError: No module named 'no_such_module'): pip install strange"
    ]


@needs_command("schema")
@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('keys=("weather",)', 'keys=("name",)', "`name` is a key of the engine's own"),
        ('owner="train"', 'owner="model"', "no keys can be added to `model` of the spec"),
        ('use="strange_sections:Weather"', 'use="strange_sections:SECTIONS"', "is not a SpecSection"),
        ('"rest"), use', "), use", "are not the fields of"),
        ('("maybe",), use', '("weather", "maybe"), use', "is not inline, so it has one key"),
    ],
)
def test_a_plugin_with_sections_that_cannot_be_is_left_out(strange: Strange, old: str, new: str, why: str) -> None:
    from engine.plugins.schema.json_schema import episode_schema

    strange.installed(MODULE.replace(old, new))
    episode_schema()
    assert why in plugin.installed().broken["strange"]


def test_a_stored_spec_is_equal_to_the_one_that_was_read(strange: Strange, tmp_path: Path) -> None:
    spec = load_spec(spec_file(tmp_path, USES)).spec
    document = dump(spec)
    assert document["weather"] == {"wind": 4, "every": 5.0, "name": ""}
    assert document["limits"]["steps_a_day"] == 7
    assert read_stored(document, EpisodeSpec) == spec
    with pytest.raises(ValidationError) as caught:
        read_stored(document | {"weather": {"wind": "x", "other": 1}, "nme": 1}, EpisodeSpec)
    assert [each["loc"] for each in caught.value.errors()] == [("nme",), ("weather", "wind"), ("weather", "other")]


def test_a_run_keeps_the_keys_of_a_plugin_that_is_gone_and_runs_no_episode(strange: Strange, tmp_path: Path) -> None:
    loaded = load_spec(spec_file(tmp_path, USES))
    header = RunHeader.of(loaded)
    assert header.plugins["strange"].model_dump() == {
        "package": "strange",
        "version": "1.2",
        "used": True,
        "sections": ["weather", "train.maybe", "limits.steps_a_day", "limits.rest"],
        "install": "pip install strange",
    }
    assert header.loaded_spec(strict=True).spec == loaded.spec
    strange.removed()
    assert dump(header.loaded_spec().spec) == dump(loaded.spec) | header.spec
    with pytest.raises(
        StoreError, match="its spec uses the plugin `strange`, which is not installed: pip install strange"
    ):
        header.loaded_spec(strict=True)


def test_a_resumed_training_may_change_resumable_keys(strange: Strange, tmp_path: Path) -> None:
    before = load_spec(spec_file(tmp_path, USES)).spec
    after = load_spec(spec_file(tmp_path, USES), ("weather.wind=9",)).spec
    assert check_changes(before, after) == ["weather.wind"]
    other = load_spec(spec_file(tmp_path, USES), ("limits.rest=friday",)).spec
    with pytest.raises(Exception, match=r"cannot change `limits\.rest`"):
        check_changes(before, other)


@needs_command("schema")
def test_the_json_schema_and_the_page_have_the_keys(strange: Strange) -> None:
    from engine.plugins.schema.json_schema import episode_schema

    schema = episode_schema()
    document = {
        "spec": "episode/v1",
        "name": "x",
        "model": {"path": "org/m"},
        "backend": {"kind": "scripted", "replies": ["r"]},
    }
    document |= {"tasks": {"source": "inline", "rows": [{"id": "a"}]}}
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(document | {"weather": {"wind": 1}, "limits": {"rest": "x"}, "train": {"maybe": None}})
    for wrong in (
        {"weather": {"wnd": 1}},
        {"weather": None},
        {"limits": {"steps_a_day": "x"}},
        {"train": {"maybe": {}}},
    ):
        assert not validator.is_valid(document | wrong), wrong
    page = spec_page()
    assert "| `weather` | [mapping](#weather) | `{}` | Weather during a run. |" in page
    assert "| `steps_a_day` | integer | `7` | Steps a day. |" in page
    assert "## `train.maybe`" in page


def test_owners_are_the_classes_that_a_face_may_name() -> None:
    assert {path for path, _ in owner_classes(EpisodeSpec)} == plugin.OWNERS
