"""Compares the result of a scenario with its expectation.

Invariant: only what a scenario states is compared, with one exception: a failure that it does not state is a
difference. A difference is shown as a diff: `-` is expected, `+` is the result, other lines agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import orjson

from engine.plugins.scenarios.schema import ANYTHING, ExpectedFailure, ExpectedMessage

if TYPE_CHECKING:
    from engine.plugins.scenarios.play import Played
    from engine.plugins.scenarios.schema import Expectation, ExpectedCall, ExpectedOutcome, TurnRewards
    from engine.schemas.message import Message, ToolCall
    from engine.schemas.trajectory import Failure

TOLERANCE = 1e-9
"""Rewards are equal if they differ by at most this."""

Mark = Literal[" ", "-", "+"]
Line = tuple[Mark, str]
_Expected = TypeVar("_Expected")
_Actual = TypeVar("_Actual")


@dataclass(frozen=True)
class Difference:
    """One difference between expectation and result."""

    what: str
    """`states`, `events`, `outcome`, `rewards`, `limits`, `messages`, `facts` or `counts`."""
    lines: list[Line]

    @property
    def text(self) -> str:
        """Return the diff, with a mark before each line."""
        return "\n".join(f"{mark}{text}" for mark, text in self.lines)


def compare(expect: Expectation, played: Played) -> list[Difference]:
    """Return all differences, in the order of the expectation's fields."""
    trajectory = played.trajectory
    found: dict[str, list[Line]] = {}
    if expect.states is not None:
        found["states"] = _listed(expect.states, played.states)
    if expect.events is not None:
        found["events"] = _listed(expect.events, [event for _, event, _ in trajectory.path])
    found["outcome"] = _outcome(expect.outcome, played)
    if expect.rewards is not None:
        found["rewards"] = _rewards(expect.rewards, [turn.rewards for turn in trajectory.turns])
    if expect.limits is not None:
        found["limits"] = _listed(expect.limits, played.limits)
    if expect.messages is not None:
        found["messages"] = _messages(expect.messages, trajectory.messages[played.prompt :])
    if expect.facts is not None:
        found["facts"] = _fields(expect.facts, trajectory.facts)
    if expect.counts is not None:
        found["counts"] = _fields(expect.counts, trajectory.counts)
    return [Difference(what, lines) for what, lines in found.items() if any(mark != " " for mark, _ in lines)]


# ---- lists


def _listed(expected: Sequence[str], actual: Sequence[str]) -> list[Line]:
    return align(expected, actual, lambda one, other: one == other, lambda one: [one], lambda one: [one])


def align(
    expected: Sequence[_Expected],
    actual: Sequence[_Actual],
    fits: Callable[[_Expected, _Actual], bool],
    show_expected: Callable[[_Expected], list[str]],
    show_actual: Callable[[_Actual], list[str]],
) -> list[Line]:
    """Return the shortest diff between two lists; `...` among the expected items matches any number of items."""
    rows, columns = len(expected), len(actual)
    cost = [[0] * (columns + 1) for _ in range(rows + 1)]
    steps: dict[tuple[int, int], tuple[int, int]] = {}
    for row in range(rows, -1, -1):
        for column in range(columns, -1, -1):
            if (row, column) == (rows, columns):
                continue
            ways = []
            free = row < rows and expected[row] == ANYTHING
            if row < rows and column < columns and not free and fits(expected[row], actual[column]):
                ways.append((cost[row + 1][column + 1], (1, 1)))
            if row < rows:
                ways.append((cost[row + 1][column] + (not free), (1, 0)))
            if column < columns:
                ways.append((cost[row][column + 1] + (not free), (0, 1)))
            cost[row][column], steps[row, column] = min(ways, key=lambda way: way[0])
    lines: list[Line] = []
    row = column = 0
    while (row, column) in steps:
        down, right = steps[row, column]
        free = row < rows and expected[row] == ANYTHING
        if right:
            mark: Mark = " " if down or free else "+"
            lines += [(mark, line) for line in show_actual(actual[column])]
        elif not free:
            lines += [("-", line) for line in show_expected(expected[row])]
        row, column = row + down, column + right
    return lines


# ---- outcome and rewards


def _outcome(expected: ExpectedOutcome | None, played: Played) -> list[Line]:
    outcome = played.trajectory.outcome
    lines: list[Line] = []
    stated = expected.model_fields_set if expected is not None else frozenset()
    for name in ("state", "event", "limit", "solved", "trainable"):
        if name in stated:
            lines += _field(name, getattr(expected, name), getattr(outcome, name))
    if expected is not None and "reward" in stated and expected.reward is not None:
        same = _close(expected.reward, outcome.reward)
        lines += _pair(same, f"reward: {_number(expected.reward)}", f"reward: {_number(outcome.reward)}")
    return lines + _failure(expected.failure if expected is not None else None, outcome.failure)


def _failure(expected: ExpectedFailure | None, actual: Failure | None) -> list[Line]:
    if expected is None and actual is None:
        return []
    if expected is None or actual is None:
        wanted = "failure: none" if expected is None else f"failure: {_stated(expected)}"
        came = f"failure: {actual.kind} (blame {actual.blame}) in {actual.state}, turn {actual.turn}" if actual else ""
        lines: list[Line] = [("-", wanted), ("+", came or "failure: none")]
        return lines + ([("+", f"  {line}") for line in actual.message.splitlines()] if actual else [])
    lines = []
    for name in ("kind", "blame", "state", "turn"):
        if (wanted_value := getattr(expected, name)) is not None:
            lines += _field(f"failure.{name}", wanted_value, getattr(actual, name))
    if expected.contains is not None:
        same = expected.contains in actual.message
        lines += _pair(
            same,
            f"failure.message contains {_quoted(expected.contains)}",
            f"failure.message: {_quoted(actual.message)}",
        )
    return lines


def _stated(expected: ExpectedFailure) -> str:
    said = expected.model_dump(exclude_none=True)
    return ", ".join(f"{name} {value}" for name, value in said.items()) or "any"


def _rewards(expected: Sequence[TurnRewards], actual: Sequence[dict[str, float]]) -> list[Line]:
    lines: list[Line] = []
    for turn in range(max(len(expected), len(actual))):
        came = actual[turn] if turn < len(actual) else None
        shown = f"turn {turn}: {_named(came)}" if came is not None else ""
        if turn >= len(expected):
            lines.append(("+", shown))
            continue
        wanted = expected[turn]
        if came is None:
            lines.append(("-", f"turn {turn}: {_wanted(wanted)}"))
        elif isinstance(wanted, int | float):
            total = sum(came.values())
            words = f"turn {turn}: {_number(total)}" + (f" ({_named(came)})" if came else "")
            lines += _pair(_close(wanted, total), f"turn {turn}: {_number(wanted)}", words)
        else:
            lines += _pair(_same_rewards(wanted, came), f"turn {turn}: {_wanted(wanted)}", shown)
    return lines


def _same_rewards(wanted: dict[str, float] | None, came: dict[str, float]) -> bool:
    if wanted is None:
        return True
    return all(_close(wanted.get(name, 0.0), came.get(name, 0.0)) for name in {*wanted, *came})


def _wanted(wanted: TurnRewards) -> str:
    if wanted is None:
        return "anything"
    return _number(wanted) if isinstance(wanted, int | float) else _named(wanted)


def _named(rewards: dict[str, float]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in sorted(rewards.items())) or "no reward"


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=0.0, abs_tol=TOLERANCE)


def _number(value: float) -> str:
    return f"{value:.10g}"


# ---- messages


def _messages(expected: Sequence[ExpectedMessage], actual: Sequence[Message]) -> list[Line]:
    wanted = [ANYTHING if one.role == ANYTHING else one for one in expected]
    return align(wanted, actual, _fits, _show_expected, _show_message)


def _fits(expected: ExpectedMessage | str, message: Message) -> bool:
    if isinstance(expected, str):
        return False  # `...` equals no message: `align` handles it
    if expected.role != message.role:
        return False
    if expected.content is not None and expected.content != message.text:
        return False
    if expected.contains is not None and expected.contains not in message.text:
        return False
    return expected.calls is None or (
        len(expected.calls) == len(message.tool_calls)
        and all(_same_call(one, other) for one, other in zip(expected.calls, message.tool_calls, strict=True))
    )


def _same_call(expected: ExpectedCall, call: ToolCall) -> bool:
    return expected.name == call.name and expected.arguments in (None, call.arguments)


def _show_expected(expected: ExpectedMessage | str) -> list[str]:
    if isinstance(expected, str):
        return [expected]
    if expected.contains is not None:
        head = [f"{expected.role}: … {line} …" for line in expected.contains.splitlines()]
    elif expected.content is not None:
        head = _said(expected.role, expected.content)
    else:
        head = [f"{expected.role}: …"]
    return [*head, *(_call(call.name, call.arguments) for call in expected.calls or [])]


def _show_message(message: Message) -> list[str]:
    return [*_said(message.role, message.text), *(_call(call.name, call.arguments) for call in message.tool_calls)]


def _said(role: str, text: str) -> list[str]:
    first, *rest = text.split("\n")
    return [f"{role}: {first}", *(f"  {line}" for line in rest)]


def _call(name: str, arguments: dict[str, Any] | None) -> str:
    shown = "…" if arguments is None else ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"  → {name}({shown})"


# ---- fields


def _fields(expected: dict[str, Any], actual: dict[str, Any]) -> list[Line]:
    lines: list[Line] = []
    for name, value in expected.items():
        if name in actual:
            lines += _field(name, value, actual[name])
        else:
            lines += [("-", f"{name}: {_quoted(value)}"), ("+", f"{name}: not there")]
    return lines


def _field(name: str, expected: Any, actual: Any) -> list[Line]:
    return _pair(expected == actual, f"{name}: {_quoted(expected)}", f"{name}: {_quoted(actual)}")


def _pair(same: bool, expected: str, actual: str) -> list[Line]:
    return [(" ", actual)] if same else [("-", expected), ("+", actual)]


def _quoted(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str) and value and "\n" not in value:
        return value
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY).decode()
