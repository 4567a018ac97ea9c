"""Rules over users and judges that models play."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from written_specs import save_spec

from engine.spec.load import load_spec, read_spec
from engine.validate import check_spec

USER: dict[str, Any] = {
    "prompt": [
        {"role": "system", "content": "Ask for {{task.q}}. They said {{reply}}, before {{dialogue}}. {{verdict}}"}
    ],
    "marks": [{"text": "[DONE]", "satisfied": True}],
}


def spec_with(tmp_path: Path, **changes: Any) -> Path:
    document = {
        "spec": "episode/v1",
        "name": "demo",
        "model": {"path": "org/m"},
        "tasks": {"source": "inline", "rows": [{"q": "a", "who": "x"}]},
        "prompt": [{"role": "user", "content": "{{q}}"}],
        "machine": "retry_with_feedback",
        "user": USER,
        **changes,
    }
    return save_spec(tmp_path / "s.yaml", {key: value for key, value in document.items() if value is not None})


def found(path: Path) -> list[tuple[str, str]]:
    return [
        (item.rule, item.message) for item in check_spec(load_spec(path)) if item.rule.startswith(("role", "tasks.un"))
    ]


def test_a_valid_model_played_user_has_no_findings(tmp_path: Path) -> None:
    assert found(spec_with(tmp_path)) == []


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        ("{{replay}}", "there is no field `replay` here", "did you mean `reply`?"),
        ("{{task.qq}}", "row 1 has no field `qq`", "did you mean `q`?"),
        ("{{q}}", "there is no field `q` here", "known: dialogue, reply, task.<field>, turn, verdict"),
    ],
)
def test_the_prompt_of_a_user_is_filled_with_what_there_is(tmp_path: Path, words: str, message: str, fix: str) -> None:
    user = {**USER, "prompt": [{"role": "system", "content": f"Yes. {words}"}]}
    (item,) = [
        item for item in check_spec(load_spec(spec_with(tmp_path, user=user))) if item.rule == "role.unknown-field"
    ]
    assert (item.message, item.fix) == (message, fix)
    assert item.path == ("user", "prompt", 0, "content")


def test_a_judge_hears_no_dialogue(tmp_path: Path) -> None:
    judge = {"prompt": [{"role": "user", "content": "{{replies}} {{dialogue}}"}]}
    (item,) = found(spec_with(tmp_path, rewards={"scorer": judge}))
    assert item == ("role.unknown-field", "there is no field `dialogue` here")


def test_files_of_the_users_model_exist(tmp_path: Path) -> None:
    user = {
        **USER,
        "backend": {"kind": "scripted", "replies": "none.yaml"},
        "model": {"path": "org/m", "chat_template": "no.j"},
    }
    assert found(spec_with(tmp_path, user=user)) == [
        ("role.no-file", "the file `none.yaml` does not exist"),
        ("role.no-file", "the file `no.j` does not exist"),
    ]


def test_a_mark_that_pays_without_a_rule_is_warned_of(tmp_path: Path) -> None:
    paying = {**USER, "marks": [{"text": "[OK]", "satisfied": True, "rewards": [{"value": 1.0}]}]}
    assert found(spec_with(tmp_path, user=paying)) == [
        ("role.free-verdict", "the policy may persuade this model to write the mark that earns the reward")
    ]
    graded = {**paying, "grader": {"use": "engine.environments.users.scripted:Scripted", "with": {"lines": ["a"]}}}
    assert found(spec_with(tmp_path, user=graded)) == []


def test_graders_are_checked_as_users(tmp_path: Path) -> None:
    user = {**USER, "grader": {"use": "engine.environments.users.scripted:Scripted", "with": {"linse": ["a"]}}}
    problems = [item for item in check_spec(load_spec(spec_with(tmp_path, user=user))) if item.rule == "code.protocol"]
    assert [(item.message, item.path) for item in problems] == [
        ("`engine.environments.users.scripted:Scripted` takes no argument `linse`", ("user", "grader", "with", "linse"))
    ]


def test_a_task_names_one_of_the_users(tmp_path: Path) -> None:
    tasks = {"source": "inline", "rows": [{"q": "a", "who": "y"}], "user": "who"}
    path = spec_with(tmp_path, user=None, users={"x": USER, "z": USER}, tasks=tasks)
    assert ("tasks.unreadable", "row 1: there is no user 'y'") in found(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"users": {"x": USER}}, "not both"),
        ({"user": None, "users": {"x": USER}}, "needs `tasks.user`"),
        ({"tasks": {"source": "inline", "rows": [{"q": "a"}], "user": "q"}}, "and there are none"),
        ({"user": {"timeout": 5}}, "it needs `use` (an entry point), or `prompt`"),
        ({"user": {**USER, "use": "a:b"}}, "`prompt` and `marks` are for a part that a model plays"),
        ({"user": {**USER, "with": {"a": 1}}}, "`with` belongs to `use`"),
        ({"user": {**USER, "marks": [{"satisfied": True}]}}, "exactly one of `text` and `pattern`"),
        ({"user": {**USER, "marks": [{"text": "a", "reward": "b"}]}}, "`reward` needs a `pattern` with a group"),
        ({"user": {**USER, "marks": [{"pattern": "("}]}}, "not a valid regular expression"),
        ({"rewards": {"scorer": {"use": "math-verify", "scale": [0, 10]}}}, "`scale` is for a part that a model plays"),
        ({"rewards": {"scorer": {"prompt": USER["prompt"], "pattern": "a"}}}, "needs a group"),
        ({"rewards": {"scorer": {"prompt": USER["prompt"], "scale": [1, 1]}}}, "from a lower to a higher"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    loaded, problems = read_spec(spec_with(tmp_path, **changes))
    assert loaded is None
    assert words in "\n".join(map(str, problems))
