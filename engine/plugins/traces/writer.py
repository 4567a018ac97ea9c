"""Writes the traces of a run's ended episodes, in a thread of its own.

Invariants:
- An episode costs the run one `put` of its id: the thread reads result and journal from the run's store.
- Nothing here raises into the run. A collector that does not answer costs it at most `CLOSE_SECONDS` at its end.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import structlog
from pydantic_core import to_json

from engine.errors import EngineError
from engine.logs import collected_logs
from engine.masking import mask_credentials, mask_values, remember
from engine.plugins.traces.spec import TracesSpec
from engine.store.private import private_file, private_folder
from engine.store.reader import RunReader

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from engine.plugins.traces.spans import SpanBuilder
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.trajectory import Trajectory
    from engine.spec.load import LoadedSpec
    from engine.store.header import RunHeader
    from engine.store.store import RunStore
log = structlog.get_logger(__name__)
FOLDER = "traces"
CLOSE_SECONDS = 15.0
"""How long the end of a run waits for traces."""
EXPORT_SECONDS = 5.0
"""Deadline of one request to the collector, with its retries."""
BATCH = 32
"""Maximum number of episodes in one request."""
GIVE_UP = 3
"""Requests that fail one after another, after which no more are sent; at the end of a run the first."""
_HEADERS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")


class TraceWriter:
    """Writes and sends traces of ended episodes as `traces` of a spec says. It is an `EpisodeObserver`.

        writer = TraceWriter(spec, store.folder, store.header)
        writer.episode_ended(trajectory)      # after the episode is stored
        writer.close()

    Args:
        spec: The spec.
        folder: The folder of the run.
        header: The header of the run.

    Raises:
        EngineError: a package is missing, or the folder cannot be created.
    """

    def __init__(self, spec: EpisodeSpec, folder: Path, header: RunHeader) -> None:
        self._traces = TracesSpec.or_default(spec)
        self._reader = RunReader(folder, header)
        self._files = folder / FOLDER
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._builder: SpanBuilder | None = None
        try:
            self._send = _collector(self._traces.otlp) if self._traces.otlp is not None else None
            if self._traces.makes_spans:
                from engine.plugins.traces.spans import SpanBuilder

                self._builder = SpanBuilder(spec)
        except ImportError as error:
            message = f"`traces` needs OpenTelemetry ({error}): pip install 'episode-engine[otel]'"
            raise EngineError(message, kind="trace_setup", blame="spec") from None
        self._failures = 0
        self._unsent = 0
        self._problem = ""
        self._closing = False
        self._thread: threading.Thread | None = None
        if self._traces.spans or self._traces.episodes:
            try:
                private_folder(self._files, exist_ok=True)
            except OSError as error:
                message = f"the folder of the traces {self._files} cannot be created: {error}"
                raise EngineError(message, kind="trace_setup", blame="spec") from error

    def episode_ended(self, trajectory: Trajectory) -> None:
        """Trace an episode that is stored. Takes about a microsecond."""
        if trajectory.outcome.failure is None and self._traces.of == "failed":
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()
        self._queue.put(trajectory.episode_id)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what is left, and report what could not be sent. Never raises."""
        if self._thread is None:
            return
        self._closing = True
        self._queue.put(None)
        self._thread.join(seconds)
        left = self._queue.qsize() if self._thread.is_alive() else 0
        if self._unsent or left:
            log.warning(
                "traces are incomplete; the run's store has every episode",
                episodes=self._unsent + left,
                reason=self._problem or f"not done within {seconds:g} s",
            )
        self._thread = None

    # --- in the thread ---

    def _run(self) -> None:
        ended = False
        while not ended:
            ids = [self._queue.get()]
            while len(ids) < BATCH and not self._queue.empty():
                ids.append(self._queue.get())
            ended = None in ids
            self._trace([episode_id for episode_id in ids if episode_id is not None])

    def _trace(self, ids: Sequence[str]) -> None:
        """Write and send the traces of some episodes."""
        spans: list[ReadableSpan] = []
        for episode_id in ids:
            try:
                trajectory = self._reader.trajectory(episode_id)
                if self._traces.episodes:
                    name = "finished" if trajectory.outcome.failure is None else "failed"
                    plain = to_json(replace(trajectory, branches=[]), inf_nan_mode="strings", fallback=str)
                    without_branches = {key: value for key, value in json.loads(plain).items() if key != "branches"}
                    _append(self._files / f"{name}.jsonl", mask_values(without_branches))
                if self._builder is not None:
                    row = self._reader.episode(episode_id)
                    spans += self._builder.spans(trajectory, self._reader.journal(episode_id), row.attempt)
            except Exception as error:  # noqa: BLE001  a trace never harms a run
                self._unsent += 1
                self._problem = mask_credentials(f"{episode_id}: {error or repr(error)}")
        if not spans:
            return
        try:
            if self._traces.spans:
                from engine.plugins.traces.spans import otlp_json

                _append(self._files / "spans.jsonl", otlp_json(spans))
        except Exception as error:  # noqa: BLE001  a full disk, for example
            self._problem = mask_credentials(str(error) or repr(error))
            self._unsent += len(ids)
        if self._send is None:
            return
        if self._failures >= (1 if self._closing else GIVE_UP):
            self._unsent += len(ids)
        elif (problem := self._send(spans)) is None:
            self._failures = 0
        else:
            self._failures += 1
            self._unsent += len(ids)
            self._problem = problem


def observe(loaded: LoadedSpec, store: RunStore) -> TraceWriter | None:
    """The hook `observe_episodes`."""
    active = TracesSpec.or_default(loaded.spec).active
    return TraceWriter(loaded.spec, store.folder, store.header) if active else None


def _append(file: Path, line: Any) -> None:
    with private_file(file).open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line, ensure_ascii=False) + "\n")


def _collector(url: str) -> Callable[[Sequence[ReadableSpan]], str | None]:
    """Return a function that sends spans to a collector and returns what went wrong."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    for variable in _HEADERS:
        for pair in os.environ.get(variable, "").split(","):
            if len(value := pair.partition("=")[2].strip()) >= 8:
                remember(variable, value)
    endpoint = url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1/traces"
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
    host = urlsplit(url).netloc.rpartition("@")[2]

    def send(spans: Sequence[ReadableSpan]) -> str | None:
        with collected_logs("opentelemetry.exporter") as said:
            try:
                if exporter.export(spans) is SpanExportResult.SUCCESS:
                    return None
            except Exception as error:  # noqa: BLE001  a trace never harms a run
                said.append(str(error) or repr(error))
        return mask_credentials(f"the collector at {host} took no spans: {said[-1] if said else 'no answer'}")[:500]

    return send
