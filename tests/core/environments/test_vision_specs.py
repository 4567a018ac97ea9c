"""The vision specs that ship, end to end: real processor, real template, a tiny Qwen2.5-VL's tokenizer."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run_to_store
from installed_plugins import needs_plugin

from engine.environments.color_square import COLORS, square
from engine.environments.geo3k import SHIPPED
from engine.plugins.local.tiny_vlm import build
from engine.rewards.credit import credit
from engine.rewards.ledger import Ledger
from engine.schemas.message import ImagePart, Message, TextPart
from engine.schemas.reward import RewardEvent
from engine.schemas.trajectory import Branch, Trajectory
from engine.spec.load import load_spec
from engine.store.store import RunStore

SPECS = Path(__file__).parents[3] / "specs"
COLOR_SQUARE, FEEDBACK, TOOL = (SPECS / f"{name}.yaml" for name in ("color_square", "geo3k_feedback", "geo3k_tool"))
FIRST = json.loads(SHIPPED.read_text(encoding="utf-8").splitlines()[0])
"""The first problem that ships; its answer is 5."""
BAD_CALL = '<tool_call>\n{"name": "calc_score", "arg\n</tool_call>'


def calc(answer: str) -> dict[str, Any]:
    return {"tool_calls": [{"name": "calc_score", "arguments": {"answer": answer}}]}


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny") / "vlm")


def run(spec: Path, vlm: Path, out: Path, *settings: str, limit: int = 1) -> RunStore:
    """Run a spec through the command line; its store, open for reading."""
    changes = [f"model.path={vlm}", "rollout.samples_per_task=1", *settings]
    return run_to_store(spec, out, "--limit", str(limit), settings=changes)


def scripted(*replies: Any) -> str:
    script = {"kind": "scripted", "replies": list(replies)}
    return "backend=" + yaml.safe_dump(script, default_flow_style=True, width=10**6)


def only(store: RunStore) -> Trajectory:
    (episode,) = store.trajectories()
    assert episode.outcome.failure is None, episode.outcome.failure
    return episode


def events(episode: Trajectory) -> list[str]:
    return [step[1] for step in episode.path]


def image_tokens(vlm: Path, branch: Branch) -> list[int]:
    """How many placeholders each picture of a branch has, in order."""
    pad = int(json.loads((vlm / "config.json").read_text())["image_token_id"])
    return [len(list(run)) for is_pad, run in groupby(branch.input_ids.tolist(), lambda id_: id_ == pad) if is_pad]


def said(episode: Trajectory) -> list[Message]:
    """What the user said after the question."""
    return [message for message in episode.messages if message.role == "user"][1:]


def test_squares_are_shown_in_the_prompt_and_in_the_users_turn_and_paid_by_turn(vlm: Path, tmp_path: Path) -> None:
    first, second = (square("0/0", turn) for turn in (0, 1))
    wrong = next(color for color in COLORS if color != second.color)
    with run(COLOR_SQUARE, vlm, tmp_path, scripted(first.color, f"It is {wrong}.")) as store:
        episode = only(store)
        images = [image for message in episode.messages for image in message.images]
        stored = [store.image(image.image) for image in images]
    assert [turn.rewards for turn in episode.turns] == [{"color": 1.0}, {"color": 0.0}]
    assert [[part.type for part in message.content] for message in episode.messages if message.role == "user"] == [
        ["image", "text"],
        ["image", "text"],
    ]
    assert [(image.width, image.height, image.mime) for image in stored] == [(64, 64, "image/png")] * 2
    (branch,) = episode.branches
    assert image_tokens(vlm, branch) == [4, 4]  # 64 pixels are 4 x 4 patches, merged two by two
    assert not episode.outcome.solved
    assert episode.facts == {"judged": 2, "judged_turn": 1, "right": 1}


def test_the_smoke_run_needs_nothing_but_a_cpu(vlm: Path, tmp_path: Path) -> None:
    with run(COLOR_SQUARE, vlm, tmp_path, "rollout.samples_per_task=4", limit=2) as store:
        episodes = list(store.trajectories())
    assert [episode.outcome.failure for episode in episodes] == [None] * 8
    assert {len(episode.turns) for episode in episodes} == {2}
    assert [image_tokens(vlm, episode.branches[-1]) for episode in episodes] == [[4, 4]] * 8
    assert all(set(turn.rewards) == {"color"} for episode in episodes for turn in episode.turns)
    shown = {episode.task_id: {image.image for m in episode.messages for image in m.images} for episode in episodes}
    assert [len(digests) for digests in shown.values()] == [2, 2]  # the samples of a task see the same pixels


def test_a_call_among_the_squares_is_answered_with_the_specs_parts(vlm: Path, tmp_path: Path) -> None:
    first, second = (square("0/0", turn).color for turn in (0, 1))
    settings = ("limits.user_turns=3", scripted(BAD_CALL, first, second))
    with run(COLOR_SQUARE, vlm, tmp_path, *settings) as store:
        episode = only(store)
    assert events(episode) == ["ready", "malformed", "feedback", "answered", "feedback", "answered", "satisfied"]
    assert said(episode)[0].content == [TextPart(text="There are no tools here. Name the colour, in one word.")]
    assert [turn.rewards for turn in episode.turns] == [{}, {"color": 1.0}, {"color": 1.0}]
    assert episode.outcome.solved


@needs_plugin("credit_methods")
def test_feedback_goes_on_until_the_answer_is_right_and_credit_is_discounted_by_turns(
    vlm: Path, tmp_path: Path
) -> None:
    replies = (BAD_CALL, "I cannot tell.", "It is \\boxed{12}.", "So it is \\boxed{\\frac{10}{2}}.")
    with run(FEEDBACK, vlm, tmp_path, scripted(*replies)) as store:
        episode = only(store)
    assert events(episode) == ["ready", "malformed", "feedback", *["answered", "feedback"] * 2, "answered", "satisfied"]
    words = [message.content for message in said(episode)]
    assert words == [
        [TextPart(text=f"There are no tools here. {problem} Put your final answer within \\boxed{{}}.")]
        for problem in [
            "It is not valid JSON: Unterminated string starting at at character 23. "
            'Write {"name": "<tool>", "arguments": {...}}.'
        ]
    ] + [
        [TextPart(text="No answer was found in your reply. End it with your final answer, such as \\boxed{12}.")],
        [
            TextPart(
                text="Your answer 12 is wrong. You may have misread the picture or the question: "
                f'"{FIRST["question"]}" Check your earlier steps and answer again, with the final answer within \\boxed{{}}.'
            )
        ],
    ]
    assert [turn.rewards for turn in episode.turns] == [{}, {}, {}, {"correct": 1.0}]
    assert (episode.outcome.solved, episode.facts["tries"]) == (True, 2)


@needs_plugin("credit_methods")
def test_a_template_may_show_the_picture_again_and_it_is_stored_once(vlm: Path, tmp_path: Path) -> None:
    parts = 'recover.wrong=[{type: text, text: "{{answer}}? Look again."}, {type: image, image: "{{image}}"}]'
    with run(FEEDBACK, vlm, tmp_path, parts, scripted("\\boxed{12}", "\\boxed{5}")) as store:
        episode = only(store)
        shown = [image.image for message in episode.messages for image in message.images]
        data = store.image(shown[0]).data
    (again,) = said(episode)
    assert again.content[0] == TextPart(text="12? Look again.")
    assert isinstance(again.content[1], ImagePart)
    assert len(shown) == 2
    assert len(set(shown)) == 1
    assert data == (SHIPPED.parent / FIRST["image"]).read_bytes()


@needs_plugin("credit_methods")
def test_feedback_ends_where_the_limits_do(vlm: Path, tmp_path: Path) -> None:
    with run(FEEDBACK, vlm, tmp_path, scripted(*["\\boxed{1}"] * 4)) as store:
        episode = only(store)
    assert (episode.outcome.state, episode.outcome.event, episode.outcome.limit) == ("DONE", "limit", "assistant_turns")
    assert (episode.outcome.reward, episode.outcome.solved, len(episode.turns)) == (0.0, False, 4)


def test_the_tool_scores_by_turn_and_a_right_answer_ends_the_episode(vlm: Path, tmp_path: Path) -> None:
    replies = (BAD_CALL, "It is 5.", calc("12"), calc("5 cm"), calc("never asked for"))
    with run(TOOL, vlm, tmp_path, "limits.assistant_turns=5", scripted(*replies)) as store:
        episode = only(store)
    assert events(episode) == [
        "ready",
        "malformed",
        "feedback",
        "answered",
        "feedback",
        "tool_calls",
        "results",
        "tool_calls",
        "results",
    ]
    assert [turn.rewards for turn in episode.turns] == [{}, {}, {"score": 0.0}, {"score": 1.0}]
    assert [message.text for message in episode.messages if message.role == "tool"] == [
        "Score 0: 12 is not right. Reason in another way, and check the new answer.",
        "Score 1: 5 cm is right.",
    ]
    assert [message.text for message in said(episode)] == [
        "Your tool call could not be read. It is not valid JSON: Unterminated string starting at at character 23. "
        'Write {"name": "<tool>", "arguments": {...}}. Write it as '
        '<tool_call>{"name": "calc_score", "arguments": {"answer": "12"}}</tool_call>',
        f"You have checked no answer yet. Call calc_score with your answer to: {FIRST['question']}",
    ]
    assert all(isinstance(message.content, list) for message in said(episode))
    assert (episode.outcome.state, episode.outcome.solved) == ("DONE", True)
    assert episode.facts == {"solved": True, "tries": 2}


def test_answers_side_by_side_win_nothing(vlm: Path, tmp_path: Path) -> None:
    both = {"tool_calls": calc("12")["tool_calls"] + calc("5")["tool_calls"]}
    with run(TOOL, vlm, tmp_path, "limits.assistant_turns=1", scripted(both)) as store:
        episode = only(store)
    words = "`calc_score` failed: hand in one answer a turn; none of these was checked"
    assert [message.text for message in episode.messages if message.role == "tool"] == [words, words]
    assert (episode.outcome.solved, episode.outcome.reward) == (False, 0.0)


@needs_plugin("credit_methods")
def test_the_feedback_spec_discounts_by_the_number_of_attempts() -> None:
    from engine.plugins.credit_methods.spec import TurnDiscountCredit

    spec = load_spec(FEEDBACK).spec.rewards.credit
    assert isinstance(spec, TurnDiscountCredit)
    as_it_is = spec.model_copy(update={"baseline": "none", "scale": "none"})
    group = []
    for turns in (1, 3):
        ledger = Ledger()
        ledger.post(RewardEvent(name="correct", value=1.0, source="user"), at_turn=turns - 1)
        group.append(ledger.seal(turns))
    first, third = credit(as_it_is, group)
    assert first.tolist() == [1.0]
    assert third.tolist() == pytest.approx([0.81, 0.81, 0.81])  # gamma^k after k wrong answers, for every turn
