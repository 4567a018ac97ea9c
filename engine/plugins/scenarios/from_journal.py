"""The parts of a scenario from an episode's records: replies, scripted answers, the task, and the expected result.

Invariant: a part is plain values, as they are written in a file of scenarios; a key that is empty or has its default is
left out.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.actions.calling.workers import Workers
from engine.actions.objects import ObjectBuilder
from engine.backends.scripted import write_reply
from engine.errors import BackendError, EngineError, SpecError, StoreError
from engine.limits import EPISODE_SECONDS
from engine.machine.machine import Machine, resolved_machine
from engine.plugins.scenarios.play import prompt_length
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
from engine.spec.rows.row import Row
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
        external = asyncio.run(self._tools(task))
        script: dict[str, Any] = {"replies": [], "tools": [], "user": [], "environment": {}, "steps": {}}
        visits: dict[str, int] = {}
        retried: dict[str, Any] = {}
        for entry in journal:
            record, action = entry.record, states[entry.state].action or ""
            visits[entry.state] = visits.get(entry.state, 0) + 1
            if isinstance(record, GenerationRecord):
                message = _reply_of(trajectory, len(script["replies"]))
                script["replies"].append(retried | self._reply(record.generation, message, len(script["replies"])))
                retried = {}
            elif isinstance(record, UserRecord) and asks_user and not record.canned:
                script["user"].append(_plain_text(self._plain(record.turn)))
                self.scripted.add("user")
            elif isinstance(record, ToolsRecord):
                script["tools"] += self._results(record.results, external)
            elif isinstance(record, ResetRecord) and asks_environment:
                script["environment"]["reset"] = self._plain(record.reset)
                self.scripted.add("environment")
            elif isinstance(record, StepRecord) and (self.everything or (asks_environment and action == "step")):
                script["steps"].setdefault(entry.state, []).append(self._plain(record.step))
                self.scripted.add("steps")
            elif isinstance(record, ScoreRecord):
                by_environment = [reward for reward in record.rewards if reward.source == "environment"]
                if asks_environment:
                    script["environment"]["score"] = {"rewards": [self._plain(reward) for reward in by_environment]}
                if asks_scorer:
                    others = [self._plain(reward) for reward in record.rewards if reward not in by_environment]
                    script["scorer"] = {"rewards": others}
                    self.scripted.add("scorer")
            elif isinstance(record, LimitRecord) and record.limit == EPISODE_SECONDS.name:
                script["out_of_time"] = {"state": entry.state, "visit": visits[entry.state]}
            elif isinstance(record, FailureRecord):
                failure = record.failure
                if action == "generate" and failure.kind == "context_overflow":
                    retried = {"text": ""}  # it fails again: the chat format's context is the same
                elif action == "generate":
                    retried = {"error": failure.message, "times": retried.get("times", 0) + 1}
                elif action == "call_tools" and script["replies"]:
                    calls = _reply_of(trajectory, len(script["replies"]) - 1).tool_calls
                    script["tools"] += [
                        {"tool": call.name, "times": 1, **_fault(failure)} for call in calls if call.name in external
                    ]
                elif action == "ask_user" and asks_user:
                    script["user"].append(_fault(failure))
                elif action == "reset" and asks_environment:
                    script["environment"]["reset"] = _fault(failure)
                elif action == "step" and asks_environment:
                    script["steps"].setdefault(entry.state, []).append(_fault(failure))
        if retried:
            script["replies"].append(retried)
        return {key: value for key, value in script.items() if value or key == "replies"}

    async def _tools(self, task: Task) -> set[str]:
        """The names of the tools whose results are scripted."""
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
        scripted = []
        for result in results:
            if result.name not in external or result.error in _CALLED_FOR_REAL:
                continue
            self.scripted.add(f"tool {result.name}")
            answer: dict[str, Any] = {"tool": result.name, "times": 1}
            if result.error == "timeout":
                answer["timeout"] = True
            elif result.error == "raised":
                answer["error"] = str(result.content).removeprefix(f"`{result.name}` failed: ")
            elif isinstance(result.content, str):
                answer["result"] = result.content
            else:
                answer["content"] = [self._part(part) for part in result.content]
            answer["rewards"] = [self._plain(reward) for reward in result.rewards]
            answer["facts"] = result.facts
            scripted.append({key: value for key, value in answer.items() if value or key in ("result", "error")})
        return scripted

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
        finish_written, bare = ("stop", ids[:-1]) if ended else ("length", ids)
        choices = [{"text": message.text, "tool_calls": calls}] if calls else []
        choices.append({"text": self.template.decode(bare)})
        for choice in choices:
            try:
                if write_reply(self.template, ScriptedReply.model_validate(choice | {"finish": finish_written})) == ids:
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


def _fault(failure: Failure) -> dict[str, Any]:
    if failure.kind.endswith("_timeout"):
        return {"timeout": True}
    return {"invalid": True} if failure.kind.endswith(("_bad_reply", "_bad_result")) else {"error": failure.message}


# ---- the task


def task_of_scenario(task: Task, loaded: LoadedSpec, store: RunReader) -> Any:
    """Return the key `task` of a scenario: the id of a row of the spec, or a whole row.

    A row stands by itself, so it is preferred, unless the rows are in the spec anyway.

    Raises:
        StoreError: neither gives the recorded task.
    """
    row = with_texts(task.fields, lambda text: with_bytes(text, store))
    spec = loaded.spec.tasks
    if spec.source != "inline":
        fields = {source: row[name] for name, source in spec.map.items() if name in row} if spec.map else row
        try:
            if _same_task(task, task_of(Row(number=1, fields=fields, origin=None), 0, spec, loaded)):
                return fields
        except SpecError:
            pass
    try:
        other = next((other for other in load_tasks(loaded) if other.id == task.id), None)
    except SpecError as error:
        raise StoreError(
            f"task `{task.id}`: the spec's tasks cannot be read: {error.diagnostics[0].message}"
        ) from error
    if other is None or not _same_task(task, other):
        what = "is not among the spec's tasks" if other is None else "has other fields in the spec's tasks now"
        raise StoreError(f"task `{task.id}` {what}, so no scenario can name it")
    return task.id


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


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Plain values with each text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: with_texts(item, change) for key, item in value.items()}
    return [with_texts(item, change) for item in value] if isinstance(value, list) else value


# ---- the expected result


def expected_of(
    trajectory: Trajectory, journal: Sequence[JournalEntry], loaded: LoadedSpec, script: ScriptWriter, task: Task
) -> dict[str, Any]:
    """Return the key `expect`: path, outcome, rewards of each turn, limits, messages and facts.

    Of messages that are scripted only the role is expected.
    """
    outcome = trajectory.outcome
    said = trajectory.messages[prompt_length(loaded.spec, task) :]
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
        "messages": [_expected_message(message, script.scripted) for message in said],
        "facts": trajectory.facts,
    }
    if any(turn.end > turn.start for turn in trajectory.turns):  # a backend without ids gives nothing to train on
        expected["outcome"]["trainable"] = outcome.trainable
    if outcome.failure is not None:
        failure = outcome.failure
        by_backend = failure.blame == "backend" and failure.kind != "context_overflow"
        expected["outcome"]["failure"] = {
            "kind": "scripted_error" if by_backend else failure.kind,
            "blame": failure.blame,
            "state": failure.state,
            "turn": failure.turn,
        }
    return {key: value for key, value in expected.items() if value or key in ("limits", "rewards")}


def _expected_message(message: Message, scripted: set[str]) -> dict[str, Any]:
    if message.role == "assistant":
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        return {"role": "assistant"} | ({"calls": calls} if calls else {})
    sources = {f"tool {message.name}"} if message.role == "tool" else {"user", "environment", "steps"}
    return {"role": message.role} | ({} if scripted & sources else {"content": message.text})
