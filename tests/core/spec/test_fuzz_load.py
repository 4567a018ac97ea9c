"""Whatever a file holds, it is read or refused with a place and a reason: never a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import plugin
from engine.cli.validate.command import FORMATS, written
from engine.cli.validate.report import as_text
from engine.schemas.episode import EpisodeSpec
from engine.schemas.train import TrainSpec
from engine.spec.load import read_spec
from engine.validate.examine import Options, examine
from engine.validate.report import pack, unpack

QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
SPEC = """\
spec: episode/v1
name: demo
model: {path: org/m}
tasks: {source: inline, rows: [{question: "What is 2 + 2?"}]}
prompt: [{role: user, content: "{{question}}"}]
machine:
  preset: tools_and_user
  transitions:
    - {trigger: answered, source: GENERATING, dest: DONE, conditions: "turns.user > 2"}
limits: {assistant_turns: 4, user_turns: 3, episode_seconds: 10m}
rewards: {reassign: [{at: DONE, turn: first, to: last, share: 0.5, when: "turns.assistant > 1"}]}
rollout: {samples_per_task: 4}
train: {loss: {kind: grpo}, eval: {metric: reward, sampling: {temperature: 0}}}
"""
PIECES = [
    *(
        ": ",
        "- ",
        "? ",
        "{",
        "}",
        "[",
        "]",
        ",",
        "\n",
        "\n  ",
        "\n    ",
        "&a ",
        "*a",
        "*b",
        "!!str ",
        "!!int ",
        "! ",
        "!x ",
    ),
    *(
        "|\n",
        ">\n",
        '"',
        "'",
        "#",
        "---\n",
        "...\n",
        "%YAML 1.1\n",
        "<<: ",
        "~",
        "true",
        "1e400",
        ".nan",
        "-.inf",
        "0x1f",
    ),
    *(
        "${A}",
        "${A:b}",
        "${",
        "$${",
        "{{q}}",
        "{{",
        "\t",
        "\ufeff",
        "\x85",
        "\u2028",
        "\x00",
        "é",
        "日本",
        "\\ud800",
        "9" * 30,
    ),
    *(
        "spec",
        "episode/v1",
        "machine",
        "tasks",
        "extends",
        "train",
        "limits",
        "conditions",
        "with",
        "use",
        "os:path",
        "a:b",
    ),
]
soup = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=30).map("".join)


def keys(model: type) -> list[str]:
    """A contract's keys, as a document writes them."""
    return [info.alias or name for name, info in model.model_fields.items()]  # type: ignore[attr-defined]


names = st.sampled_from(
    [*keys(EpisodeSpec), *keys(TrainSpec), "kind", "use", "with", "prompt", "rows", "path"]
) | st.text(max_size=3)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["*", "GENERATING", "turns.user <", "json:loads", "5s", "pass@3", "${HOME}", "{{x}}", 10**30, -(10**400)]
    )
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names | scalars, inner, max_size=5),
    max_leaves=12,
)


def check(text: str, folder: Path) -> None:
    file = folder / "s.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    report = examine(file, Options(cost=True, imports=True))
    without_code = examine(file, Options(cost=True))
    assert unpack(str(file), pack(without_code)) == without_code
    assert without_code.status in (0, report.status)
    assert all(item.origin is not None for item in report.diagnostics)
    if report.status == 0:
        assert read_spec(file)[0] is not None
    for said in (
        as_text([report], worst=True),
        *(written(form, [report]) for form in (*FORMATS, *plugin.entries("findings_formats"))),
    ):
        said.encode("utf-8")


def edited(at: int, cut: int, piece: str) -> str:
    at %= len(SPEC)
    return SPEC[:at] + piece + SPEC[at + cut :]


def with_value(path: list[int], value: Any) -> str:
    """The spec with one value of it, chosen by numbers, exchanged."""
    document = yaml.safe_load(SPEC)
    place: Any = document
    while True:
        key = list(place)[path[0] % len(place)] if isinstance(place, dict) else path[0] % len(place)
        if len(path) == 1 or not isinstance(place[key], dict | list) or not place[key]:
            place[key] = value
            return yaml.safe_dump(document, allow_unicode=False, sort_keys=False)
        place, path = place[key], path[1:]


edits = st.builds(edited, st.integers(0, 2000), st.integers(0, 12), st.sampled_from(PIECES) | st.text(max_size=3))
exchanges = st.builds(with_value, st.lists(st.integers(0, 40), min_size=1, max_size=5), values)
documents = st.dictionaries(names, values, max_size=6).map(lambda found: yaml.safe_dump(found, allow_unicode=False))
texts = soup | edits | exchanges | documents | st.text()


@settings(max_examples=examples(100), deadline=None, suppress_health_check=QUIET)
@given(texts)
def test_any_text_is_read_or_refused(tmp_path: Path, text: str) -> None:
    check(text, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=500, deadline=None, suppress_health_check=QUIET)
@given(texts)
def test_very_many_texts_are_read_or_refused(tmp_path: Path, text: str) -> None:
    check(text, tmp_path)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=QUIET)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "s.yaml"
    file.write_bytes(data)
    report = examine(file)
    assert report.status != 0


@settings(max_examples=examples(100), deadline=None, suppress_health_check=QUIET)
@given(st.lists(soup | st.builds("{}={}".format, names, soup) | st.just("limits.user_turns=2"), max_size=3))
def test_any_override_is_taken_or_refused(tmp_path: Path, overrides: list[str]) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SPEC)
    for item in examine(file, Options(overrides)).diagnostics:
        assert item.origin is not None
        assert str(item)
