"""Notifications when training fails, stalls, diverges or finishes: to a webhook, a command or a function.

Invariant: nothing here raises into the training or delays it by more than a deadline. Each delivery has its own daemon thread,
and one that hangs is abandoned; the threads of `concurrent.futures` would delay the end of the process.

A library does not replace this. apprise (BSD-2-Clause; 9 MB with its plugins, and requests, Markdown and click) has many
services, but no deadline for a delivery, no function and no stall detection, and its JSON has no fields for step and reason. A
function in `notify.use` can call it in two lines.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import structlog
from pydantic_core import to_json

from engine.errors import TrainError
from engine.masking import remember

if TYPE_CHECKING:
    from engine.schemas.train import NotifySpec

log = structlog.get_logger(__name__)

SECONDS = 10.0
"""Deadline for one delivery."""
_EVENT_TEXT = {
    "failed": "training failed",
    "stalled": "training stalled",
    "diverged": "training diverged",
    "finished": "training finished",
}

Event = dict[str, Any]
"""`kind`, `run`, `time` (seconds since 1970), `text` (one sentence), and the fields that the caller adds."""


class Notifier:
    """Sends events on every channel that the spec names.

    notifier = Notifier(spec.train.notify, "arithmetic-1", base=spec_folder)
    await notifier.notify("diverged", step=12, reason="the loss is nan")
    """

    def __init__(
        self,
        spec: NotifySpec,
        run: str,
        *,
        base: Path | None = None,
        environ: Mapping[str, str] = os.environ,
        seconds: float = SECONDS,
    ) -> None:
        """
        Args:
            spec: The channels, and the kinds of events to send.
            run: The run's name.
            base: The spec's folder, in which the function is looked for.
            environ: Environment variables, with the webhook's URL.
            seconds: Deadline for one delivery, in seconds.

        Raises:
            TrainError: kind `train_setup`: the variable is not set, or there is no such command.
            EntryError: there is no such function.
        """
        self._kinds = frozenset(spec.on)
        self._run = run
        self._seconds = seconds
        self._channels: dict[str, Callable[[Event], None]] = {}
        self._failed: set[str] = set()
        if spec.webhook_env is not None:
            self._channels["webhook"] = _webhook(spec.webhook_env, environ, seconds)
        if spec.command is not None:
            self._channels["command"] = _command(spec.command, seconds)
        if spec.use is not None:
            self._channels["function"] = _function(spec.use, base)

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
            return [_Delivery(name, channel, event) for name, channel in self._channels.items()]
        except Exception as error:  # noqa: BLE001  no thread can be started, for example; training goes on
            log.warning("notification failed", event_kind=kind, reason=repr(error))
            return []

    def _event(self, kind: str, fields: Mapping[str, Any]) -> Event:
        words = f"{self._run}: {_EVENT_TEXT.get(kind, kind)}"
        at = f" at step {fields['step']}" if "step" in fields else ""
        why = f": {fields['reason']}" if fields.get("reason") else ""
        event = {**fields, "kind": kind, "run": self._run, "time": time.time(), "text": f"{words}{at}{why}"}
        plain: Event = json.loads(to_json(event, inf_nan_mode="strings", fallback=str))
        return plain

    def _close(self, deliveries: Sequence[_Delivery]) -> None:
        """Log what was not delivered: the first failure of a channel as a warning, later ones as debug."""
        for delivery in deliveries:
            problem = f"not delivered within {self._seconds:g} s" if delivery.running else delivery.problem
            if problem is None:
                continue
            say = log.debug if delivery.name in self._failed else log.warning
            self._failed.add(delivery.name)
            say("notification failed", channel=delivery.name, event_kind=delivery.event["kind"], reason=problem)


class StallWatch:
    """Sends the event `stalled` if nothing happens for too long, once per stall.

        with StallWatch(notifier, spec.stall_timeout, lambda: {"step": trainer.step}) as watch:
            watch.tick()        # at each episode and each step

    It has its own thread, so it also notices an event loop that hangs.
    """

    def __init__(
        self,
        notifier: Notifier,
        seconds: float,
        about: Callable[[], Mapping[str, Any]] = dict,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            notifier: Sends the event.
            seconds: Training is stalled after this time without a tick.
            about: Returns more fields for the event.
            clock: A monotonic clock, in seconds.
        """
        self._notifier = notifier
        self._seconds = seconds
        self._about = about
        self._clock = clock
        self._last = clock()
        self._told = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def tick(self) -> None:
        """Report progress. Costs less than a microsecond; any thread can call it."""
        self._last = self._clock()
        self._told = False

    def check(self) -> float:
        """Send the event if training is stalled.

        Returns:
            Seconds until the next check is useful.
        """
        quiet = self._clock() - self._last
        if quiet < self._seconds:
            return self._seconds - quiet
        if not self._told:
            self._told = True
            self._notifier.notify_now("stalled", **self._fields(quiet))
        return self._seconds

    def _fields(self, quiet: float) -> dict[str, Any]:
        try:
            more = dict(self._about())
        except Exception as error:  # noqa: BLE001  the event is sent without these fields
            more = {"problem": repr(error)}
        return {**more, "seconds": quiet, "reason": f"no episode and no step for {quiet:.0f} s"}

    def _watch(self) -> None:
        wait = self._seconds
        while not self._ended.wait(wait):
            wait = max(self.check(), 0.001)

    def close(self) -> None:
        """End the watch."""
        self._ended.set()

    def __enter__(self) -> Self:
        self.tick()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Delivery:
    """One event on one channel, in a daemon thread."""

    def __init__(self, name: str, channel: Callable[[Event], None], event: Event) -> None:
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


def _webhook(variable: str, environ: Mapping[str, str], seconds: float) -> Callable[[Event], None]:
    url = environ.get(variable)
    if not url:
        raise TrainError(
            f"the environment variable {variable} (train.notify.webhook_env) is not set: "
            "set it to the webhook's URL, or remove `webhook_env`",
            kind="train_setup",
        )
    remember(variable, url)

    def post(event: Event) -> None:
        import httpx

        try:
            reply = httpx.post(url, json=event, timeout=seconds, follow_redirects=False)
        except (httpx.HTTPError, httpx.InvalidURL) as error:  # a URL can hold a secret and is never shown
            raise RuntimeError(f"{type(error).__name__} at the URL in {variable}") from None
        if reply.status_code >= 300:
            raise RuntimeError(f"the URL in {variable} replied with {reply.status_code}: {reply.text[:200]}")

    return post


def _command(command: Sequence[str], seconds: float) -> Callable[[Event], None]:
    if not command or shutil.which(command[0]) is None:
        raise TrainError(
            f"train.notify.command: there is no command {command[0] if command else ''!r}", kind="train_setup"
        )

    def run(event: Event) -> None:
        with subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                _, said = process.communicate(json.dumps(event).encode(), timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # and the processes that it started
                raise RuntimeError(f"{command[0]} did not end within {seconds:g} s") from None
        if process.returncode:
            tail = said.decode(errors="replace").strip()[-200:]
            raise RuntimeError(f"{command[0]} exited with {process.returncode}" + (f": {tail}" if tail else ""))

    return run


def _function(use: str, base: Path | None) -> Callable[[Event], None]:
    from engine.spec.entry import load_entry

    function = load_entry(use, base)

    def call(event: Event) -> None:
        found = function(event)
        if inspect.iscoroutine(found):
            asyncio.run(found)

    return call
