"""Whole episodes on the scripted backend: what is said, what is paid, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import code_for_tests as spec_code
import numpy as np
import pytest
from scripted_replies import ADD, call

from engine.episode.episode import derive_seed
from engine.runner.replay import Replayer
from engine.schemas.message import TextPart


async def test_an_episode_is_what_its_script_says(make_spec, run_spec) -> None:
    ran = await run_spec(make_spec([ADD, "It is 41.", "It is 42."]))
    trajectory = ran.only
    assert trajectory.path == [
        ("PENDING", "ready", "GENERATING"),
        ("GENERATING", "tool_calls", "AWAITING_TOOL"),
        ("AWAITING_TOOL", "results", "GENERATING"),
        ("GENERATING", "answered", "AWAITING_USER_FEEDBACK"),
        ("AWAITING_USER_FEEDBACK", "feedback", "GENERATING"),
        ("GENERATING", "answered", "AWAITING_USER_FEEDBACK"),
        ("AWAITING_USER_FEEDBACK", "satisfied", "DONE"),
    ]
    assert [(message.role, message.text) for message in trajectory.messages] == [
        ("user", "What is 17 plus 25?"),
        ("assistant", ""),
        ("tool", "42"),
        ("assistant", "It is 41."),
        ("user", "Not It is 41.. Again."),
        ("assistant", "It is 42."),
        ("user", "Right."),
    ]
    assert trajectory.messages[1].tool_calls[0].arguments == {"a": 17, "b": 25}
    assert [turn.rewards for turn in trajectory.turns] == [{}, {"reward": -0.1}, {"correct": 1.0}]
    assert (trajectory.outcome.solved, trajectory.outcome.reward, trajectory.outcome.trainable) == (True, 0.9, True)
    assert trajectory.counts["tool_calls"] == 1
    assert trajectory.facts == {"tries": 1}
    assert trajectory.seed == derive_seed(7, "a", 0)


async def test_the_row_is_what_the_model_saw(make_spec, run_spec) -> None:
    ran = await run_spec(make_spec([ADD, "It is 42."]))
    (branch,) = ran.only.branches
    said = ran.template.decode(branch.input_ids).split("<|im_end|>", 1)[1]  # after the system turn with the tools
    assert said == (
        "<|im_start|>user\nWhat is 17 plus 25?<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n42<|im_end|>\n"
        "<|im_start|>assistant\nIt is 42.<|im_end|>"
    )
    sampled = [ran.template.decode(branch.input_ids[turn.start : turn.end]) for turn in ran.only.turns]
    assert sampled[1] == "It is 42.<|im_end|>"
    assert sampled[0].endswith("</tool_call><|im_end|>")
    mask = np.zeros(len(branch.input_ids), np.int32)
    for turn in ran.only.turns:
        mask[turn.start : turn.end] = 1
    assert (branch.loss_mask == mask).all()
    assert (branch.turn_ids[branch.loss_mask == 1] >= 0).all()
    assert (branch.logprobs[branch.loss_mask == 0] == 0).all()


@pytest.mark.parametrize(
    ("changes", "kind", "blame", "state"),
    [
        ({"environment": {"use": "code_for_tests:Board", "with": {"fail": "build"}}}, "environment_error", "environment", "PENDING"),
        ({"environment": {"use": "code_for_tests:Board", "with": {"fail": "reset"}}}, "environment_error", "environment", "PENDING"),
        ({"environment": {"use": "code_for_tests:Board", "with": {"fail": "nonsense"}}}, "environment_bad_reply", "environment", "PENDING"),
        (
            {"environment": {"use": "code_for_tests:Board", "with": {"fail": "hang"}, "timeout": 0.05}},
            "environment_timeout", "environment", "PENDING",
        ),
        ({"environment": {"use": "code_for_tests:Board", "with": {"fail": "score"}}}, "environment_error", "environment", "DONE"),
        ({"user": {"use": "code_for_tests:Critic", "with": {"fail": "raise"}}}, "user_error", "user", "AWAITING_USER_FEEDBACK"),
        ({"user": {"use": "code_for_tests:Critic", "with": {"fail": "empty"}}}, "user_bad_reply", "user", "AWAITING_USER_FEEDBACK"),
        ({"user": {"use": "code_for_tests:Critic", "with": {"fail": "nonsense"}}}, "user_bad_reply", "user", "AWAITING_USER_FEEDBACK"),
        ({"user": {"use": "code_for_tests:Critic", "with": {"fail": "address"}}}, "ledger_error", "user", "AWAITING_USER_FEEDBACK"),
        (
            {"user": {"use": "code_for_tests:Critic", "with": {"fail": "hang"}, "timeout": 0.05}},
            "user_timeout", "user", "AWAITING_USER_FEEDBACK",
        ),
        (
            {"rewards": {"reassign": [{"at": "AWAITING_USER_FEEDBACK", "op": "transfer", "turn": "last", "to": "previous", "share": 0.5}]}},
            "ledger_error", "spec", "AWAITING_USER_FEEDBACK",
        ),
        (
            {"rewards": {"reassign": [{"at": "AWAITING_USER_FEEDBACK", "when": "feedback.mood == 'good'", "op": "add", "value": 1}]}},
            "guard_error", "spec", "AWAITING_USER_FEEDBACK",
        ),
    ],
)  # fmt: skip
async def test_failures_are_typed_and_end_only_their_episode(make_spec, run_spec, changes, kind, blame, state) -> None:
    ran = await run_spec(make_spec(["It is 42."], **changes))
    failure = ran.only.outcome.failure
    assert failure is not None
    assert (failure.kind, failure.blame, failure.state) == (kind, blame, state)
    assert not ran.only.outcome.trainable
    assert ran.only.outcome.state == "DONE"
    assert ran.result.faults == []
    assert spec_code.CALLS["closed"] == spec_code.CALLS["built"]


async def test_an_answer_of_another_class_of_the_same_name_is_told_apart(make_spec, run_spec) -> None:
    ran = await run_spec(make_spec(["It is 42."], user={"use": "code_for_tests:Critic", "with": {"fail": "another"}}))
    assert ran.only.outcome.failure.message == (
        "`code_for_tests:Critic`.respond returned code_for_tests.UserTurn; "
        "it must return a UserTurn of engine.schemas.environment"
    )


async def test_one_bad_task_stops_no_other(make_spec, run_spec) -> None:
    rows = [{"id": f"t{n}", "fail": "reset" if n == 3 else ""} for n in range(8)]
    ran = await run_spec(
        make_spec(
            ["It is 42."],
            tasks={"rows": rows},
            environment={"use": "code_for_tests:Board"},
            rollout={"samples_per_task": 2},
        )
    )
    outcomes = {key: trajectory.outcome.failure for key, trajectory in ran.trajectories.items()}
    assert len(outcomes) == 16
    assert {key for key, failure in outcomes.items() if failure} == {"t3/0", "t3/1"}
    assert spec_code.CALLS["closed"] == 16


async def test_a_backend_error_is_a_failure_of_that_episode(make_spec, run_spec) -> None:
    replies = [{"task": "a", "replies": [{"error": "out of memory"}]}, {"task": "b", "replies": ["It is 42."]}]
    ran = await run_spec(make_spec(replies, tasks={"rows": [{"id": "a"}, {"id": "b"}]}))
    bad, good = ran.trajectories["a/0"].outcome, ran.trajectories["b/0"].outcome
    assert bad.failure is not None
    assert (bad.failure.blame, bad.trainable) == ("backend", False)
    assert "out of memory" in bad.failure.message
    assert good.solved


@pytest.mark.parametrize(
    ("limits", "replies", "limit"),
    [
        ({"assistant_turns": 2}, ["no", "no", "no"], "assistant_turns"),
        ({"user_turns": 2}, [call("nothing"), "<tool_call>{</tool_call>", "<tool_call>{</tool_call>", "<tool_call>{</tool_call>"], "user_turns"),
        ({"tool_calls": 1}, [ADD, ADD, ADD], "tool_calls"),
        ({"episode_tokens": 1100}, [("no " * 90), *[ADD] * 20], "episode_tokens"),
        ({"episode_seconds": 0.2}, [call("wait", seconds=9)], "episode_seconds"),
    ],
)  # fmt: skip
async def test_limits_end_an_episode_by_name(make_spec, run_spec, limits, replies, limit) -> None:
    ran = await run_spec(make_spec(replies, limits=limits))
    outcome = ran.only.outcome
    assert (outcome.limit, outcome.event, outcome.state) == (limit, "limit", "DONE")
    assert outcome.failure is None
    assert outcome.trainable


async def test_context_is_a_limit(make_spec, run_spec) -> None:
    ran = await run_spec(make_spec(["no"] * 40, model={"context": 200}, tools=None, limits={"assistant_turns": 40}))
    (branch,) = ran.only.branches
    assert (ran.only.outcome.limit, ran.only.outcome.event) == ("context", "limit")
    assert 170 < len(branch.input_ids) <= 200


async def test_a_reply_is_cut_to_what_limits_leave(make_spec, run_spec) -> None:
    ran = await run_spec(make_spec(["seven words are more than four tokens"], limits={"turn_tokens": 4}))
    assert (ran.only.outcome.event, ran.only.turns[0].finish.type) == ("truncated", "length")
    assert ran.only.counts["sampled_tokens"] == 4


async def test_calls_past_the_limit_in_one_turn_get_an_error_each(make_spec, run_spec) -> None:
    both = {"tool_calls": [{"name": "add", "arguments": {"a": n, "b": 1}} for n in range(3)]}
    ran = await run_spec(make_spec([both, "It is 42."], limits={"tool_calls": 2}))
    results = [message.text for message in ran.only.messages if message.role == "tool"]
    assert results == ["1", "2", "You have no tool calls left. Answer without tools."]
    assert ran.only.counts["tool_calls"] == 2


async def test_a_malformed_call_is_answered_in_the_users_place(make_spec, run_spec) -> None:
    ran = await run_spec(make_spec(['<tool_call>\n{"name": "add", "arg\n</tool_call>', "It is 42."]))
    said = ran.only.messages[2]
    assert said.role == "user"
    assert said.text.startswith("Your tool call could not be read: ")
    assert said.text.endswith("No tool was called. Write the call again in the format that you were given.")
    assert spec_code.CALLS["asked"] == 1
    assert [step[1] for step in ran.only.path] == ["ready", "malformed", "feedback", "answered", "satisfied"]


async def test_a_malformed_call_is_answered_with_the_specs_own_parts(make_spec, run_spec) -> None:
    words = [{"type": "text", "text": "Unread: {{raw}} ({{task.id}})."}, {"type": "text", "text": " Again."}]
    bad = "<tool_call>\n{oops\n</tool_call>"
    ran = await run_spec(make_spec([bad, "It is 42."], recover={"malformed": words}))
    assert ran.only.messages[2].content == [TextPart(text=f"Unread: {bad} (a)."), TextPart(text=" Again.")]
    assert ran.only.outcome.solved


async def test_what_the_user_finds_is_said_in_the_specs_words(make_spec, run_spec) -> None:
    spec = make_spec(
        ["It is 41.", "Hm.", "It is 42."],
        user={"use": "code_for_tests:Examiner"},
        recover={"wrong": "{{said}} is wrong, {{task.id}}."},
    )
    ran = await run_spec(spec)
    assert [message.content for message in ran.only.messages if message.role == "user"][1:] == [
        [TextPart(text="It is 41. is wrong, a.")],  # the spec's
        "Say a number.",  # the user's own, for which the spec has no template
    ]
    assert [step[1] for step in ran.only.path][-1] == "satisfied"


async def test_a_template_that_names_no_field_of_the_users_fails_that_episode(make_spec, run_spec) -> None:
    spec = make_spec(["It is 41."], user={"use": "code_for_tests:Examiner"}, recover={"wrong": "{{sad}}"})
    failure = (await run_spec(spec)).only.outcome.failure
    assert (failure.blame, failure.kind) == ("spec", "template_error")
    assert failure.message == "the template names `{{sad}}`, which is no field here; did you mean `said`?"


async def test_a_tools_fact_solves_the_task(make_spec, run_spec) -> None:
    ran = await run_spec(
        make_spec([call("crack"), "Done."], tools=[{"use": "code_for_tests:crack"}], user=None, machine="tools")
    )
    assert ran.only.outcome.solved


async def test_tools_that_raise_or_hang_are_answered_and_the_episode_goes_on(make_spec, run_spec) -> None:
    replies = [call("explode", word="boom"), call("hang", word="x"), call("pay", amount=0.5), "It is 42."]
    ran = await run_spec(make_spec(replies, limits={"tool_seconds": 0.1}))
    results = [message.text for message in ran.only.messages if message.role == "tool"]
    assert results == ["`explode` failed: boom", "`hang` did not answer within 0.1 s.", "paid"]
    assert ran.only.turns[2].rewards == {"tool": 0.5}
    assert ran.only.facts["paid"] == 0.5
    assert ran.only.outcome.solved


async def test_a_waiting_tool_holds_no_generation_slot(make_spec, run_spec) -> None:
    rows = [{"id": f"t{n}"} for n in range(6)]
    ran = await run_spec(
        make_spec(
            [call("wait", seconds=0.2), "It is 42."],
            tasks={"rows": rows},
            rollout={"concurrency": 1, "live_episodes": 6},
        )
    )
    assert len(ran.trajectories) == 6
    assert spec_code.MAX_ACTIVE["wait"] == 6  # all wait at once, though only one may generate at a time


async def test_no_more_episodes_are_alive_than_allowed(make_spec, run_spec) -> None:
    rows = [{"id": f"t{n}"} for n in range(6)]
    await run_spec(
        make_spec([call("wait", seconds=0.05), "It is 42."], tasks={"rows": rows}, rollout={"live_episodes": 2})
    )
    assert spec_code.MAX_ACTIVE["wait"] == 2


async def test_states_and_actions_of_a_specs_own(make_spec, run_spec) -> None:
    machine = {
        "preset": "single_turn",
        "states": {"MEASURING": {"action": "code_for_tests:measure", "with": {"most": 3}}},
        "transitions": [
            {"trigger": "answered", "source": "GENERATING", "dest": "MEASURING"},
            {"trigger": "short", "source": "MEASURING", "dest": "GENERATING"},
            {"trigger": "long", "source": "MEASURING", "dest": "DONE"},
        ],
    }
    ran = await run_spec(make_spec(["one", "two", "three"], machine=machine, user=None, tools=None))
    assert [step[1] for step in ran.only.path] == [
        "ready",
        "answered",
        "short",
        "answered",
        "short",
        "answered",
        "long",
    ]
    assert ran.only.turns[0].rewards == {"measured": 0.5}
    assert [message.text for message in ran.only.messages if message.role == "user"][1:] == ["Go on.", "Go on."]


STEPPING = {
    "initial": "PENDING",
    "states": {
        "PENDING": {"action": "reset"},
        "GENERATING": {"action": "generate"},
        "MOVING": {"action": "step"},
        "DONE": {"action": "score", "final": True},
    },
    "transitions": [
        {"trigger": "ready", "source": "PENDING", "dest": "GENERATING"},
        {"trigger": ["answered", "tool_calls", "malformed"], "source": "GENERATING", "dest": "MOVING"},
        {"trigger": "moved", "source": "MOVING", "dest": "GENERATING"},
        {"trigger": "won", "source": "MOVING", "dest": "DONE"},
        {"trigger": ["limit", "failed", "truncated", "aborted"], "source": "*", "dest": "DONE"},
    ],
}


async def test_an_environment_that_steps(make_spec, run_spec) -> None:
    ran = await run_spec(
        make_spec(
            ["left", "right"], machine=STEPPING, environment={"use": "code_for_tests:Board"}, user=None, tools=None
        )
    )
    trajectory = ran.only
    assert [turn.rewards for turn in trajectory.turns] == [{}, {"reward": 1.0, "final": 0.25}]
    assert trajectory.outcome.solved
    assert trajectory.messages[1].text == "Board a."


@pytest.mark.parametrize("fail", ["event", "speaks"])
async def test_a_step_is_held_to_what_it_declares(make_spec, run_spec, fail) -> None:
    ran = await run_spec(
        make_spec(
            ["left"],
            machine=STEPPING,
            environment={"use": "code_for_tests:Board", "with": {"fail": fail}},
            user=None,
            tools=None,
        )
    )
    failure = ran.only.outcome.failure
    assert failure is not None
    assert (failure.kind, failure.blame) == ("environment_bad_reply", "environment")


async def test_rules_move_rewards_at_user_turns(make_spec, run_spec) -> None:
    rules = [
        {
            "at": "AWAITING_USER_FEEDBACK",
            "when": "feedback.solved && turns.assistant > 1",
            "op": "transfer", "turn": "last", "to": "previous", "share": 0.3,
        }
    ]  # fmt: skip
    ran = await run_spec(make_spec(["no", "It is 42."], rewards={"reassign": rules}))
    first, second = (turn.rewards for turn in ran.only.turns)
    assert first == {"reward": -0.1, "correct": 0.3}
    assert second == {"correct": 0.7}
    moved = [(posting.turn, posting.delta, posting.source) for posting in ran.only.postings if posting.op == "transfer"]
    assert moved == [(1, -0.3, "rule:0"), (0, 0.3, "rule:0")]


async def test_a_user_and_a_rule_address_turns_by_state_and_event(make_spec, run_spec) -> None:
    machine = {
        "initial": "PENDING",
        "states": {
            "PENDING": {"action": "reset"},
            "DRAFTING": {"action": "generate"},
            "CALLING": {"action": "call_tools"},
            "ASKING": {"action": "ask_user"},
            "REVISING": {"action": "generate"},
            "DONE": {"action": "score", "final": True},
        },
        "transitions": [
            {"trigger": "ready", "source": "PENDING", "dest": "DRAFTING"},
            {"trigger": "tool_calls", "source": "DRAFTING", "dest": "CALLING"},
            {"trigger": "results", "source": "CALLING", "dest": "DRAFTING"},
            {"trigger": "answered", "source": ["DRAFTING", "REVISING"], "dest": "ASKING"},
            {"trigger": "feedback", "source": "ASKING", "dest": "REVISING"},
            {
                "trigger": ["satisfied", "malformed", "truncated", "aborted", "tool_calls"],
                "source": "*",
                "dest": "DONE",
            },
        ],
    }
    rule = {"at": "DONE", "turn": "last", "to": {"first": "tool_calls"}, "share": 0.5, "when": "tools.calls > 0"}
    spec = make_spec(
        [ADD, "It is 41.", "It is 40.", "It is 42."],
        machine=machine,
        user={"use": "code_for_tests:Editor"},
        environment=None,
        rewards={"reassign": [rule]},
    )
    ran = await run_spec(spec)
    assert ran.only.outcome.failure is None
    assert [turn.rewards.get("reward") for turn in ran.only.turns] == [0.75, 1.25, 0.25, 0.75]
    assert [(one.turn, one.delta, one.at_turn, one.source) for one in ran.only.postings] == [
        (1, 1.0, 2, "user"),
        (3, 2.0, 3, "user"),
        (3, -0.5, 3, "user"),
        (1, 0.5, 3, "user"),
        (1, -0.25, 3, "user"),
        (2, 0.25, 3, "user"),
        (3, -0.75, 3, "rule:0"),
        (0, 0.75, 3, "rule:0"),
    ]
    replayer = Replayer(ran.loaded, ran.template, ran.store)
    assert (await replayer.check(ran.only, ran.store.task("a"))).difference is None
    replayer.close()


async def test_an_unbounded_machine_is_stopped(make_spec, run_spec, monkeypatch) -> None:
    monkeypatch.setattr("engine.episode.executor.MAX_STEPS", 20)
    machine = {
        "initial": "A",
        "states": {"A": {"action": "code_for_tests:measure"}, "DONE": {"final": True}},
        "transitions": [
            {"trigger": ["short", "long"], "source": "A", "dest": "A"},
            {"trigger": ["failed", "limit"], "source": "A", "dest": "DONE"},
        ],
    }
    ran = await run_spec(make_spec(["x"], machine=machine, user=None, tools=None))
    failure = ran.only.outcome.failure
    assert failure is not None
    assert (failure.kind, failure.blame) == ("unbounded", "spec")


async def test_seeds_differ_by_sample_and_repeat_by_run(make_spec, run_spec) -> None:
    path = make_spec(["It is 42."], rollout={"samples_per_task": 3})
    first, second = await run_spec(path), await run_spec(path)
    seeds = [trajectory.seed for trajectory in first.trajectories.values()]
    assert len(set(seeds)) == 3
    assert seeds == [trajectory.seed for trajectory in second.trajectories.values()]


@pytest.mark.parametrize(
    "written", ["count(things=(1, 2))", "count(things={1, 2})", "count(things=b'ab')", "count(things=1j)"]
)
async def test_arguments_that_json_cannot_hold_are_no_fault(make_spec, run_spec, written) -> None:
    ran = await run_spec(
        make_spec(
            [f"<call>{written}</call>", "It is 42."],
            model={"tool_calls": "plain"},
            tools=[{"use": "code_for_tests:count"}],
        )
    )
    assert ran.result.faults == []
    assert ran.only.outcome.solved


async def test_facts_that_json_cannot_hold_are_the_users_fault(make_spec, run_spec) -> None:
    ran = await run_spec(make_spec(["no"], user={"use": "code_for_tests:Critic", "with": {"fail": "facts"}}))
    failure = ran.only.outcome.failure
    assert failure is not None
    assert (failure.kind, failure.blame) == ("not_json", "user")
    assert ran.only.outcome.state == "DONE"
    assert ran.only.facts == {}


@pytest.mark.parametrize(
    ("count", "turn", "words"),
    [
        (1000, "last", None),
        (1001, "last", "score: 1001 rewards in one answer; at most 1000 are allowed"),
        pytest.param(
            20_000, "last", "score: 20000 rewards in one answer; at most 1000 are allowed", marks=pytest.mark.slow
        ),
        pytest.param(
            1000,
            "all",
            "score: the rewards of one answer touch turns 10010 times; at most 10000 are allowed",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_more_rewards_than_one_answer_may_hold_are_refused(make_spec, run_spec, count, turn, words) -> None:
    scorer = {"use": "code_for_tests:generous", "with": {"count": count, "turn": turn}}
    path = make_spec(
        ["no"] * 11,
        rewards={"scorer": scorer},
        limits={"user_turns": 20, "assistant_turns": 11},
        user={"use": "code_for_tests:Critic"},
    )
    ran = await run_spec(path)
    failure = ran.only.outcome.failure
    assert len(ran.only.turns) == 11
    if words is None:
        assert failure is None
        assert ran.only.outcome.rewards["r999"] == 1.0
    else:
        assert (failure.kind, failure.blame) == ("ledger_error", "environment")
        assert words in failure.message
    replayer = Replayer(ran.loaded, ran.template, ran.store)
    assert (await replayer.check(ran.only, ran.store.task("a"))).difference is None
    replayer.close()


async def test_the_turn_that_solved_it_is_written_down(
    make_spec: Callable[..., Path], run_spec: Callable[..., Any]
) -> None:
    ran = await run_spec(make_spec(["It is 40.", "It is 41.", "It is 42."]))
    assert (ran.only.outcome.solved, ran.only.outcome.solved_turn) == (True, 2)
    never = await run_spec(make_spec(["It is 40."] * 3, limits={"user_turns": 2}))
    assert (never.only.outcome.solved, never.only.outcome.solved_turn) == (False, None)
