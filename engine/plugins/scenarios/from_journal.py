"""The parts of a scenario from an episode's records: replies, scripted answers, the task, and the expected result.

Invariant: a part is plain values, as they are written in a file of scenarios; a key that is empty or has its default is left out.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.actions.calling.workers import Workers
from engine.actions.objects import ObjectBuilder
from engine.backends.scripted import write_reply
from engine.errors import BackendError, EngineError, SpecError, StoreError
from engine.limits import EPISODE_SECONDS
from engine.machine.machine import Machine, resolved_machine
from engine.schemas.journal import (
    FailureRecord,
    GenerationRecord,
    LimitRecord,
    ResetRecord,
    ScoreRecord,
    StepRecord,
    ToolsRecord,
    UserRecord,
)
from engine.schemas.message import ImagePart, Message
from engine.schemas.script import ScriptedReply
from engine.spec.conversation import conversation_of
from engine.spec.rows.sources import Row
from engine.spec.tasks import load_tasks, task_of

if TYPE_CHECKING:
    from engine.schemas.environment import Task
    from engine.schemas.generation import Generation
    from engine.schemas.journal import JournalEntry
    from engine.schemas.message import ToolResult
    from engine.schemas.trajectory import Failure, Trajectory
    from engine.spec.load import LoadedSpec
    from engine.store.reader import RunReader
    from engine.tokens.template import ChatTemplate

_CALLED_FOR_REAL = ("invalid_arguments", "unknown_tool", "limit", "malformed")
"""Errors of tool calls that the engine answers; the tool is not called."""


@dataclass
class ScriptWriter:
    """Writes the script of one episode.

    Args:
        loaded: The spec.
        template: The model's chat format.
        store: The run, which holds the images.
        everything: Script every answer of the spec's code, not only those that cannot be given again.
    """

    loaded: LoadedSpec
    template: ChatTemplate
    store: RunReader
    everything: bool = False
    notes: list[str] = field(default_factory=list)
    scripted: set[str] = field(default_factory=set)
    """What is scripted: `user`, `environment`, `scorer`, `steps`, `tool <name>`."""

    def write(self, trajectory: Trajectory, journal: Sequence[JournalEntry], task: Task) -> dict[str, Any]:
        """Return `replies`, `tools`, `user`, `environment`, `scorer`, `steps` and `out_of_time`."""
        spec = self.loaded.spec
        states = resolved_machine(spec).states
        user = spec.users_by_name.get(task.user or "") if spec.users_by_name else None
        asks_user = user is not None and (self.everything or user.model_played or user.effects == "external")
        environment = spec.environment
        asks_environment = environment is not None and (self.everything or environment.effects == "external")
        scorer = spec.rewards.scorer
        asks_scorer = scorer is not None and (self.everything or scorer.model_played)
        external = self._external_tools(task)
        made: dict[str, Any] = {"replies": [], "tools": [], "user": [], "environment": {}, "steps": {}}
        visits: dict[str, int] = {}
        retried: dict[str, Any] = {}
        for entry in journal:
            record, action = entry.record, states[entry.state].action or ""
            visits[entry.state] = visits.get(entry.state, 0) + 1
            if isinstance(record, GenerationRecord):
                message = _reply_of(trajectory, len(made["replies"]))
                made["replies"].append(retried | self._reply(record.generation, message, len(made["replies"])))
                retried = {}
            elif isinstance(record, UserRecord) and asks_user and not record.canned:
                made["user"].append(_plain_text(self._plain(record.turn)))
                self.scripted.add("user")
            elif isinstance(record, ToolsRecord):
                made["tools"] += self._results(record.results, external)
            elif isinstance(record, ResetRecord) and asks_environment:
                made["environment"]["reset"] = self._plain(record.reset)
                self.scripted.add("environment")
            elif isinstance(record, StepRecord) and (self.everything or (asks_environment and action == "step")):
                made["steps"].setdefault(entry.state, []).append(self._plain(record.step))
                self.scripted.add("steps")
            elif isinstance(record, ScoreRecord):
                own = [each for each in record.rewards if each.source == "environment"]
                if asks_environment:
                    made["environment"]["score"] = {"rewards": [self._plain(each) for each in own]}
                if asks_scorer:
                    others = [self._plain(each) for each in record.rewards if each not in own]
                    made["scorer"] = {"rewards": others}
                    self.scripted.add("scorer")
            elif isinstance(record, LimitRecord) and record.limit == EPISODE_SECONDS.name:
                made["out_of_time"] = {"state": entry.state, "visit": visits[entry.state]}
            elif isinstance(record, FailureRecord):
                failure = record.failure
                if action == "generate":
                    retried = _failed_reply(failure, retried)
                elif action == "call_tools" and made["replies"]:
                    calls = _reply_of(trajectory, len(made["replies"]) - 1).tool_calls
                    made["tools"] += [
                        {"tool": each.name, "times": 1, **_fault(failure)} for each in calls if each.name in external
                    ]
                elif action == "ask_user" and asks_user:
                    made["user"].append(_fault(failure))
                elif action == "reset" and asks_environment:
                    made["environment"]["reset"] = _fault(failure)
                elif action == "step" and asks_environment:
                    made["steps"].setdefault(entry.state, []).append(_fault(failure))
        if retried:
            made["replies"].append(retried)
        return {key: value for key, value in made.items() if value or key == "replies"}

    def _external_tools(self, task: Task) -> set[str]:
        """The names of the tools whose results are scripted."""
        return asyncio.run(self._tools(task))

    async def _tools(self, task: Task) -> set[str]:
        workers = Workers(1)
        try:
            builder = ObjectBuilder(self.loaded, Machine(resolved_machine(self.loaded.spec)), workers)
            objects = await builder.open(task)
            try:
                tools = objects.toolbox.tools.values() if objects.toolbox else []
                return {tool.shape.name for tool in tools if self.everything or tool.effects == "external"}
            finally:
                await builder.close(objects)
        except EngineError:
            return set()  # the episode cannot be built, which is then its result
        finally:
            workers.close()

    def _results(self, results: Sequence[ToolResult], external: set[str]) -> list[dict[str, Any]]:
        made = []
        for result in results:
            if result.name not in external or result.error in _CALLED_FOR_REAL:
                continue
            self.scripted.add(f"tool {result.name}")
            one: dict[str, Any] = {"tool": result.name, "times": 1}
            if result.error == "timeout":
                one["timeout"] = True
            elif result.error == "raised":
                one["error"] = str(result.content).removeprefix(f"`{result.name}` failed: ")
            elif isinstance(result.content, str):
                one["result"] = result.content
            else:
                one["content"] = [self._part(part) for part in result.content]
            one["rewards"] = [self._plain(each) for each in result.rewards]
            one["facts"] = result.facts
            made.append({key: value for key, value in one.items() if value or key in ("result", "error")})
        return made

    def _reply(self, generation: Generation, message: Message, turn: int) -> dict[str, Any]:
        finish = generation.finish.type
        ids = generation.output_ids.tolist()
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        if not ids:
            if generation.reasoning:
                self.notes.append(f"turn {turn}: the backend gave its reasoning apart from the text; it is left out")
            return _short({"text": generation.text or "", "tool_calls": calls, "finish": finish})
        # A stop string is among the tokens of a reply, and no stop token comes after them.
        ended = finish == "stop" and ids[-1] in self.template.stop_set
        whole, bare = ("stop", ids[:-1]) if ended else ("length", ids)
        choices = [{"text": message.text, "tool_calls": calls}] if calls else []
        choices.append({"text": self.template.decode(bare)})
        for choice in choices:
            try:
                if write_reply(self.template, ScriptedReply.model_validate(choice | {"finish": whole})) == ids:
                    return _short(choice | {"finish": finish})
            except BackendError:
                continue
        self.notes.append(f"turn {turn} is given as token ids: its text, written again, gives other ids")
        return _short({"tokens": ids, "finish": finish})

    def _plain(self, value: Any) -> dict[str, Any]:
        """An answer without its defaults, with the bytes of its images."""
        plain: dict[str, Any] = (
            value.model_dump(mode="json", exclude_defaults=True) if hasattr(value, "model_dump") else value.plain()
        )
        content = getattr(value, "content", None)
        if isinstance(content, list):
            plain["content"] = [self._part(part) for part in content]
        if getattr(value, "messages", None):
            plain["messages"] = [self._message(message) for message in value.messages]
        return plain

    def _message(self, message: Message) -> dict[str, Any]:
        plain = {key: item for key, item in message.plain().items() if item not in (None, [], "")}
        if not isinstance(message.content, str):
            plain["content"] = [self._part(part) for part in message.content]
        return plain

    def _part(self, part: Any) -> dict[str, Any]:
        if not isinstance(part, ImagePart):
            return {"type": "text", "text": part.text}
        return {"type": "image", "image": with_bytes(part.image, self.store)}


def with_bytes(image: str, store: RunReader) -> str:
    """A `data:` URI of an image of the run; any other text as it is."""
    if not image.startswith("sha256:"):
        return image
    stored = store.image(image)
    return f"data:{stored.mime};base64,{b64encode(stored.data).decode()}"


def _reply_of(trajectory: Trajectory, turn: int) -> Message:
    replies = [message for message in trajectory.messages if message.role == "assistant"]
    return replies[len(replies) - len(trajectory.turns) + turn]


def _short(reply: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in reply.items()
        if not (key == "finish" and value == "stop") and not (key == "tool_calls" and not value)
    }


def _plain_text(turn: dict[str, Any]) -> dict[str, Any] | str:
    return turn["content"] if turn.keys() == {"content"} and isinstance(turn["content"], str) else turn


def _failed_reply(failure: Failure, before: Mapping[str, Any]) -> dict[str, Any]:
    """A reply that raises; a context that is too small needs no script, because the chat format's context is the same."""
    if failure.kind == "context_overflow":
        return {"text": ""}
    return {"error": failure.message, "times": before.get("times", 0) + 1}


def _fault(failure: Failure) -> dict[str, Any]:
    if failure.kind.endswith("_timeout"):
        return {"timeout": True}
    return {"invalid": True} if failure.kind.endswith(("_bad_reply", "_bad_result")) else {"error": failure.message}


# ---- the task


def task_of_scenario(task: Task, loaded: LoadedSpec, store: RunReader) -> tuple[Any, list[str]]:
    """Return the key `task` of a scenario: the id of a row of the spec, or a whole row; and notes.

    A row stands by itself, so it is preferred, unless the rows are in the spec anyway.

    Raises:
        StoreError: neither gives the recorded task.
    """
    row = _restored(task.fields, store)
    spec = loaded.spec.tasks
    if spec.source != "inline":
        given = {source: row[name] for name, source in spec.map.items() if name in row} if spec.map else row
        try:
            made = task_of(Row(number=1, fields=given, origin=None), 0, spec, loaded)
            if _same_task(task, made):
                return given, []
        except SpecError:
            pass
    try:
        found = next((each for each in load_tasks(loaded) if each.id == task.id), None)
    except SpecError as error:
        raise StoreError(
            f"task `{task.id}`: the spec's tasks cannot be read: {error.diagnostics[0].message}"
        ) from error
    if found is None or not _same_task(task, found):
        what = "is not among the spec's tasks" if found is None else "has other fields in the spec's tasks now"
        raise StoreError(f"task `{task.id}` {what}, so no scenario can name it")
    return task.id, []


def _same_task(stored: Task, other: Task) -> bool:
    return (stored.id, stored.user) == (other.id, other.user) and _same(stored.fields, other.fields)


def _same(stored: Any, other: Any) -> bool:
    """Whether two values are equal; an image of the store, known by its digest, equals any text."""
    if isinstance(stored, str) and stored.startswith("sha256:"):
        return isinstance(other, str)
    if isinstance(stored, dict) and isinstance(other, dict):
        return stored.keys() == other.keys() and all(_same(stored[key], other[key]) for key in stored)
    if isinstance(stored, list) and isinstance(other, list | tuple):
        return len(stored) == len(other) and all(map(_same, stored, other))
    return bool(stored == other)


def _restored(value: Any, store: RunReader) -> Any:
    if isinstance(value, str):
        return with_bytes(value, store)
    if isinstance(value, dict):
        return {key: _restored(item, store) for key, item in value.items()}
    return [_restored(item, store) for item in value] if isinstance(value, list) else value


# ---- the expected result


def expected_of(
    trajectory: Trajectory, journal: Sequence[JournalEntry], loaded: LoadedSpec, script: ScriptWriter, task: Task
) -> dict[str, Any]:
    """Return the key `expect`: path, outcome, rewards of each turn, limits, messages and facts.

    Of messages that are scripted only the role is expected.
    """
    outcome = trajectory.outcome
    limits = [entry.record.limit for entry in journal if isinstance(entry.record, LimitRecord)]
    expected: dict[str, Any] = {
        "states": [resolved_machine(loaded.spec).initial, *(dest for _, _, dest in trajectory.path)],
        "events": [event for _, event, _ in trajectory.path],
        "outcome": {
            "state": outcome.state,
            "event": outcome.event,
            "limit": outcome.limit,
            "solved": outcome.solved,
            "reward": outcome.reward,
        },
        "rewards": [dict(turn.rewards) for turn in trajectory.turns],
        "limits": limits,
        "messages": [_expected_message(each, script.scripted) for each in _said(trajectory, loaded, task)],
        "facts": trajectory.facts,
    }
    if any(turn.end > turn.start for turn in trajectory.turns):  # a backend without ids gives nothing to train on
        expected["outcome"]["trainable"] = outcome.trainable
    if outcome.failure is not None:
        expected["outcome"]["failure"] = _expected_failure(outcome.failure)
    return {key: value for key, value in expected.items() if value or key in ("limits", "rewards")}


def _said(trajectory: Trajectory, loaded: LoadedSpec, task: Task) -> list[Message]:
    """The messages after the spec's prompt."""
    source = loaded.spec.conversation
    opening = len(loaded.spec.messages if source is None else conversation_of(task.fields, source))
    return trajectory.messages[opening:]


def _expected_message(message: Message, scripted: set[str]) -> dict[str, Any]:
    if message.role == "assistant":
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        return {"role": "assistant"} | ({"calls": calls} if calls else {})
    given = message.role == "tool" and f"tool {message.name}" in scripted
    given = given or (message.role != "tool" and bool(scripted & {"user", "environment", "steps"}))
    return {"role": message.role} if given else {"role": message.role, "content": message.text}


def _expected_failure(failure: Failure) -> dict[str, Any]:
    backend = failure.blame == "backend" and failure.kind != "context_overflow"
    kind = "scripted_error" if backend else failure.kind
    return {"kind": kind, "blame": failure.blame, "state": failure.state, "turn": failure.turn}
