"""An episode as OpenTelemetry spans, with its messages in the JSON form of the GenAI semantic conventions.

    invoke_agent NAME                     the episode
    ├── reset
    ├── turn 0
    │   ├── chat MODEL                    the generation
    │   ├── execute_tool TOOL             one for each call
    │   └── user                          or step, condense
    ├── turn 1 …
    └── score

Invariants:
- Times are those of the journal. Ids are derived from run, episode and attempt, so an episode that is sent twice is one
  trace.
- No attribute holds a known secret.

Attribute names: OpenTelemetry semantic conventions for generative AI (spans of clients, agents and tools; status:
development). Attributes that these do not define begin with `episode.`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

import engine
from engine.masking import mask, mask_values
from engine.plugins.traces.spec import TracesSpec
from engine.schemas.journal import (
    FailureRecord,
    GenerationRecord,
    JournalEntry,
    LimitRecord,
    ScoreRecord,
    ToolsRecord,
    UserRecord,
)
from engine.schemas.message import Message, TextPart

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.trajectory import Trajectory

Attributes = dict[str, Any]


class SpanBuilder:
    """Builds the spans of the episodes of one spec.

    Args:
        spec: The spec: names of agent and model, backend, `traces.content`.
    """

    def __init__(self, spec: EpisodeSpec) -> None:
        self._agent = spec.name
        self._model = spec.backend.served_model or spec.model.path
        self._provider = spec.backend.kind
        self._remote = spec.backend.weights_in_servers
        self._priced = spec.backend.priced
        self._sampling = {
            f"gen_ai.request.{name}": getattr(spec.sampling, name)
            for name in ("temperature", "top_p", "top_k")
            if name not in spec.backend.lacking
        } | {"gen_ai.request.max_tokens": spec.sampling.max_new_tokens}
        self._content = TracesSpec.or_default(spec).content
        self._ids = _DerivedIds()
        self._ended = InMemorySpanExporter()
        provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource({SERVICE_NAME: "episode-engine", SERVICE_VERSION: engine.__version__}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(SimpleSpanProcessor(self._ended))
        self._tracer = provider.get_tracer("episode-engine", engine.__version__)

    def spans(self, trajectory: Trajectory, journal: Sequence[JournalEntry], attempt: int = 0) -> list[ReadableSpan]:
        """Return the spans of an ended episode, each after its children, from the journal of its newest attempt."""
        self._ids.begin(f"{trajectory.run_id}/{trajectory.episode_id}/{attempt}")
        self._ended.clear()
        begin = _ns(journal[0].at) if journal else 0
        end = max((_ns(entry.at + entry.seconds) for entry in journal), default=begin)
        root = self._start(f"invoke_agent {self._agent}", None, begin, self._episode_attributes(trajectory))
        inside = set_span_in_context(root)
        replies = _replies(trajectory) if self._content else {}
        turn, place, turn_end = -1, inside, begin
        open_turn: Span | None = None
        for entry in journal:
            if type(entry.record) is GenerationRecord:
                if open_turn is not None:
                    open_turn.end(turn_end)
                turn += 1
                open_turn = self._start(f"turn {turn}", inside, _ns(entry.at), _turn_attributes(trajectory, turn))
                place = set_span_in_context(open_turn)
            at = inside if type(entry.record) is ScoreRecord else place  # a score is the episode's
            self._step(entry, at, root, trajectory, turn, replies)
            turn_end = max(turn_end, _ns(entry.at + entry.seconds))
        if open_turn is not None:
            open_turn.end(turn_end)
        if (failure := trajectory.outcome.failure) is not None:
            root.set_status(Status(StatusCode.ERROR, mask(failure.message)))
        root.end(end)
        return list(self._ended.get_finished_spans())

    def _start(
        self, name: str, inside: Context | None, at: int, attributes: Attributes, kind: SpanKind = SpanKind.INTERNAL
    ) -> Span:
        masked = {key: mask_values(value) for key, value in attributes.items() if value is not None}
        # An empty context: a span of this thread is no parent.
        return self._tracer.start_span(mask(name), Context() if inside is None else inside, kind, masked, start_time=at)

    def _step(
        self,
        entry: JournalEntry,
        place: Context,
        root: Span,
        trajectory: Trajectory,
        turn: int,
        replies: Mapping[int, tuple[Sequence[Message], Message]],
    ) -> None:
        """Make the spans of one journal entry."""
        begin, end, record = _ns(entry.at), _ns(entry.at + entry.seconds), entry.record
        match record:
            case GenerationRecord():
                attributes = self._chat_attributes(record, trajectory)
                if turn in replies:
                    shown, reply = replies[turn]
                    said = message_json(reply) | {"finish_reason": record.generation.finish.type}
                    attributes["gen_ai.input.messages"] = _json([message_json(message) for message in shown])
                    attributes["gen_ai.output.messages"] = _json([said])
                kind = SpanKind.CLIENT if self._remote else SpanKind.INTERNAL
                span = self._start(f"chat {self._model}", place, begin, attributes, kind)
                if record.generation.finish.type == "abort":
                    span.set_attribute("error.type", "abort")
                    span.set_status(Status(StatusCode.ERROR, mask(record.generation.finish.message or "")))
                span.end(end)
            case ToolsRecord():
                arguments = {call.id: call.arguments for message in trajectory.messages for call in message.tool_calls}
                for result in record.results:
                    attributes = {
                        "gen_ai.operation.name": "execute_tool",
                        "gen_ai.tool.name": result.name,
                        "gen_ai.tool.type": "function",
                        "gen_ai.tool.call.id": result.call_id,
                        "error.type": result.error,
                    }
                    if self._content:
                        content = result.content
                        answer = (
                            content if isinstance(content, str) else [part.model_dump(mode="json") for part in content]
                        )
                        given = arguments.get(result.call_id)  # a malformed call has none
                        attributes["gen_ai.tool.call.arguments"] = None if given is None else _json(given)
                        attributes["gen_ai.tool.call.result"] = _json(answer)
                    span = self._start(f"execute_tool {result.name}", place, begin, attributes)
                    if result.error is not None:
                        span.set_status(Status(StatusCode.ERROR, result.error))
                    span.end(begin + _ns(result.seconds) if result.seconds else end)
            case FailureRecord():
                failure = record.failure
                attributes = {"error.type": failure.kind, "episode.blame": failure.blame, "episode.state": entry.state}
                span = self._start(f"failed {entry.state}", place, begin, attributes)
                span.set_status(Status(StatusCode.ERROR, mask(failure.message)))
                span.end(end)
            case LimitRecord():
                limit: Attributes = {"episode.limit": record.limit, "episode.limit.value": record.value}
                root.add_event("limit", limit, timestamp=begin)
            case _:
                attributes = {"episode.state": entry.state, "episode.event": entry.event or None}
                if isinstance(record, UserRecord) and self._content:
                    said = message_json(Message(role="user", content=record.turn.content))
                    attributes["gen_ai.output.messages"] = _json([said])
                self._start(record.kind, place, begin, attributes).end(end)

    def _episode_attributes(self, trajectory: Trajectory) -> Attributes:
        outcome = trajectory.outcome
        return {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": self._provider,
            "gen_ai.agent.name": self._agent,
            "gen_ai.request.model": self._model,
            "gen_ai.conversation.id": trajectory.episode_id,
            "gen_ai.usage.input_tokens": sum(turn.prompt_tokens for turn in trajectory.turns),
            "gen_ai.usage.output_tokens": sum(turn.reply_tokens or turn.end - turn.start for turn in trajectory.turns),
            "error.type": outcome.failure.kind if outcome.failure is not None else None,
            "episode.run_id": trajectory.run_id,
            "episode.task_id": trajectory.task_id,
            "episode.sample": trajectory.sample_index,
            "episode.turns": len(trajectory.turns),
            "episode.cost": sum(turn.cost for turn in trajectory.turns) if self._priced else None,
            "episode.reward": outcome.reward,
            "episode.solved": outcome.solved,
            "episode.state": outcome.state,
            "episode.event": outcome.event,
            "episode.limit": outcome.limit,
            "episode.blame": outcome.failure.blame if outcome.failure is not None else None,
            **{f"episode.reward.{name}": value for name, value in outcome.rewards.items()},
        }

    def _chat_attributes(self, record: GenerationRecord, trajectory: Trajectory) -> Attributes:
        generation = record.generation
        return {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": self._provider,
            "gen_ai.request.model": self._model,
            "gen_ai.conversation.id": trajectory.episode_id,
            **self._sampling,
            "gen_ai.response.finish_reasons": [generation.finish.type],
            "gen_ai.usage.input_tokens": generation.prompt_tokens,
            "gen_ai.usage.output_tokens": len(generation.output_ids) or generation.sampled_tokens,
            "gen_ai.usage.cache_read.input_tokens": generation.cached_tokens,
            "episode.queue_seconds": generation.queue_seconds,
            "episode.cost": generation.cost if self._priced else None,
            "episode.weight_version": None
            if generation.text is not None
            else generation.versions[-1].version
            if generation.versions
            else 0,
        }


def _turn_attributes(trajectory: Trajectory, index: int) -> Attributes:
    attributes: Attributes = {"episode.turn": index}
    turn = next((turn for turn in trajectory.turns if turn.index == index), None)
    if turn is not None:
        attributes |= {"episode.event": turn.event, "episode.branch": turn.branch}
        attributes |= {"episode.reward": float(sum(turn.rewards.values()))}
        attributes |= {f"episode.reward.{name}": value for name, value in turn.rewards.items()}
    return attributes


def _ns(seconds: float) -> int:
    return round(seconds * 1_000_000) * 1_000


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


class _DerivedIds(IdGenerator):
    """Ids that are a function of the episode and of the span's number in it."""

    def __init__(self) -> None:
        self._of, self._count = "", 0

    def begin(self, of: str) -> None:
        """Set the episode that the following ids belong to."""
        self._of, self._count = of, 0

    def generate_trace_id(self) -> int:
        """Return the id of the episode's trace."""
        return int.from_bytes(hashlib.sha256(self._of.encode()).digest()[:16])

    def generate_span_id(self) -> int:
        """Return the id of the episode's next span."""
        self._count += 1
        return int.from_bytes(hashlib.sha256(f"{self._of}#{self._count}".encode()).digest()[:8])


def otlp_json(spans: Sequence[ReadableSpan]) -> Mapping[str, Any]:
    """Return spans as OTLP in JSON: ids in hexadecimal, enums as numbers (OTLP specification, "JSON Protobuf
    Encoding")."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    encoded = encode_spans(spans)
    plain: dict[str, Any] = MessageToDict(encoded, use_integers_for_enums=True)
    items = (item for resource in plain["resourceSpans"] for scope in resource["scopeSpans"] for item in scope["spans"])
    encoded_spans = (
        span for resource in encoded.resource_spans for scope in resource.scope_spans for span in scope.spans
    )
    for item, span in zip(items, encoded_spans, strict=True):
        item["traceId"], item["spanId"] = span.trace_id.hex(), span.span_id.hex()
        if span.parent_span_id:
            item["parentSpanId"] = span.parent_span_id.hex()
    return plain


def message_json(message: Message) -> dict[str, Any]:
    """Return a message with its parts: text, reasoning, images by reference, calls and results of tools."""
    parts: list[dict[str, Any]] = []
    if message.reasoning:
        parts.append({"type": "reasoning", "content": message.reasoning})
    if message.role == "tool":
        parts.append({"type": "tool_call_response", "id": message.tool_call_id, "response": message.text})
    elif isinstance(message.content, str):
        parts += [{"type": "text", "content": message.content}] if message.content else []
    else:
        parts += [
            {"type": "text", "content": part.text}
            if isinstance(part, TextPart)
            else {"type": "uri", "modality": "image", "mime_type": part.mime, "uri": part.image}
            for part in message.content
        ]
    parts += [
        {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments}
        for call in message.tool_calls
    ]
    return {"role": message.role, "parts": parts}


def _replies(trajectory: Trajectory) -> dict[int, tuple[Sequence[Message], Message]]:
    """For each turn that has a message: what the model was shown since the turn before, and the reply."""
    messages = trajectory.messages
    places = [at for at, message in enumerate(messages) if message.role == "assistant"]
    if len(places) < len(trajectory.turns):
        return {}
    places = places[len(places) - len(trajectory.turns) :]
    turns = zip(trajectory.turns, [-1, *places], places, strict=False)
    return {turn.index: (messages[before + 1 : at], messages[at]) for turn, before, at in turns}
