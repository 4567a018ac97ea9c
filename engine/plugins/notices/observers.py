"""Notices when a run, an evaluation or a training fails, stalls, diverges, learns nothing, finishes or reaches a
budget: the observers that send them, and the thread that sends `stalled` and `budget` meanwhile.

Invariants:
- Nothing here raises into the run or delays it by more than a deadline. Each delivery has its own daemon thread, and
  one that hangs is abandoned; the threads of `concurrent.futures` would delay the end of the process.
- No notice holds a known secret: every string of an event passes through `mask_credentials`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import structlog
from pydantic_core import to_json

from engine.errors import EngineError, TrainError
from engine.masking import mask_credentials, mask_values
from engine.plugins.notices.channels import Channel, Event, channels_of
from engine.plugins.notices.spec import NotifySpec
from engine.runner.observers import TrainingObserver
from engine.store.private import private_file

if TYPE_CHECKING:
    from engine.runner.counters import RunCounters
    from engine.runner.summary import RunResult, RunSummary
    from engine.spec.load import LoadedSpec
    from engine.store.store import RunStore

log = structlog.get_logger(__name__)

SECONDS = 10.0
"""Deadline for one delivery."""
LONGEST = 2_000
"""Maximum length of a reason, in characters; services refuse long messages."""
_EVENT_TEXT = {"budget": "reached a budget", "no_signal": "has no learning signal"}
"""What happened, where it is not the name of the kind."""
FILE = "notices.jsonl"
"""The notices that a run has sent, in its folder."""
POLL = 1.0
"""Seconds between two looks at the budget."""


class Notifier:
    """Sends events on every channel that the spec names.

    notifier = Notifier(spec.notify, "arithmetic-1", "training", folder=training_folder, base=spec_folder)
    await notifier.notify("diverged", step=12, reason="the loss is nan")
    """

    def __init__(
        self,
        spec: NotifySpec,
        run: str,
        what: str = "run",
        *,
        folder: Path | None = None,
        base: Path | None = None,
        environ: Mapping[str, str] = os.environ,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            spec: The channels, and the kinds of events to send.
            run: The name of the run or training.
            what: `run`, `evaluation` or `training`.
            folder: Its folder, in which the notices that were sent are recorded.
            base: The spec's folder, in which the function is looked for.
            environ: Environment variables, with the URLs.
            seconds: Deadline for one delivery, in seconds.
            clock: Unix time.

        Raises:
            EngineError: a channel cannot work.
            EntryError: there is no such function.
        """
        self._kinds = frozenset(spec.on)
        self._run = run
        self._what = what
        self._seconds = seconds
        self._clock = clock
        self._channels = channels_of(spec, base, environ, seconds)
        self._repeat_after = spec.repeat_after
        self._file = folder / FILE if folder is not None and self._channels else None
        self._sent = _sent(self._file)
        self._failed: set[str] = set()

    async def notify(self, kind: str, **fields: Any) -> None:
        """Send an event, and wait for the deliveries or the deadline."""
        if self._channels and kind in self._kinds:
            await asyncio.to_thread(self.notify_now, kind, **fields)

    def notify_now(self, kind: str, **fields: Any) -> None:
        """The same from a thread without an event loop."""
        if not self._channels or kind not in self._kinds:
            return
        try:
            event = self._event(kind, fields)
            key = f"{kind}: {re.sub(r'[0-9]+', '#', event.get('reason', ''))}"  # equal up to numbers
            at = self._sent.get(key)
            if at is not None and 0 <= self._clock() - at < self._repeat_after:
                log.debug("notice not repeated", event_kind=kind)
                return
            problems = self._deliver(event)
        except Exception as error:  # noqa: BLE001  no thread can be started, for example; the run goes on
            log.warning("notice failed", event_kind=kind, reason=mask_credentials(repr(error)))
            return
        for name, problem in problems.items():
            if problem is not None:
                say = log.debug if name in self._failed else log.warning
                self._failed.add(name)
                say("notice failed", channel=name, event_kind=kind, reason=mask_credentials(problem))
        if None in problems.values():
            self._record(key, event["text"])

    def _event(self, kind: str, fields: Mapping[str, Any]) -> Event:
        reason = mask_credentials(str(fields["reason"])) if fields.get("reason") else ""
        if len(reason) > LONGEST:
            reason = f"{reason[:LONGEST]} …"
        words = f"{self._run}: {self._what} {_EVENT_TEXT.get(kind, kind)}"
        at = f" at step {fields['step']}" if "step" in fields else ""
        text = f"{words}{at}{f': {reason}' if reason else ''}"
        more = {"reason": reason} if reason else {}
        event = {**fields, **more, "kind": kind, "run": self._run, "time": self._clock(), "text": text}
        plain: Event = mask_values(json.loads(to_json(event, inf_nan_mode="strings", fallback=str)), mask_credentials)
        return plain

    def _deliver(self, event: Event) -> dict[str, str | None]:
        """Send an event on all channels at once. Return what went wrong with each; None where nothing did."""
        problems: dict[str, str | None] = dict.fromkeys(self._channels, f"not delivered within {self._seconds:g} s")

        def deliver(name: str, channel: Channel) -> None:
            try:
                channel(dict(event))
                problems[name] = None
            except BaseException as error:  # noqa: BLE001  the user's function can raise anything, SystemExit too
                problems[name] = str(error) or repr(error)

        until = time.monotonic() + self._seconds + 0.5  # after the channels' own deadlines, whose messages say more
        threads = [
            threading.Thread(target=deliver, args=(name, channel), name=f"notify-{name}", daemon=True)
            for name, channel in self._channels.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return dict(problems)

    def _record(self, key: str, text: str) -> None:
        """Note what was sent, and when, so that nothing is repeated too soon.

        A training that is restarted automatically after each failure fails again with the same reason: the file tells
        the second launch what the first has sent.
        """
        self._sent[key] = self._clock()
        if self._file is None:
            return
        try:
            with private_file(self._file).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"at": self._clock(), "key": key, "text": text}) + "\n")
        except OSError as error:
            log.debug("the notice was not recorded", reason=str(error))


def _sent(file: Path | None) -> dict[str, float]:
    """When which notices were sent. A damaged or missing file only means that a notice is sent again."""
    sent: dict[str, float] = {}
    try:
        lines = [] if file is None else file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        lines = []
    for line in lines:
        try:
            notice = json.loads(line)
            sent[str(notice["key"])] = float(notice["at"])
        except (ValueError, KeyError, TypeError):
            continue
    return sent


class Watch:
    """Sends `stalled` if nothing happens for too long, once per stall, and `budget` once for each amount that is
    reached.

        with Watch(notifier, spec.notify, lambda: {"step": trainer.step}) as watch:
            watch.tick()        # at each episode and each step

    It has its own thread, so it also notices an event loop that hangs.
    """

    def __init__(
        self,
        notifier: Notifier,
        spec: NotifySpec,
        about: Callable[[], Mapping[str, Any]] = dict,
        *,
        tokens: Callable[[], int] = lambda: 0,
        progress: Callable[[], object] | None = None,
        waits_for: str = "no episode and no step",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            notifier: Sends the events.
            spec: `stall_timeout` and `budget`.
            about: Returns more fields for the events.
            tokens: Returns the number of tokens that were sampled since the launch.
            progress: A change of its value is progress too, so that a busy loop needs no calls of `tick`.
            waits_for: The start of a stall's reason.
            clock: A monotonic clock, in seconds.
        """
        self._notifier = notifier
        self._seconds = spec.stall_timeout
        self._budget = spec.budget
        self._about = about
        self._tokens = tokens
        self._progress = progress
        self._waits_for = waits_for
        self._clock = clock
        self._began = self._last = clock()
        self._value: object = None
        self._stall_sent = False
        self._exceeded: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="notice-watch", daemon=True)

    def tick(self) -> None:
        """Report progress. Costs less than a microsecond; any thread can call it."""
        self._last = self._clock()
        self._stall_sent = False

    def check(self) -> float:
        """Send the notices that are due.

        Returns:
            Seconds until the next check is useful.
        """
        polls = [POLL] if self.check_budget() else []
        if self._progress is not None:
            if (value := self._progress()) != self._value:
                self._value = value
                self.tick()
            polls.append(self._seconds / 4)
        quiet = self._clock() - self._last
        if quiet < self._seconds:
            return min([self._seconds - quiet, *polls])
        if not self._stall_sent:
            self._stall_sent = True
            reason = f"{self._waits_for} for {quiet:.0f} s"
            self._notifier.notify_now("stalled", **self._fields(), seconds=quiet, reason=reason)
        return min([self._seconds, *polls])

    def check_budget(self) -> bool:
        """Send the notices of amounts that are reached. Returns whether one is not reached yet."""
        if self._budget is None:
            return False
        used_of = {"tokens": self._tokens(), "seconds": self._clock() - self._began}
        limits = {"tokens": self._budget.tokens, "seconds": self._budget.time}
        for name, most in limits.items():
            if most is not None and name not in self._exceeded and (used := used_of[name]) >= most:
                self._exceeded.add(name)
                fields = {**self._fields(), name: used}
                self._notifier.notify_now("budget", **fields, reason=f"{used:.0f} of {most:.0f} {name} are used")
        return any(most is not None and name not in self._exceeded for name, most in limits.items())

    def _fields(self) -> dict[str, Any]:
        try:
            return dict(self._about())
        except Exception as error:  # noqa: BLE001  the event is sent without these fields
            return {"problem": repr(error)}

    def _watch(self) -> None:
        wait = 0.0
        while not self._ended.wait(wait):
            wait = max(self.check(), 0.001)

    def __enter__(self) -> Self:
        self._began = self._clock()
        self.tick()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if error is None:
            self.check_budget()  # an amount that was reached after the last look


class RunNotices:
    """Sends the notices that `notify` of the spec asks for. It is a `RunObserver`."""

    def __init__(self, loaded: LoadedSpec, store: RunStore) -> None:
        """
        Raises:
            EngineError: a channel cannot work.
        """
        what = "evaluation" if store.header.evaluation else "run"
        self._spec = NotifySpec.or_default(loaded.spec)
        self._notifier = Notifier(self._spec, store.run_id, what, folder=store.folder, base=loaded.base)

    async def failed(self, error: Exception) -> None:
        """Send `failed`."""
        await self._notifier.notify("failed", reason=f"{type(error).__name__}: {error}")

    def watch(self, live: RunCounters, summary: RunSummary, busy: Callable[[], bool]) -> Watch:
        """The thread that sends `stalled` and `budget` while episodes run, by their counts.

        Args:
            live: Counters of the run.
            summary: Sums over its finished episodes.
            busy: Whether an episode runs. Without one nothing stalls: a service waits for its next request.
        """
        return Watch(
            self._notifier,
            self._spec,
            lambda: {**_counts(summary), "sampled_tokens": live.tokens},
            tokens=lambda: live.tokens,
            progress=lambda: (live.tokens, summary.episodes) if busy() else object(),
            waits_for="no reply and no finished episode",
        )

    async def ended(self, result: RunResult) -> None:
        """Send `finished`, or `failed` if the run failed as a whole."""
        summary, kind = result.summary, "failed"
        if (stopped := result.stopped) is not None:
            kind = "budget" if stopped.kind == "budget_reached" else "failed"
            reason = f"{type(stopped).__name__}: {stopped}"
        elif summary.backend_failed:
            reason = f"the backend failed {summary.causes.blamed('backend')} of {summary.episodes} episodes"
        elif result.faults:
            reason = f"{len(result.faults)} episodes could not be finished; the first: {result.faults[0]}"
        elif summary.all_failed:
            reason = summary.causes.words(summary.episodes)
        else:
            kind = "finished"
            failed = f", {summary.causes.failures} failed" if summary.causes.failures else ""
            reason = (
                f"{summary.episodes} episodes, {summary.solved} solved{failed}, mean reward {summary.mean_reward:.3f}"
            )
        await self._notifier.notify(kind, reason=reason, **_counts(summary))


def _counts(summary: RunSummary) -> dict[str, Any]:
    return {
        "episodes": summary.episodes,
        "solved": summary.solved,
        "failed_episodes": summary.causes.failures,
        "mean_reward": summary.mean_reward,
    }


class TrainingNotices(TrainingObserver):
    """Sends the notices that `notify` of the spec asks for."""

    def __init__(self, loaded: LoadedSpec, folder: Path) -> None:
        """
        Raises:
            EngineError: a channel cannot work.
        """
        self._spec = NotifySpec.or_default(loaded.spec)
        self._notifier = Notifier(self._spec, folder.name, "training", folder=folder, base=loaded.base)
        self._watch: Watch | None = None

    @contextmanager
    def watch(self, step: Callable[[], int], tokens: Callable[[], int]) -> Iterator[None]:
        """The thread that sends `stalled` and `budget`."""
        with Watch(self._notifier, self._spec, lambda: {"step": step()}, tokens=tokens) as self._watch:
            yield

    def progressed(self) -> None:
        """It has not stalled."""
        if self._watch is not None:
            self._watch.tick()

    async def lacks_signal(self, step: int, reason: str) -> None:
        """Send `no_signal`."""
        await self._notifier.notify("no_signal", step=step, reason=reason)

    async def failed(self, error: Exception, step: int) -> None:
        """Send `failed`, `diverged` or `budget`."""
        diverged = isinstance(error, TrainError) and error.kind == "diverged"
        kind, words = "diverged" if diverged else "failed", str(error)
        if isinstance(error, EngineError) and error.kind == "budget_reached":
            kind, words = "budget", words.partition("\n")[0]  # the state that was saved differs at each resume
        await self._notifier.notify(kind, step=step, reason=f"{type(error).__name__}: {words}")

    async def ended(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send `finished`."""
        rewards = {name: metrics[name] for name in ("reward/mean", "eval/reward") if name in metrics}
        named = {name.replace("/", "_"): value for name, value in rewards.items()}
        await self._notifier.notify("finished", step=step, **named)
