"""A spec that extends others: what is merged, what is replaced, and what is refused."""

from __future__ import annotations

import pytest
from installed_plugins import needs_plugin
from spec_files import GOOD, errors, load, write

from engine.plugins.local.spec import LocalBackendSpec
from engine.schemas.backend import ScriptedBackendSpec
from engine.spec.resolve import MAX_EXTENDS
from engine.spec.text.diagnostic import Origin

pytestmark = pytest.mark.usefixtures("in_folder")


def test_extends_merges_mappings_and_replaces_the_rest() -> None:
    write("base.yaml", GOOD + "limits: {user_turns: 2, tool_calls: 4}\nsampling: {stop: [a, b]}\nuser: {use: a:b}\n")
    loaded = load("extends: base.yaml\nname: child\nlimits: {user_turns: 5}\nsampling: {stop: [c]}\nuser: null\n")
    assert (loaded.spec.name, loaded.spec.user) == ("child", None)
    assert (loaded.spec.limits.user_turns, loaded.spec.limits.tool_calls) == (5, 4)
    assert loaded.spec.sampling.stop == ["c"]
    assert loaded.origin(("limits", "user_turns")) == Origin("s.yaml", 3, 22)
    assert loaded.origin(("limits", "tool_calls")) == Origin("base.yaml", 5, 37, "extends base.yaml")
    assert "extends" not in loaded.data


def test_of_several_bases_later_ones_win() -> None:
    write("one.yaml", GOOD + "limits: {user_turns: 1, tool_calls: 1}\n")
    write("two.yaml", "limits: {user_turns: 2}\n")
    loaded = load("extends: [one.yaml, two.yaml]\n")
    assert (loaded.spec.limits.user_turns, loaded.spec.limits.tool_calls) == (2, 1)


def test_an_error_in_a_base_names_both_files() -> None:
    write("lib/base.yaml", GOOD + "limits: {usr_turns: 2}\n")
    write("lib/middle.yaml", "extends: base.yaml\n")
    assert errors(write("s.yaml", "extends: lib/middle.yaml\n")) == [
        "lib/base.yaml:5:10 (extends base.yaml): error[spec.unknown-key] unknown key `usr_turns`; did you mean `user_turns`?"
    ]


def test_a_circle_is_named() -> None:
    write("a.yaml", "extends: sub/b.yaml\n")
    write("sub/b.yaml", "extends: ../c.yaml\n")
    write("c.yaml", "extends: ./a.yaml\n")
    assert errors("a.yaml") == [
        "c.yaml:1:10 (extends ../c.yaml): error[spec.extends-cycle] `extends` goes in a circle: "
        "a.yaml -> sub/b.yaml -> c.yaml -> a.yaml; remove one of them"
    ]


def test_a_diamond_is_no_circle() -> None:
    write("root.yaml", GOOD)
    write("left.yaml", "extends: root.yaml\ndescription: left\n")
    write("right.yaml", "extends: root.yaml\n")
    assert load("extends: [left.yaml, right.yaml]\n").spec.description == "left"


def test_a_base_that_is_not_there() -> None:
    write("base.yaml", GOOD)
    assert errors(write("s.yaml", "extends: [bas.yaml]\n")) == [
        "s.yaml:1:11: error[spec.extends] `bas.yaml` cannot be read: No such file or directory; did you mean `base.yaml`?"
    ]


@pytest.mark.parametrize("value", ["5", "{a: b}", "[[a]]", "''", "null"])
def test_extends_takes_names_of_files(value: str) -> None:
    (line,) = errors(write("s.yaml", f"extends: {value}\n"))
    assert (
        "error[spec.extends] `extends` takes a file's name, the name of published settings, or a list of them" in line
    )


def test_a_chain_that_is_too_long_is_refused() -> None:
    for index in range(MAX_EXTENDS + 2):
        write(f"f{index}.yaml", f"extends: f{index + 1}.yaml\n")
    (line,) = errors("f0.yaml")
    assert f"more than {MAX_EXTENDS} files extend each other" in line


@needs_plugin("sglang")
@pytest.mark.parametrize(
    ("below", "own"), [("urls: [http://a:1]", "launch: {gpus: 2}"), ("launch: {gpus: 2}", "urls: [http://a:1]")]
)
def test_servers_of_one_kind_replace_those_of_the_base(below: str, own: str) -> None:
    """A spec gives `urls` or `launch`, and a spec that extends one of the other kind could not say so otherwise."""
    write("base.yaml", f"{GOOD}\nbackend: {{kind: sglang, timeout: 5s, {below}}}\n")
    backend = load(f"extends: base.yaml\nbackend: {{{own}}}\n").spec.backend
    assert (backend.urls, backend.launch is None, backend.timeout) == (  # type: ignore[attr-defined]
        ([], False, 5.0) if own.startswith("launch") else (["http://a:1"], True, 5.0)
    )


def test_another_kind_of_backend_replaces_the_bases_whole() -> None:
    write("base.yaml", GOOD + "backend: {kind: local, max_batch: 8}\n")
    loaded = load("extends: base.yaml\nbackend: {kind: scripted, replies: [a]}\n")
    assert loaded.spec.backend == ScriptedBackendSpec(replies=["a"])
    same = load("extends: base.yaml\nbackend: {kind: local, device: cpu}\n")
    assert same.spec.backend == LocalBackendSpec(device="cpu", max_batch=8)


def test_a_preset_by_name_is_extended_and_replaces() -> None:
    write("base.yaml", GOOD + "machine: tools\n")
    loaded = load("extends: base.yaml\nmachine: {states: {EXTRA: {action: step}}}\n")
    assert loaded.spec.machine.preset == "tools"
    assert list(loaded.spec.machine.states) == ["EXTRA"]
    write("base.yaml", GOOD + "machine: {preset: tools, states: {EXTRA: {action: step}}}\n")
    assert load("extends: base.yaml\nmachine: single_turn\n").spec.machine.states == {}
