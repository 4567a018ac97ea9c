"""Where a cut-off reply costs less than a wrong one, validate says so, and is silent where the spec does not tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.spec.load import load_spec
from engine.validate import check_spec

HEAD = """\
spec: episode/v1
name: demo
model: {path: org/m}
tasks: {source: inline, rows: [{q: a}]}
prompt: [{role: user, content: "{{q}}"}]
limits: {assistant_turns: 4}
"""
CODE = """\
from engine.environments.function import Dialogue, End, Say, environment
from engine.schemas.environment import EpisodeView, Reset, Step, UserTurn
from engine.schemas.reward import RewardEvent

class Teacher:
    def __init__(self, right=1.0, wrong=-0.2, low=-5):
        self._right, self._wrong, self.low = right, wrong, low
    def respond(self, view):
        return UserTurn(content="No.", rewards=[RewardEvent(name="wrong", value=self._wrong)])

class Kind:
    def __init__(self, low=-5.0):
        self.low = low
    def respond(self, view):
        return UserTurn(content="No.", rewards=[RewardEvent(name="right", value=1.0)])

class Game:
    events = ("continue", "done")
    def reset(self, task, seed):
        return Reset()
    def step(self, view):
        return Step(event="done", rewards=[RewardEvent(name="format", value=-0.3)])

class Scored(Game):
    def step(self, view):
        return Step(event="done", rewards=[RewardEvent(name="format", value=-0.3)])
    def score(self, view):
        return []

@environment
def guess(task, format=-0.4) -> Dialogue:
    yield "Guess."
    yield Say("No.", rewards={"format": format})
    return End()
"""
RETRY = "machine: retry_with_feedback\n"
ENDS = "machine: {preset: step, transitions: [{trigger: truncated, source: GENERATING, dest: DONE}]}\n"
TEACHER = 'user: {use: "my_code:Teacher"}\n'
RULE = "{at: AWAITING_USER_FEEDBACK, op: add, value: -0.5, when: '!feedback.solved'}"
MARK = "{text: '[NO]', rewards: [{name: wrong, value: -0.6}]}"
PLAYED = f"user: {{prompt: [{{role: user, content: '{{{{reply}}}}'}}], marks: [{MARK}]}}\n"


def found(folder: Path, lines: str) -> list[str]:
    (folder / "my_code.py").write_text(CODE)
    (folder / "s.yaml").write_text(HEAD + lines)
    items = [item for item in check_spec(load_spec(folder / "s.yaml")) if item.rule == "rewards.truncated-pays"]
    return [item.message.partition("ends the episode and ")[2].partition(", so")[0] for item in items]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (RETRY + TEACHER, "costs 0; a wrong reply may cost 0.2 (`Teacher(wrong=-0.2)`)"),
        (
            RETRY + 'user: {use: "my_code:Teacher", with: {wrong: -0.1}}',
            "costs 0; a wrong reply may cost 0.1 (`user.with.wrong`)",
        ),
        (
            f'{RETRY}user: {{use: "my_code:Kind"}}\nrewards: {{reassign: [{RULE}]}}',
            "costs 0; a wrong reply may cost 0.5 (`rewards.reassign` at `AWAITING_USER_FEEDBACK`)",
        ),
        (RETRY + PLAYED, "costs 0; a wrong reply may cost 0.6 (`user.marks.0`)"),
        (
            ENDS + 'environment: {use: "my_code:Game"}',
            "costs 0; a wrong reply may cost 0.3 (`my_code:Game`)",
        ),
        (
            ENDS + 'environment: {use: "my_code:guess"}',
            "costs 0; a wrong reply may cost 0.4 (`guess(format=-0.4)`)",
        ),
        (
            RETRY + TEACHER + "rewards: {reassign: [{at: DONE, when: last.finish == 'length', op: add, value: -0.05}]}",
            "costs 0.05; a wrong reply may cost 0.2 (`Teacher(wrong=-0.2)`)",
        ),
        (
            RETRY + TEACHER + "train: {overlong: {margin: 8, coefficient: 0.1}}",
            "costs 0.1; a wrong reply may cost 0.2 (`Teacher(wrong=-0.2)`)",
        ),
    ],
)
def test_it_is_found_where_the_spec_or_its_code_says_so(tmp_path: Path, lines: str, words: str) -> None:
    assert found(tmp_path, lines) == [words]


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(RETRY + 'user: {use: "my_code:Kind"}', id="a negative number that is no reward"),
        pytest.param(RETRY + 'user: {use: "my_code:Teacher", with: {wrong: 0.0}}', id="a wrong reply costs nothing"),
        pytest.param(RETRY + 'user: {use: "json:loads"}', id="code that is not of this form"),
        pytest.param(
            TEACHER
            + "machine: {preset: retry_with_feedback, transitions: "
            + "[{trigger: truncated, source: GENERATING, dest: AWAITING_USER_FEEDBACK}]}",
            id="it is judged",
        ),
        pytest.param('machine: step\nenvironment: {use: "my_code:Game"}', id="the preset has it judged"),
        pytest.param(ENDS + 'environment: {use: "my_code:Scored"}', id="score judges at the end"),
        pytest.param(RETRY + TEACHER + "rewards: {scorer: {use: math-verify}}", id="a scorer judges at the end"),
        pytest.param(
            RETRY + TEACHER + "rewards: {reassign: [{at: DONE, when: last.finish == 'length', op: add, value: -0.2}]}",
            id="a rule takes as much",
        ),
        pytest.param(
            RETRY + TEACHER + "rewards: {reassign: [{at: DONE, when: last.tokens > 9, op: add, value: -0.1}]}",
            id="a rule may take something",
        ),
        pytest.param(RETRY + TEACHER + "train: {overlong: mask}", id="not trained on"),
        pytest.param(RETRY + TEACHER + "train: {overlong: {margin: 8}}", id="a penalty of its own"),
        pytest.param("machine: single_turn\n" + TEACHER, id="nobody judges"),
    ],
)
def test_nothing_is_said_where_it_is_judged_or_not_known(tmp_path: Path, lines: str) -> None:
    assert found(tmp_path, lines) == []
