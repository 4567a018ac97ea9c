"""Rows whose prompt is too long for a turn are refused, or left out and counted, before any episode burns on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog

from engine.errors import SpecError
from engine.runner.source import fitting_tasks
from engine.spec.code.entry import load_entry
from engine.spec.code.signature import shape_of
from engine.spec.load import load_spec
from engine.spec.rows.mix import TaskList
from engine.spec.tasks import load_tasks
from engine.tokens.loading import load_format
from engine.validate import check_spec

WORDS = [3, 400, 5, 90, 401]
PLAIN: dict[str, Any] = {"tools": None, "user": None, "machine": "single_turn"}


def kept(path: Path) -> tuple[TaskList, str]:
    loaded = load_spec(path)
    with structlog.testing.capture_logs() as logs:
        found = fitting_tasks(load_tasks(loaded), loaded, load_format(loaded.spec.model, loaded.base))
    return found, "".join(log["reason"] for log in logs)


@pytest.fixture
def spec(make_spec: Any) -> Any:
    rows = [
        {"id": f"r{at}", "q": "no " * words, "chat": [{"role": "user", "content": "no " * words}]}
        for at, words in enumerate(WORDS)
    ]

    def make(overlong: str | None, limits: dict[str, int], **changes: Any) -> Path:
        tasks = {"source": "inline", "rows": rows, "id": "id", "overlong": overlong} | changes.pop("tasks", {})
        given = PLAIN | {"prompt": [{"role": "user", "content": "{{q}}"}]} | changes
        made: Path = make_spec(["42"] * 5, tasks=tasks, limits=limits, **given)
        return made

    return make


@pytest.mark.parametrize("prompt", [[{"role": "user", "content": "{{q}}"}], {"field": "chat"}])
def test_dropped_rows_are_counted_and_the_others_keep_their_index(spec: Any, prompt: Any) -> None:
    tasks, told = kept(spec("drop", {"episode_tokens": 300, "turn_tokens": 32}, prompt=prompt))
    assert [(task.id, task.index) for task in tasks] == [("r0", 0), ("r2", 2), ("r3", 3)]
    assert told.startswith(
        "2 of 5 tasks have a prompt that leaves no room for a turn of 32 within 300 tokens; the first is row 2 with "
    )


CLASSES = """
from engine.schemas.environment import Reset
from engine.schemas.message import Message


class Adding:
    def __init__(self, words):
        self.words = words

    def reset(self, task, seed):
        if "no " * 5 == task.fields["q"]:
            raise ValueError("fails by itself")
        return Reset(messages=[Message(role="user", content=task.fields["q"] * self.words)])


class Waiting(Adding):
    async def reset(self, task, seed):
        raise AssertionError("nothing that waits is called")
"""


@pytest.mark.parametrize(
    ("changes", "kept_ids"),
    [
        ({"tasks": {"preset": {"name": "verl", "prompt_key": "chat"}}}, "r0 r2 r3"),
        ({"environment": {"use": "adding:Adding", "effects": "pure", "with": {"words": 4}}}, "r0 r2"),
        ({"environment": {"use": "adding:Adding", "with": {"words": 4}}}, "r0 r1 r2 r3 r4"),
        ({"environment": {"use": "adding:Waiting", "effects": "pure", "with": {"words": 4}}}, "r0 r1 r2 r3 r4"),
    ],
    ids=["verl's rows", "pure", "replayable", "async"],
)
def test_the_messages_of_a_pure_environment_count(
    spec: Any, tmp_path: Path, changes: dict[str, Any], kept_ids: str
) -> None:
    """A reset that raises fails its own episode."""
    (tmp_path / "adding.py").write_text(CLASSES)
    path = spec("drop", {"episode_tokens": 300, "turn_tokens": 32}, prompt=[], **changes)
    assert " ".join(task.id for task in kept(path)[0]) == kept_ids


def test_validate_leaves_long_prompts_to_the_run_that_drops_them(spec: Any) -> None:
    """The rule reads the same rows; without `drop` it refuses them."""
    for overlong, ids in (("drop", []), ("error", ["limits.prompt-too-long"]), (None, ["limits.prompt-too-long"])):
        loaded = load_spec(spec(overlong, {"episode_tokens": 300, "turn_tokens": 32}))
        assert [item.rule for item in check_spec(loaded) if item.severity == "error"] == ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prompt": [], "environment": {"use": "code_for_tests:Board"}},
            "what the environment's `reset` shows is not counted",
        ),
        ({"prompt": [], "environment": {"use": "code_for_tests:Board", "effects": "pure"}}, None),
        ({"environment": {"use": "code_for_tests:Board"}}, None),
    ],
    ids=["reset alone", "pure", "a prompt beside it"],
)
def test_validate_says_where_nothing_is_counted(spec: Any, changes: dict[str, Any], message: str | None) -> None:
    loaded = load_spec(spec("drop", {"episode_tokens": 300, "turn_tokens": 32}, **changes))
    found = [item.message for item in check_spec(loaded) if item.rule == "tasks.no-effect"]
    assert len(found) == (message is not None)
    assert all(str(message) in text for text in found)


def test_the_border_is_exact(spec: Any) -> None:
    loaded = load_spec(spec(None, {}))
    form = load_format(loaded.spec.model, loaded.base)
    length = len(form.render([{"role": "user", "content": "no " * 400}]))
    for more, count in ((0, 4), (-1, 3)):
        limits = {"episode_tokens": length + 32 + more, "turn_tokens": 32}
        assert len(kept(spec("drop", limits))[0]) == count


def test_the_schemas_of_tools_count(spec: Any) -> None:
    limits = {"episode_tokens": 300, "turn_tokens": 32}
    tools = [{"use": f"code_for_tests:{tool}"} for tool in ("add", "wait", "explode", "hang", "pay")]
    assert len(kept(spec("drop", limits | {"episode_tokens": 2_000}, tools=tools, machine="tools"))[0]) == 5
    with pytest.raises(SpecError, match="5 of 5 tasks"):
        kept(spec("drop", limits, tools=tools, machine="tools"))


def test_an_error_names_the_first_row(spec: Any) -> None:
    with pytest.raises(SpecError) as caught:
        kept(spec("error", {"episode_tokens": 300, "turn_tokens": 32}))
    assert "error[tasks.overlong] 2 of 5 tasks have a prompt that leaves no room" in str(caught.value)
    assert str(caught.value).endswith("set `tasks.overlong: drop`, or allow more tokens")


def test_nothing_is_counted_where_nothing_is_asked(spec: Any) -> None:
    assert len(kept(spec(None, {"episode_tokens": 300, "turn_tokens": 32}))[0]) == 5


def test_rows_that_are_short_in_any_case_are_not_tokenised(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tools too: their schemas are rendered once, not for each row."""
    path = spec(
        "drop", {"episode_tokens": 900, "turn_tokens": 32}, tools=[{"use": "code_for_tests:add"}], machine="tools"
    )
    loaded = load_spec(path)
    form = load_format(loaded.spec.model, loaded.base)
    rendered: list[int] = []
    real = form.render

    def render(messages: Any, *more: Any) -> list[int]:
        rendered.append(sum(len(message.text) for message in messages))
        return real(messages, *more)

    monkeypatch.setattr(form, "render", render)
    found = fitting_tasks(load_tasks(loaded), loaded, form)
    assert sorted(rendered) == [0, 3 * 400, 3 * 401]
    assert [task.id for task in found] == ["r0", "r2", "r3"]


def test_the_border_is_exact_with_tools(spec: Any) -> None:
    changes = {"tools": [{"use": "code_for_tests:add"}], "machine": "tools"}
    loaded = load_spec(spec(None, {}, **changes))
    form = load_format(loaded.spec.model, loaded.base)
    schema = shape_of(load_entry("code_for_tests:add", loaded.base), None).schema
    length = len(form.render([{"role": "user", "content": "no " * 400}], [schema]))
    for more, count in ((0, 4), (-1, 3)):
        limits = {"episode_tokens": length + 32 + more, "turn_tokens": 32}
        assert len(kept(spec("drop", limits, **changes))[0]) == count
