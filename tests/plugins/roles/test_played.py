"""Users and judges that models play: whole episodes, with scripted backends in the models' place."""

from __future__ import annotations

from typing import Any

import pytest
from journals import write_entries

from engine.backends.registry import open_backend
from engine.runner.replay import Replayer
from engine.runner.runner import Runner
from engine.spec.tasks import load_tasks
from engine.store import RunStore

MARKS = [
    {"text": "[DONE]", "satisfied": True},
    {"text": "[SOLVED]", "satisfied": True, "solved": True, "rewards": [{"name": "correct", "value": 1.0}]},
    {"pattern": "MOOD=([0-9.]+)", "reward": "mood"},
]


def played(replies: list[Any], **changes: Any) -> dict[str, Any]:
    """A user whose model is a script."""
    user = {
        "backend": {"kind": "scripted", "replies": replies},
        "prompt": [{"role": "system", "content": "You want to know what {{task.sum}} is."}],
        "marks": MARKS,
    }
    return {key: value for key, value in {**user, **changes}.items() if value is not None}


TASK = {"rows": [{"id": "a", "sum": "17 plus 25"}]}


async def test_a_model_plays_the_user(make_spec, run_spec) -> None:
    user = played(["<think>41? No.</think>\nThat is too low. MOOD=0.25", "Thank you! [SOLVED]"])
    ran = await run_spec(make_spec(["It is 41.", "It is 42."], tasks=TASK, user=user))
    trajectory = ran.only
    assert [(message.role, message.text) for message in trajectory.messages] == [
        ("user", "What is 17 plus 25?"),
        ("assistant", "It is 41."),
        ("user", "That is too low."),
        ("assistant", "It is 42."),
        ("user", "Thank you!"),
    ]
    assert [turn.rewards for turn in trajectory.turns] == [{"mood": 0.25}, {"correct": 1.0}]
    assert [(posting.source, posting.cause) for posting in trajectory.postings] == [
        ("user", "the user's model says MOOD=0.25"),
        ("user", ""),
    ]
    assert (trajectory.outcome.solved, trajectory.outcome.trainable) == (True, True)
    assert trajectory.counts["user_tokens"] > 0


async def test_nothing_that_the_users_model_samples_is_trained(make_spec, run_spec) -> None:
    user = played(["<think>A secret.</think>Too low.", "[DONE]"])
    ran = await run_spec(make_spec(["It is 41.", "It is 42."], tasks=TASK, user=user))
    (branch,) = ran.only.branches
    whole = ran.template.decode(branch.input_ids)
    trained = "".join(ran.template.decode(branch.input_ids[turn.start : turn.end]) for turn in ran.only.turns)
    assert "Too low." in whole
    assert "secret" not in whole
    assert trained == "It is 41.<|im_end|>It is 42.<|im_end|>"
    assert int(branch.loss_mask.sum()) == ran.only.counts["sampled_tokens"]


@pytest.mark.parametrize(
    ("reply", "changes", "kind"),
    [
        ({"error": "the server is gone"}, {}, "user_scripted_error"),
        ({"text": "Hm.", "finish": "abort"}, {}, "user_aborted"),
        ({"text": "Hm.", "delay": 5}, {"timeout": 0.05}, "user_timeout"),
        ("<think>only thoughts</think>", {}, "user_bad_reply"),
        ("MOOD=1.2.3 hm", {}, "user_bad_reply"),
        ("Hm.", {"prompt": [{"role": "system", "content": "word " * 400}], "model": {"context": 300}}, "user_context_overflow"),
        ("Hm.", {"prompt": [{"role": "system", "content": "{{task.nothing}}"}]}, "template_error"),
        ("Hm.", {"grader": {"use": "code_for_tests:Critic", "with": {"fail": "raise"}}}, "user_error"),
    ],
)  # fmt: skip
async def test_what_the_users_model_does_wrong_is_blamed_on_it(
    make_spec, run_spec, tiny_tokenizer_dir, reply, changes, kind
) -> None:
    if "model" in changes:
        changes = {**changes, "model": {**changes["model"], "path": str(tiny_tokenizer_dir)}}
    ran = await run_spec(make_spec(["It is 41."], tasks=TASK, user=played([reply], **changes)))
    outcome = ran.only.outcome
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.trainable) == (kind, False)
    assert outcome.failure.blame == ("spec" if kind == "template_error" else "user")
    assert outcome.failure.state == "AWAITING_USER_FEEDBACK"
    label = f"failed: {kind} ({outcome.failure.blame})"
    assert dict(ran.result.summary.outcomes) == {label: 1}
    assert ran.result.summary.trainable == 0


@pytest.mark.parametrize(
    ("limits", "limit", "answers"),
    [({"turns": 2}, "user.turns", 2), ({"tokens": 1}, "user.tokens", 1), ({}, "user_turns", 5)],
)
async def test_the_users_model_has_limits_of_its_own(make_spec, run_spec, limits, limit, answers) -> None:
    user = played(["Again."] * 9, limits=limits)
    machine = {
        "preset": "tools_and_user",
        "transitions": [{"trigger": "answered", "source": "GENERATING", "dest": "AWAITING_USER_FEEDBACK"}],
    }
    ran = await run_spec(make_spec(["It is 41."] * 9, tasks=TASK, user=user, machine=machine, limits={"user_turns": 5}))
    outcome = ran.only.outcome
    assert (outcome.limit, outcome.failure, outcome.trainable) == (limit, None, True)
    assert ran.only.counts["user_turns"] == answers


async def test_an_answer_of_the_users_model_is_cut_where_it_may_not_be_longer(make_spec, run_spec) -> None:
    ran = await run_spec(
        make_spec(["It is 41."] * 2, tasks=TASK, user=played(["one two three four five", "[DONE]"], turn_tokens=4))
    )
    said = ran.only.messages[2].text
    assert "one two three four five".startswith(said)
    assert 0 < len(said) < 20


async def test_a_grader_decides_and_the_model_finds_the_words(make_spec, run_spec) -> None:
    user = played(
        ["I am afraid it is not."],
        grader={"use": "code_for_tests:Critic"},
        prompt=[{"role": "user", "content": "Say in your own words, {{turn}}: {{verdict}} They said: {{reply}}"}],
        marks=None,
    )
    ran = await run_spec(make_spec(["It is 41.", "It is 42."], user=user))
    assert [message.text for message in ran.only.messages if message.role == "user"][1:] == [
        "I am afraid it is not.",
        "Right.",
    ]
    assert [turn.rewards for turn in ran.only.turns] == [{"reward": -0.1}, {"correct": 1.0}]
    assert ran.only.outcome.solved


async def test_several_users_are_chosen_by_task(make_spec, run_spec) -> None:
    rows = [{"id": "a", "who": "strict"}, {"id": "b", "who": "played"}, {"id": "c", "who": "strict"}]
    users = {
        "strict": {"use": "code_for_tests:Critic"},
        "played": played(["Fine. [DONE]"], prompt=[{"role": "system", "content": "You are easy to please."}]),
    }
    tasks = {"rows": rows, "user": "who"}
    ran = await run_spec(make_spec(["It is 41.", "It is 42."], tasks=tasks, user=None, users=users))
    last = {key: trajectory.messages[-1].text for key, trajectory in ran.trajectories.items()}
    assert last == {"a/0": "Right.", "b/0": "Fine.", "c/0": "Right."}
    assert {key: trajectory.counts["user_turns"] for key, trajectory in ran.trajectories.items()} == {
        "a/0": 2,
        "b/0": 1,
        "c/0": 2,
    }


async def test_resume_and_replay_need_no_model(make_spec, run_spec, tmp_path) -> None:
    path = make_spec(["It is 41.", "It is 42."], tasks=TASK, user=played(["Too low.", "[SOLVED]"]))
    ran = await run_spec(path)
    replayer = Replayer(ran.loaded, ran.template, ran.store)
    (task,) = load_tasks(ran.loaded)
    replayed = await replayer.check(ran.only, task)
    replayer.close()
    assert (replayed.difference, replayed.tokens) == (None, len(ran.only.branches[0].input_ids))


async def test_an_episode_is_taken_up_again_without_asking_for_what_was_answered(make_spec, run_spec) -> None:
    user = played(["Too low.", "[SOLVED]"])
    ran = await run_spec(make_spec(["It is 41.", "It is 42."], tasks=TASK, user=user))
    journal = ran.store.journal("a/0")
    answered = next(entry.seq for entry in journal if entry.record.kind == "user") + 1
    backend = open_backend(ran.loaded, ran.template)
    await backend.start()
    with RunStore.create(ran.store.folder.parent / "again", ran.store.header) as store:
        begun = await store.begin(load_tasks(ran.loaded)[0], 0)
        for entry in journal[:answered]:
            await write_entries(begun, entry)
    with RunStore.open(store.folder) as store:
        again = Runner(ran.loaded, load_tasks(ran.loaded), ran.template, backend, store)
        await again.run()
        (trajectory,) = store.trajectories()
        assert [message.text for message in trajectory.messages] == [message.text for message in ran.only.messages]
        asked = {name: counts["requests"] for name, counts in again.service_stats.items()}
        assert asked == {"0:scripted": 1}


JUDGE = {
    "backend": {"kind": "scripted", "replies": ["Score: 7"]},
    "prompt": [{"role": "user", "content": "{{task.sum}}? {{replies}}"}],
    "scale": [0, 10],
}


async def test_a_model_judges(make_spec, run_spec) -> None:
    ran = await run_spec(make_spec(["It is 42."], tasks=TASK, rewards={"scorer": JUDGE}))
    assert ran.only.turns[0].rewards == {"correct": 1.0, "judge": 0.7}
    posting = ran.only.postings[-1]
    assert (posting.source, posting.cause) == ("judge", "the judge gave 7; the scale is from 0 to 10")
    (record,) = [entry.record for entry in ran.store.journal(ran.only.episode_id) if entry.record.kind == "score"]
    assert record.replies == [JUDGE["backend"]["replies"][0]]


async def test_each_turn_may_be_judged(make_spec, run_spec) -> None:
    judge = {
        **JUDGE,
        "backend": {"kind": "scripted", "replies": ["Score: 1", "Score: 9"]},
        "turns": "each",
        "name": "help",
    }
    ran = await run_spec(make_spec(["It is 41.", "It is 42."], tasks=TASK, rewards={"scorer": judge}))
    assert [turn.rewards["help"] for turn in ran.only.turns] == [0.1, 0.9]


@pytest.mark.parametrize(
    ("reply", "kind"), [("I cannot say.", "judge_unreadable"), ("Score: 11", "judge_unreadable"), ({"error": "gone"}, "judge_scripted_error")]
)  # fmt: skip
async def test_a_judge_who_cannot_be_read_is_no_score_of_zero(make_spec, run_spec, reply, kind) -> None:
    judge = {**JUDGE, "backend": {"kind": "scripted", "replies": [reply]}}
    ran = await run_spec(make_spec(["It is 42."], tasks=TASK, rewards={"scorer": judge}))
    outcome = ran.only.outcome
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.blame, outcome.trainable) == (kind, "environment", False)
    assert "judge" not in ran.only.turns[0].rewards


async def test_a_model_that_cannot_be_had_stops_the_run_before_it_begins(make_spec, run_spec) -> None:
    user = played([], backend={"kind": "scripted", "replies": [{"tokens": [99999]}]})
    with pytest.raises(Exception, match="not in the vocabulary"):
        await run_spec(make_spec(["It is 42."], tasks=TASK, user=user))
