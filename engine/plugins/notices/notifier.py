"""Notices when a run, an evaluation or a training fails, stalls, diverges, learns nothing, finishes or reaches a budget.

Invariants:
- Nothing here raises into the run or delays it by more than a deadline. Each delivery has its own daemon thread, and one that hangs
  is abandoned; the threads of `concurrent.futures` would delay the end of the process.
- No notice holds a known secret: every string of an event passes through `mask_credentials`.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from pydantic_core import to_json

from engine.masking import mask_credentials
from engine.plugins.notices.channels import Channel, Event, channels_of
from engine.plugins.notices.history import NoticeHistory

if TYPE_CHECKING:
    from engine.plugins.notices.spec import NotifySpec

log = structlog.get_logger(__name__)

SECONDS = 10.0
"""Deadline for one delivery."""
LONGEST = 2_000
"""Maximum length of a reason, in characters; services refuse long messages."""
_EVENT_TEXT = {"budget": "reached a budget", "no_signal": "has no learning signal"}
"""What happened, where it is not the name of the kind."""


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
            NoticeError: a channel cannot work.
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
            await asyncio.to_thread(_wait, deliveries, self._seconds)
            self._close(deliveries)

    def notify_now(self, kind: str, **fields: Any) -> None:
        """Like `notify`, for code outside of an event loop: waits in this thread."""
        deliveries = self._begin(kind, fields)
        _wait(deliveries, self._seconds)
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
        plain: Event = _masked(json.loads(to_json(event, inf_nan_mode="strings", fallback=str)))
        return plain

    def _close(self, deliveries: Sequence[_Delivery]) -> None:
        """Log what was not delivered: the first failure of a channel as a warning, later ones as debug."""
        for delivery in deliveries:
            problem = f"not delivered within {self._seconds:g} s" if delivery.running else delivery.problem
            if problem is None:
                continue
            say = log.debug if delivery.name in self._failed else log.warning
            self._failed.add(delivery.name)
            kind = delivery.event["kind"]
            say("notice failed", channel=delivery.name, event_kind=kind, reason=mask_credentials(problem))
        if any(not delivery.running and delivery.problem is None for delivery in deliveries):
            self._history.add(deliveries[0].event)


def _masked(value: Any) -> Any:
    """Mask the secrets in every string of a JSON value."""
    if isinstance(value, str):
        return mask_credentials(value)
    if isinstance(value, dict):
        return {key: _masked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_masked(item) for item in value]
    return value


class _Delivery:
    """One event on one channel, in a daemon thread."""

    def __init__(self, name: str, channel: Channel, event: Event) -> None:
        self.name = name
        self.event = event
        self.problem: str | None = None
        self._send = channel
        self._thread = threading.Thread(target=self._run, name=f"notify-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._send(dict(self.event))
        except BaseException as error:  # noqa: BLE001  the user's function can raise anything, SystemExit too
            self.problem = str(error) or repr(error)

    @property
    def running(self) -> bool:
        """Whether the delivery has not ended yet."""
        return self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait until the delivery has ended, at most so many seconds."""
        self._thread.join(max(0.0, seconds))


def _wait(deliveries: Sequence[_Delivery], seconds: float) -> None:
    until = time.monotonic() + seconds + 0.5  # after the channels' own deadlines, whose messages say more
    for delivery in deliveries:
        delivery.wait(until - time.monotonic())
