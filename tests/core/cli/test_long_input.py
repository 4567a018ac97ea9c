"""A long input is named by its place, and is not repeated: on the command line, in files, and to a model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import engine_here
from installed_commands import installed
from slow_cases import slow_but, slow_but_each

from engine.errors import GuardError
from engine.machine.guards import Guard
from engine.terminal import MAX_LINE, brief
from engine.tokens.toolcalls import FORMATS

ROOT = Path(__file__).parents[3]
SPEC = """\
spec: episode/v1
name: long
tasks: {source: jsonl, path: tasks.jsonl}
prompt: [{role: user, content: "Hm?"}]
model: {path: tiny-qwen2}
machine: single_turn
backend: {kind: scripted, replies: [Yes.]}
"""
TASKS = '{"id": "a", "q": 1}\n'
LONG = {
    "word": "x" * 6000,
    "number": "9" * 6000,
    "words": "ab cd " * 1000,
    "quotes": 'it\'s `so` "x" ' * 430,
    "expression": "turns.user + " * 460 + "nowhere.at.all",
    "list": "[" + ", ".join(["y" * 2000] * 3) + "]",
    "mapping": "{" + "z" * 3000 + ": " + "w" * 3000 + "}",
}


def keys() -> list[str]:
    """The keys of a spec that --set may name, with those of mappings in it."""
    schema = json.loads((ROOT / "schemas" / "json" / "episode.schema.json").read_text())
    found: set[str] = set()

    def walk(node: dict[str, Any], path: list[str]) -> None:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        for option in (*node.get("anyOf", ()), *node.get("oneOf", ())):
            walk(option, path)
        for name, inner in node.get("properties", {}).items():
            found.add(".".join([*path, name]))
            if len(path) < 2:
                walk(inner, [*path, name])

    walk(schema, [])
    return sorted(found)


def short_lines(text: str) -> None:
    longest = max(text.splitlines(), key=len, default="")
    assert len(longest) <= MAX_LINE, longest[:400]


def has_no_long_part(text: str) -> None:
    """No input is repeated for more than a tenth."""
    short_lines(text)
    assert not re.search(
        r"x{600}|(turns.user, ){55}|9{600}|(ab cd ){100}|(it's ){100}|(turns.user \+ ){46}|y{600}|z{600}|w{600}", text
    )
    assert len(text) < 12 * MAX_LINE


def fewer(cases: Sequence[Any]) -> list[Any]:
    """All but each sixth are exhaustive: one function cuts the values of all keys."""
    return [
        case
        if at % 6 == 0 or not case.marks
        else pytest.param(*case.values, marks=[*case.marks, pytest.mark.exhaustive])
        for at, case in enumerate(cases)
    ]


@pytest.mark.parametrize("key", fewer(slow_but_each(200, keys())))
def test_a_long_value_of_any_key_is_cut_in_what_is_said_of_it(key: str, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "tasks.jsonl").write_text(TASKS)
    number, values = len(key), [*LONG.values()]
    for value in (values[number % len(LONG)], values[(number + 3) % len(LONG)]):
        code, out, err = engine_here("validate", "spec.yaml", "--set", f"{key}={value}", cwd=tmp_path)
        has_no_long_part(out + err)
        if code:
            assert f"--set {key}=" in out + err or key.partition(".")[0] in out + err


def test_the_place_of_a_long_value_in_a_file_is_right(tmp_path: Path) -> None:
    text = SPEC + f"limits: {{user_turns: {LONG['number']}, tool_calls: {LONG['word']}}}\n"
    (tmp_path / "spec.yaml").write_text(text)
    code, out, err = engine_here("validate", "spec.yaml", cwd=tmp_path)
    assert code == 1
    has_no_long_part(out + err)
    for value in ("number", "word"):
        assert f"spec.yaml:8:{text.splitlines()[7].index(LONG[value]) + 1}: error" in out + err


def test_the_place_in_a_long_expression_has_its_context() -> None:
    source = "turns.user + " * 300 + "§ nowhere"
    with pytest.raises(GuardError) as failed:
        Guard(source)
    assert f"column {source.index('§') + 1}: " in str(failed.value)
    assert "turns.user + § nowhere" in str(failed.value)
    assert len(str(failed.value)) < 400


def test_the_place_in_a_long_filter_has_its_context(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "tasks.jsonl").write_text(TASKS)
    assert engine_here("run", "spec.yaml", cwd=tmp_path)[0] == 0
    long = f"[{', '.join(['turns.user'] * 150)}, nowhere.at, {', '.join(['turns.user'] * 150)}].size() > 1"
    for command in installed([("show", "latest"), ("export", "latest", "--out", "rows.jsonl")]):
        code, out, err = engine_here(*command, "--filter", long, cwd=tmp_path)
        assert code
        assert f"column {long.index('nowhere') + 1}: " in out + err
        assert "turns.user, nowhere.at, turns.user" in out + err
        has_no_long_part(out + err)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "spec.yaml", "--tasks", LONG["number"]),
        ("run", "spec.yaml", "--limit", LONG["number"]),
        ("run", "spec.yaml", f"--{LONG['word']}"),
        ("run", LONG["word"]),
        (LONG["word"],),
        ("run", "spec.yaml", "--set", LONG["word"]),
        ("run", "spec.yaml", "--set", f"{LONG['word']}=1"),
        ("run", "spec.yaml", "--set", f"backend.replies={LONG['word']}"),
        ("validate", "spec.yaml", "--trainer", LONG["word"]),
        ("validate", "spec.yaml", "--budget", LONG["word"]),
        ("show", LONG["word"]),
        ("explain", LONG["word"]),
        ("export", "runs/a", "--filter", LONG["expression"]),
        ("export", "runs/a", "--format", LONG["word"]),
        ("template", LONG["word"]),
        ("eval", LONG["word"]),
        ("test", LONG["words"]),
        ("compare", LONG["word"], LONG["number"]),
        ("serve", LONG["word"]),
        ("new", LONG["word"], "--kind", LONG["word"]),
    ],
    ids=lambda arguments: " ".join(word[:16] for word in arguments),
)
def test_a_long_argument_of_a_command_is_cut(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "tasks.jsonl").write_text(TASKS)
    code, out, err = engine_here(*arguments, cwd=tmp_path)
    assert code
    has_no_long_part((out + err).replace("\n", ""))


@pytest.mark.parametrize("value", slow_but(["word", "number", "words", "quotes"], "quotes"))
def test_a_long_line_of_a_file_beside_the_spec_is_cut(value: str, tmp_path: Path) -> None:
    for name, text in {
        "replies.yaml": f"- {{text: Yes., {LONG[value].replace('`', '')!r}: 1}}\n- {{finish: {json.dumps(LONG[value])}}}\n",
        "tasks.jsonl": f'{{"id": "a", "q": {LONG[value]}}}\n',
        "spec.scenarios.yaml": f"scenarios:\n  - {{name: {json.dumps(LONG[value])}, replies: 3}}\n",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "spec.yaml").write_text(SPEC)
    for arguments in (
        ("validate", "spec.yaml", "--set", "backend.replies=replies.yaml"),
        ("run", "spec.yaml", "--set", "backend.replies=replies.yaml"),
        ("validate", "spec.yaml", "--set", "limits.user_turns=2"),
        ("run", "spec.yaml", "--set", "limits.user_turns=2"),
        ("test", "spec.yaml"),
    ):
        code, out, err = engine_here(*arguments, cwd=tmp_path)
        assert code, arguments
        has_no_long_part(out + err)


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_is_not_told_its_long_call_again(name: str) -> None:
    opening, closing = FORMATS[name].marks
    for body in (LONG["word"], f"{LONG['word']}(", f"f({LONG['word']}=", f"[f({LONG['word']})]", f'{{"{LONG["word"]}'):
        (attempt,) = FORMATS[name]().parse(f"{opening}{body}{closing}", [], "call").attempts
        assert len(attempt.problem) < 400  # type: ignore[union-attr]


def test_a_message_keeps_what_is_short_and_the_ends_of_what_is_long() -> None:
    assert brief("unknown key `patience`; write timeout") == "unknown key `patience`; write timeout"
    cut = brief(f"spec.yaml:3:5: `{'a' * 3000}END` is unknown; write b")
    assert cut.startswith("spec.yaml:3:5: `aaaa")
    assert cut.endswith("aEND` is unknown; write b")
    assert "(3,003 characters)" in cut
    assert len(cut) < 300
    assert brief("\n".join(["a" * 100] * 50)) == "\n".join(["a" * 100] * 50)
