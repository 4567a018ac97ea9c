"""Notices when a run, an evaluation or a training fails, stalls, diverges, learns nothing, finishes or reaches a
budget.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from pydantic_core import to_json

from engine.masking import mask_credentials, mask_values
from engine.plugins.notices.channels import Channel, Event, channels_of
from engine.store.private import private_file

if TYPE_CHECKING:
    from engine.plugins.notices.spec import NotifySpec

log = structlog.get_logger(__name__)

SECONDS = 10.0
"""Deadline for one delivery."""
LONGEST = 2_000
"""Maximum length of a reason, in characters; services refuse long messages."""
_EVENT_TEXT = {"budget": "reached a budget", "no_signal": "has no learning signal"}
"""What happened, where it is not the name of the kind."""
FILE = "notices.jsonl"
"""The notices that a run has sent, in its folder."""


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
        self._history = NoticeHistory(folder if self._channels else None, spec.repeat_after, clock)
        self._failed: set[str] = set()

    @property
    def active(self) -> bool:
        """Whether any event is sent anywhere."""
        return bool(self._channels and self._kinds)

    async def notify(self, kind: str, **fields: Any) -> None:
        """Send an event and wait until it is delivered or the deadline has passed. Never raises."""
        deliveries = self._begin(kind, fields)
        if deliveries:
            await asyncio.to_thread(self._wait, deliveries)
            self._close(deliveries)

    def notify_now(self, kind: str, **fields: Any) -> None:
        """Like `notify`, for code outside of an event loop: waits in this thread."""
        deliveries = self._begin(kind, fields)
        self._wait(deliveries)
        self._close(deliveries)

    def _begin(self, kind: str, fields: Mapping[str, Any]) -> list[_Delivery]:
        if kind not in self._kinds or not self._channels:
            return []
        try:
            event = self._event(kind, fields)
            if self._history.is_repeated(event):
                log.debug("notice not repeated", event_kind=kind)
                return []
            return [_Delivery(name, channel, event) for name, channel in self._channels.items()]
        except Exception as error:  # noqa: BLE001  no thread can be started, for example; the run goes on
            log.warning("notice failed", event_kind=kind, reason=mask_credentials(repr(error)))
            return []

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

    def _wait(self, deliveries: Sequence[_Delivery]) -> None:
        until = time.monotonic() + self._seconds + 0.5  # after the channels' own deadlines, whose messages say more
        for delivery in deliveries:
            delivery.thread.join(max(0.0, until - time.monotonic()))

    def _close(self, deliveries: Sequence[_Delivery]) -> None:
        """Log what was not delivered: the first failure of a channel as a warning, later ones as debug."""
        for delivery in deliveries:
            problem = f"not delivered within {self._seconds:g} s" if delivery.thread.is_alive() else delivery.problem
            if problem is None:
                continue
            say = log.debug if delivery.name in self._failed else log.warning
            self._failed.add(delivery.name)
            kind = delivery.event["kind"]
            say("notice failed", channel=delivery.name, event_kind=kind, reason=mask_credentials(problem))
        if any(not delivery.thread.is_alive() and delivery.problem is None for delivery in deliveries):
            self._history.add(deliveries[0].event)


class _Delivery:
    """One event on one channel, in a daemon thread."""

    def __init__(self, name: str, channel: Channel, event: Event) -> None:
        self.name = name
        self.event = event
        self.problem: str | None = None
        self._send = channel
        self.thread = threading.Thread(target=self._run, name=f"notify-{name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._send(dict(self.event))
        except BaseException as error:  # noqa: BLE001  the user's function can raise anything, SystemExit too
            self.problem = str(error) or repr(error)


class NoticeHistory:
    """What a run has sent, and when, in `notices.jsonl` of its folder, so that nothing is repeated too soon.

    A training that is restarted automatically after each failure fails again with the same reason: the file tells the
    second launch what the first has sent. A damaged or missing file only means that a notice is sent again.

    Args:
        folder: The folder of the run or training; None keeps the history only in memory.
        repeat_after: A notice is not repeated for this time, in seconds.
        clock: Unix time.
    """

    def __init__(self, folder: Path | None, repeat_after: float, clock: Callable[[], float] = time.time) -> None:
        self._path = folder / FILE if folder is not None else None
        self._repeat_after = repeat_after
        self._clock = clock
        self._sent: dict[str, float] = {}
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines() if self._path is not None else []
        except (OSError, ValueError):
            return
        for line in lines:
            try:
                notice = json.loads(line)
                self._sent[str(notice["key"])] = float(notice["at"])
            except (ValueError, KeyError, TypeError):
                continue

    def is_repeated(self, event: Mapping[str, Any]) -> bool:
        """Whether a notice that differs only in numbers was sent less than `repeat_after` ago."""
        at = self._sent.get(_key(event))
        return at is not None and 0 <= self._clock() - at < self._repeat_after

    def add(self, event: Mapping[str, Any]) -> None:
        """Remember a notice that at least one channel has delivered. Never raises."""
        self._sent[_key(event)] = self._clock()
        if self._path is None:
            return
        try:
            with private_file(self._path).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"at": self._clock(), "key": _key(event), "text": event["text"]}) + "\n")
        except OSError as error:
            log.debug("the notice was not recorded", reason=str(error))


def _key(event: Mapping[str, Any]) -> str:
    """What makes two notices the same: kind, and reason without its numbers."""
    return f"{event['kind']}: {re.sub(r'[0-9]+', '#', str(event.get('reason', '')))}"
