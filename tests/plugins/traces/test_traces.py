"""Traces of real runs: a local collector that reads OTLP's own messages, and files."""

from __future__ import annotations

import gzip
import json
import queue
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import structlog
from api_server import ApiServer
from command_line import engine_here, trajectories_of
from written_specs import save_spec, scripted_spec

from engine.masking import remember
from engine.plugins.traces import writer
from engine.schemas.episode import EpisodeSpec
from engine.schemas.sections import read_stored
from engine.store import RunStore, list_runs

pytest.importorskip("opentelemetry.sdk")
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from slow_cases import slow_after

ROOT = Path(__file__).parents[3]
ADD = {"tool_calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}]}


class Collector:
    """An OTLP/HTTP collector: it parses real requests, and answers as it is told."""

    def __init__(self) -> None:
        self.requests: queue.Queue[tuple[str, dict[str, str], ExportTraceServiceRequest]] = queue.Queue()
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                collector.requests.put((self.path, {k.lower(): v for k, v in self.headers.items()}, request))
                self.send_response(collector.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def spans(self) -> list[Span]:
        found: list[Span] = []
        while not self.requests.empty():
            found += spans_of(self.requests.get()[2])
        return found


def spans_of(request: ExportTraceServiceRequest) -> list[Span]:
    return [span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans]


def attributes(span: Span) -> dict[str, Any]:
    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        if kind == "array_value":
            return [value(item) for item in any_value.array_value.values]
        return getattr(any_value, kind)

    return {item.key: value(item.value) for item in span.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


class Place:
    """A folder in which a spec with a tool and a user runs."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder = folder
        self._tokenizer = tokenizer

    def run(self, traces: dict[str, Any], *, tasks: int = 1, command: str = "run", **changes: Any) -> Path:
        """Run the spec, and return the run's folder."""
        spec: dict[str, Any] = {
            **scripted_spec("traced", self._tokenizer, [ADD, "It is 41.", "It is 42."], tasks),
            "tools": [{"use": "code_for_tests:add"}],
            "user": {"use": "code_for_tests:Critic"},
            "traces": traces,
        }
        path = save_spec(self.folder / "spec.yaml", spec | changes)
        code, _, err = engine_here(command, path, cwd=self.folder)
        assert code == 0, err
        return list_runs(self.folder / "runs")[-1]


@pytest.fixture
def place(tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "core" / "runner"))
    return Place(tmp_path, tiny_tokenizer_dir)


def tree(spans: list[Span]) -> list[tuple[int, str]]:
    """Depth and name of each span, in the order of a walk through the tree by time of start."""
    by_parent: dict[bytes, list[Span]] = {}
    for span in spans:
        by_parent.setdefault(span.parent_span_id, []).append(span)

    def walk(parent: bytes, depth: int) -> Iterator[tuple[int, str]]:
        for span in sorted(by_parent.get(parent, []), key=lambda item: item.start_time_unix_nano):
            yield depth, span.name
            yield from walk(span.span_id, depth + 1)

    return list(walk(b"", 0))


@pytest.mark.parametrize("command", slow_after(1, ["run", "eval"]))
def test_an_episode_arrives_at_a_collector_as_a_tree_of_spans(
    command: str, place: Place, collector: Collector, tiny_tokenizer_dir: Path
) -> None:
    folder = place.run({"otlp": collector.url}, command=command)
    path, headers, request = collector.requests.get(timeout=120)
    assert path == "/v1/traces"
    assert headers["content-type"] == "application/x-protobuf"
    spans = spans_of(request)
    chat = f"chat {tiny_tokenizer_dir}"
    assert tree(spans) == [
        (0, "invoke_agent traced"),
        (1, "reset"),
        (1, "turn 0"), (2, chat), (2, "execute_tool add"),
        (1, "turn 1"), (2, chat), (2, "user"),
        (1, "turn 2"), (2, chat), (2, "user"),
        (1, "score"),
    ]  # fmt: skip
    assert len({span.trace_id for span in spans}) == 1
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    with RunStore.open(folder, readonly=True) as store:
        (trajectory,) = store.trajectories()
        journal = store.journal(trajectory.episode_id)
    root = attributes(spans[-1])
    assert root["gen_ai.operation.name"] == "invoke_agent"
    assert root["gen_ai.agent.name"] == "traced"
    assert root["gen_ai.conversation.id"] == trajectory.episode_id
    assert root["gen_ai.usage.output_tokens"] == trajectory.counts["sampled_tokens"]
    assert (root["episode.run_id"], root["episode.reward"]) == (folder.name, trajectory.outcome.reward)
    told = [attributes(span) for span in spans if span.name == chat]
    generations = [entry.record.generation for entry in journal if entry.record.kind == "generation"]  # type: ignore[attr-defined]
    assert [each["gen_ai.usage.output_tokens"] for each in told] == [len(each.output_ids) for each in generations]
    assert {each["gen_ai.operation.name"] for each in told} == {"chat"}
    assert [each["gen_ai.response.finish_reasons"] for each in told] == [["stop"]] * 3
    (tool,) = [attributes(span) for span in spans if span.name.startswith("execute_tool")]
    assert tool == {
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add", "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "call_0_0",
    }  # fmt: skip
    begins = [entry.at for entry in journal]
    assert spans[-1].start_time_unix_nano == round(begins[0] * 1e6) * 1000


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_an_episode_of_a_chat_api_is_traced_with_its_cost(kind: str, place: Place, collector: Collector) -> None:
    with ApiServer() as server:
        prices = {"input": 2.0, "cached": 0.2, "output": 8.0}
        backend = {"kind": kind, "url": server.url, "model": "some-model", "prices": prices}
        folder = place.run({"otlp": collector.url, "episodes": True}, backend=backend, user=None, machine="tools")
    spans = spans_of(collector.requests.get(timeout=120)[2])
    (trajectory,) = trajectories_of(folder)
    told = [attributes(span) for span in spans if span.name == "chat some-model"]
    assert [(each["gen_ai.provider.name"], each["gen_ai.usage.output_tokens"]) for each in told] == [(kind, 10)] * 2
    assert [each["episode.cost"] for each in told] == [turn.cost for turn in trajectory.turns]
    assert [each["gen_ai.usage.input_tokens"] for each in told] == [turn.prompt_tokens for turn in trajectory.turns]
    assert ["gen_ai.request.temperature" in each for each in told] == [kind == "openai"] * 2
    assert not any("episode.weight_version" in each for each in told)
    root = attributes(spans[-1])
    assert (root["gen_ai.request.model"], root["gen_ai.usage.output_tokens"]) == ("some-model", 20)
    assert root["episode.cost"] == sum(turn.cost for turn in trajectory.turns) > 0
    (line,) = (folder / "traces" / "finished.jsonl").read_text().splitlines()
    assert [turn["cost"] for turn in json.loads(line)["turns"]] == [turn.cost for turn in trajectory.turns]


def test_content_is_only_in_spans_that_ask_for_it(place: Place, collector: Collector) -> None:
    place.run({"otlp": collector.url, "content": True})
    spans = collector.spans
    first = next(attributes(span) for span in spans if span.name.startswith("chat"))
    assert json.loads(first["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "What is 17 plus 25?"}]}
    ]
    (reply,) = json.loads(first["gen_ai.output.messages"])
    call = {"type": "tool_call", "id": "call_0_0", "name": "add", "arguments": {"a": 17, "b": 25}}
    assert reply == {"role": "assistant", "parts": [call], "finish_reason": "stop"}
    tool = next(attributes(span) for span in spans if span.name == "execute_tool add")
    assert json.loads(tool["gen_ai.tool.call.arguments"]) == {"a": 17, "b": 25}
    assert tool["gen_ai.tool.call.result"] == '"42"'
    replies = [attributes(span)["gen_ai.output.messages"] for span in spans if span.name.startswith("chat")]
    assert [json.loads(each)[0]["parts"][-1].get("content") for each in replies[1:]] == ["It is 41.", "It is 42."]


BROKEN = {"tools": [], "user": {"use": "code_for_traces:Moody"}}
MOODY = """
from engine.schemas.environment import UserTurn


class Moody:
    def respond(self, view):
        if view.task.id == "t1":
            raise OSError("the line to token correct-horse-battery is dead")
        return UserTurn(satisfied=True)
"""


def test_files_hold_failed_and_finished_episodes(place: Place) -> None:
    remember("LINE_KEY", "correct-horse-battery")
    (place.folder / "code_for_traces.py").write_text(MOODY)
    folder = place.run(
        {"spans": True, "episodes": True}, tasks=3, backend={"kind": "scripted", "replies": ["Yes."]}, **BROKEN
    )
    files = folder / "traces"
    finished = [json.loads(line) for line in (files / "finished.jsonl").read_text().splitlines()]
    failed = [json.loads(line) for line in (files / "failed.jsonl").read_text().splitlines()]
    assert sorted(each["task_id"] for each in finished) == ["t0", "t2"]
    assert [each["task_id"] for each in failed] == ["t1"]
    assert failed[0]["outcome"]["failure"]["blame"] == "user"
    assert [message["content"] for message in failed[0]["messages"]] == ["What is 17 plus 25?", "Yes."]
    requests = [
        ParseDict(hex_to_base64(json.loads(line)), ExportTraceServiceRequest())
        for line in (files / "spans.jsonl").read_text().splitlines()
    ]
    roots = {
        attributes(span)["episode.task_id"]: span
        for each in requests
        for span in spans_of(each)
        if not span.parent_span_id
    }
    assert {task: span.status.code for task, span in roots.items()} == {
        "t0": Status.STATUS_CODE_UNSET, "t1": Status.STATUS_CODE_ERROR, "t2": Status.STATUS_CODE_UNSET,
    }  # fmt: skip
    assert attributes(roots["t1"])["error.type"] == failed[0]["outcome"]["failure"]["kind"]
    for file in files.iterdir():
        assert "correct-horse-battery" not in file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def hex_to_base64(request: dict[str, Any]) -> dict[str, Any]:
    """OTLP's JSON has ids in hexadecimal, where the JSON of protobuf has base64."""
    import base64

    for resource in request["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                assert (len(span["traceId"]), len(span["spanId"])) == (32, 16)
                for key in ("traceId", "spanId", "parentSpanId"):
                    if key in span:
                        span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
    return request


def test_only_failed_episodes_are_traced_where_that_is_asked(place: Place, collector: Collector) -> None:
    (place.folder / "code_for_traces.py").write_text(MOODY)
    traces = {"otlp": f"{collector.url}/own/path", "episodes": True, "of": "failed"}
    folder = place.run(traces, tasks=3, backend={"kind": "scripted", "replies": ["Yes."]}, **BROKEN)
    path, _, request = collector.requests.get(timeout=120)
    assert path == "/own/path"
    (root,) = [span for span in spans_of(request) if not span.parent_span_id]
    assert attributes(root)["episode.task_id"] == "t1"
    assert [file.name for file in (folder / "traces").iterdir()] == ["failed.jsonl"]


@pytest.mark.parametrize("status", slow_after(1, [400, 401, 404]))
def test_a_collector_that_refuses_does_not_change_the_run(status: int, place: Place, collector: Collector) -> None:
    collector.status = status
    folder = place.run({"otlp": collector.url, "spans": True}, tasks=3)
    with RunStore.open(folder, readonly=True) as store:
        assert len(list(store.trajectories())) == 3
    assert (folder / "traces" / "spans.jsonl").exists()


def test_a_collector_that_is_not_there_is_one_warning_without_its_secrets(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=collector-key-123")
    monkeypatch.setattr(writer, "EXPORT_SECONDS", 0.5)
    folder = place.run({})
    structlog.reset_defaults()
    with structlog.testing.capture_logs() as logs:
        traces = {"otlp": "http://me:hunter2-pass@127.0.0.1:9"}
        with RunStore.open(folder, readonly=True) as store:
            spec = read_stored(store.header.spec | {"traces": traces}, EpisodeSpec)
            made = writer.TraceWriter(spec, folder, store.header)
            for trajectory in store.trajectories():
                made.episode_ended(trajectory)
            made.close()
    (entry,) = [each for each in logs if each["event"].startswith("traces are incomplete")]
    assert (entry["log_level"], entry["episodes"]) == ("warning", 1)
    assert entry["reason"].startswith("the collector at 127.0.0.1:9 took no spans: ")
    assert "collector-key-123" not in str(logs)
    assert "hunter2-pass" not in str(logs)


def test_nothing_is_written_by_default(place: Place) -> None:
    assert not (place.run({}) / "traces").exists()
