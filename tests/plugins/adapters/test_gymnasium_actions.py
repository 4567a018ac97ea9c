"""Action spaces of Gymnasium of any form work, or are refused before the run with the part that cannot be written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from adapters_kit import earned, run_spec, shown, spec_of
from typer.testing import CliRunner

from engine.cli.main import app
from engine.schemas.environment import Task

gymnasium = pytest.importorskip("gymnasium", reason="needs the extra `gymnasium`")
pytestmark = pytest.mark.adapters

HERE = Path(__file__).parent
WRITTEN = ["discrete", "shifted", "multi", "grid", "binary", "box", "number", "unbounded", "pixels", "text", "tuple", "dict", "nested"]  # fmt: skip
REFUSED = {"sequence": "Sequence", "graph": "Graph", "hidden": "OneOf at ['a'][1]"}


@pytest.fixture
def panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build the adapter of an environment with a space."""
    from engine.plugins.adapters.gymnasium import GymnasiumEnvironment

    monkeypatch.syspath_prepend(str(HERE))

    def make(name: str, **options: Any) -> Any:
        env = GymnasiumEnvironment(f"Panel-{name}-v0", modules=["gym_envs"], **options)
        env.reset(Task(id="a", index=0, fields={}), 0)
        return env

    return make


def said(env: Any, reply: str) -> str:
    view: Any = type("View", (), {"reply": reply, "facts": {}})()
    (message,) = env.step(view).messages
    return str(message.text)


@pytest.mark.parametrize("name", WRITTEN)
def test_an_element_that_is_written_is_the_action(panel: Any, name: str) -> None:
    """Twenty samples of each space: the environment gets the element that the text names, with the types of its space."""
    from engine.plugins.adapters.gymnasium import read_action

    env = panel(name)
    space = env._env.action_space
    space.seed(3)
    for _ in range(20):
        wanted = space.sample()
        text = wanted if name == "text" else repr(plain(wanted))
        got = read_action(text, space, gymnasium.spaces)
        assert space.contains(got)
        assert repr(plain(got)) == repr(plain(wanted))
        if text.strip() == text and "<" not in text:
            assert said(env, f"<answer>{text}</answer>") == repr(got)


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("name", WRITTEN)
def test_the_example_in_a_message_is_an_action(panel: Any, name: str) -> None:
    env = panel(name)
    told = said(env, "<answer>an answer that is too long, and no literal</answer>")
    assert told.startswith("`an answer that is too long, and no literal` is no action. Write an element of ")
    example = told.partition(", such as ")[2].removesuffix(".")
    example = example.strip("'") if name == "text" else example
    assert "is no action" not in said(env, f"<answer>{example}</answer>")
    assert (
        said(env, "<answer>]</answer>") == told.replace("an answer that is too long, and no literal", "]")
        or name == "text"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("discrete", "3"),
        ("discrete", "1.0"),
        ("shifted", "2"),
        ("multi", "[0.5, 1]"),
        ("multi", "[1]"),
        ("binary", "[1, 0, 2]"),
        ("binary", "[True, 0.9, 0]"),
        ("pixels", "[[0, 1], [2, 256]]"),
        ("pixels", "[[0, 1], [2, -1]]"),
        ("box", "[0.0, 1e999]"),
        ("unbounded", "[0.0, 1e999]"),
        ("box", "[[0.0], [1.0, 2.0]]"),
        ("box", "['a', 'b']"),
        ("tuple", "(1,)"),
        ("tuple", "1"),
        ("dict", "{'move': 1}"),
        ("dict", "{'move': 1, 'speed': [0.5], 'say': 'hi', 'jump': 1}"),
        ("dict", "[1, 2]"),
        ("nested", "{'arm': ([1, 0], {'grip': 2})}"),
        ("box", "__import__('os').getcwd()"),
    ],
)
def test_what_is_no_element_is_never_rounded_into_one(panel: Any, name: str, text: str) -> None:
    assert said(panel(name), f"<answer>{text}</answer>").startswith(f"`{text}` is no action. ")


def test_lists_and_tuples_are_the_same(panel: Any) -> None:
    assert said(panel("tuple"), "[1, (0.5, -1)]") == said(panel("tuple"), "(1, [0.5, -1])")


def test_names_of_elements(panel: Any) -> None:
    """In order for a discrete space, from its first element; by name for any space."""
    assert said(panel("shifted", actions=["left", "stay", "right"]), "Left") == "-1"
    env = panel("nested", actions={"grip": {"arm": [[1, 1], {"grip": 1}]}})
    assert "array([1, 1], dtype=int8)" in said(env, "grip")
    assert said(panel("sequence", actions={"twice": (0, 1)}), "twice") == "(0, 1)"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        *((name, {}, f"cannot be written: {part}; name some") for name, part in REFUSED.items()),
        ("discrete", {"actions": ["a", "b", "c", "d"]}, "`actions`: `d` is 3, which is not in Discrete(3)"),
        ("box", {"actions": {"far": [0.0, 2.0]}}, "`actions`: `far` is [0.0, 2.0], which is not in Box"),
        ("discrete", {"show": "rgb_array"}, "`show: rgb_array`: `Panel-discrete-v0` renders nothing"),
    ],
)
def test_validate_refuses_before_the_run(
    tmp_path: Path, tiny_tokenizer_dir: Path, name: str, options: dict[str, Any], words: str
) -> None:
    """`engine validate --import` builds the environment once, and says what cannot be done."""
    shutil.copy(HERE / "gym_envs.py", tmp_path)
    environment = {"adapter": "gymnasium", "use": f"Panel-{name}-v0", "with": {"modules": ["gym_envs"], **options}}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec_of(tiny_tokenizer_dir, environment, [{"id": "a"}], ["0"])))
    result = CliRunner().invoke(app, ["validate", "--import", "--format", "json", str(tmp_path / "spec.yaml")])
    assert result.exit_code == 1
    (found,) = [
        line for line in json.loads(result.output)["specs"][0]["diagnostics"] if line["rule"] == "code.construct"
    ]
    assert words in found["message"]


def test_a_run_with_a_structured_action(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    shutil.copy(HERE / "gym_envs.py", tmp_path)
    environment = {"adapter": "gymnasium", "use": "Panel-dict-v0", "with": {"modules": ["gym_envs"], "prompt": ""}}
    replies = ["I do <answer>{'move': 1, 'speed': [0.5], 'say': 'hi'}</answer>", "<answer>{'move': 9}</answer>"]
    document = spec_of(tiny_tokenizer_dir, environment, [{"id": "a"}], replies, limits={"assistant_turns": 2})
    (episode,) = run_spec(tmp_path, document).values()
    told = shown(episode)
    assert told[:2] == ["ready", "{'move': 1, 'speed': array([0.5], dtype=float32), 'say': 'hi'}"]
    assert told[2].startswith("`{'move': 9}` is no action. Write an element of Dict(")
    assert earned(episode) == [1.0, 0.0]
    assert episode.facts["invalid_actions"] == 1
