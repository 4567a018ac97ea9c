"""The channels of notices: a webhook, services by apprise, a command, a function.

Each channel is a function that delivers one event and raises what went wrong. No message holds a URL of a channel: URLs contain
secrets. apprise formats the messages of its services; it has no webhook with an event's fields, no command and no function.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from engine.masking import remember
from engine.plugins.notices.errors import NoticeError
from engine.plugins.notices.robots import Request, Robot, post, robot_of, send

if TYPE_CHECKING:
    from engine.plugins.notices.spec import NotifySpec

Event = dict[str, Any]
"""`kind`, `run`, `time` (seconds since 1970), `text` (one sentence), and the fields that the caller adds."""
Channel = Callable[[Event], None]

_SECRET_PART = 8
"""Minimum length of a part of a URL that is masked, in characters."""
_APPRISE_TYPES = {"failed": "failure", "diverged": "failure", "finished": "success"}
"""apprise's type of a notice, which decides its color; other kinds are warnings."""


def channels_of(spec: NotifySpec, base: Path | None, environ: Mapping[str, str], seconds: float) -> dict[str, Channel]:
    """Build every channel of a spec, by name.

    Args:
        spec: The section `notify`.
        base: The spec's folder, in which the function is looked for.
        environ: Environment variables.
        seconds: Deadline for one delivery, in seconds.

    Raises:
        NoticeError: a variable is not set or holds no URL, or a command or the package apprise is missing.
        EntryError: the function does not exist.
    """
    channels: dict[str, Channel] = {}
    if spec.webhook_env is not None:
        channels["webhook"] = webhook(spec.webhook_env, environ, seconds)
    for variable in spec.services_env:
        channels[variable] = service(variable, environ, seconds)
    if spec.command is not None:
        channels["command"] = command(spec.command, seconds)
    if spec.use is not None:
        channels["function"] = function(spec.use, base)
    return channels


def _url(variable: str, key: str, environ: Mapping[str, str]) -> str:
    url = environ.get(variable)
    if not url:
        raise NoticeError(
            f"the environment variable {variable} (notify.{key}) is not set: set it to the URL, or remove it from `{key}`"
        )
    remember(variable, url)
    remember_parts(variable, url)
    return url


def remember_parts(variable: str, url: str) -> None:
    """Mask the parts of a URL in which services hold secrets: user, password, path, query values.

    Libraries quote parts of a URL in messages, for example the path in a connection error.
    """
    parts = urlsplit(url)
    user, _, place = parts.netloc.rpartition("@")
    held = [*user.split(":"), *parts.path.split("/"), parts.path, *(value for _, value in parse_qsl(parts.query))]
    host = place.partition(":")[0]
    if "." not in host and host != "localhost":
        held.append(host)  # apprise has tokens in the host's place: dingtalk://SECRET@TOKEN
    for part in held:
        for form in {part, unquote(part)}:
            if len(form) >= _SECRET_PART:
                remember(variable, form)


def webhook(variable: str, environ: Mapping[str, str], seconds: float) -> Channel:
    """A channel that POSTs the event as JSON to the URL in a variable."""
    url = _url(variable, "webhook_env", environ)

    def post_event(event: Event) -> None:
        try:
            status, reply = post(url, event, seconds)
        except RuntimeError as error:
            raise RuntimeError(f"{error} at the URL in {variable}") from None
        if status >= 300:
            raise RuntimeError(f"the URL in {variable} replied with {status}: {reply[:200]}")

    return post_event


def _send_by_robot(variable: str, request: Request, robot: Robot, seconds: float, event: Event) -> None:
    try:
        send(request, robot, event["text"], seconds)
    except RuntimeError as error:
        raise RuntimeError(f"the service of {variable} did not take it: {error}") from None


def service(variable: str, environ: Mapping[str, str], seconds: float) -> Channel:
    """A channel that sends the text to the service whose URL is in a variable: by `engine.plugins.notices.robots` or by apprise.

    Raises:
        NoticeError: apprise is not installed, or does not know the URL.
    """
    url = _url(variable, "services_env", environ)
    if (found := robot_of(url)) is not None:
        request, robot = found
        return partial(_send_by_robot, variable, request, robot, seconds)
    try:
        import apprise
    except ImportError:
        raise NoticeError(
            "`notify.services_env` needs the package apprise: pip install 'episode-engine[notify]'"
        ) from None
    asset = apprise.AppriseAsset(app_id="episode-engine", app_url="", async_mode=False)
    with _apprise_log():
        target = apprise.Apprise.instantiate(url, asset=asset)
    if target is None:
        raise NoticeError(
            f"the environment variable {variable} (notify.services_env) does not hold a URL that apprise knows: "
            "write it as in the table of services in docs/looking.md"
        )

    def notify(event: Event) -> None:
        kind = _APPRISE_TYPES.get(event["kind"], "warning")
        title = f"{event['run']}: {event['kind']}"
        with _apprise_log() as said:
            sent = target.notify(body=event["text"], title=title, notify_type=kind, interpret_escapes=False)
        reason = " ".join(" ".join(said).split())
        if not sent:
            raise RuntimeError(f"the service of {variable} did not take it" + (f": {reason}" if reason else ""))

    return notify


@contextmanager
def _apprise_log() -> Iterator[list[str]]:
    """Collect the warnings that apprise logs in this thread, and let none reach other handlers, because they can quote a URL."""
    logger, thread = logging.getLogger("apprise"), threading.get_ident()
    said: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread == thread:
                said.append(record.getMessage())

    handler = Collect(logging.WARNING)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def command(words: Sequence[str], seconds: float) -> Channel:
    """A channel that runs a command with the event as JSON on its standard input.

    Raises:
        NoticeError: there is no such command.
    """
    if not words or shutil.which(words[0]) is None:
        raise NoticeError(f"notify.command: there is no command {words[0] if words else ''!r}")

    def run(event: Event) -> None:
        with subprocess.Popen(
            list(words),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                _, said = process.communicate(json.dumps(event).encode(), timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # and the processes that it started
                raise RuntimeError(f"{words[0]} did not end within {seconds:g} s") from None
        if process.returncode:
            tail = said.decode(errors="replace").strip()[-200:]
            raise RuntimeError(f"{words[0]} exited with {process.returncode}" + (f": {tail}" if tail else ""))

    return run


def function(use: str, base: Path | None) -> Channel:
    """A channel that calls a function of the spec; a coroutine is run to its end."""
    from engine.spec.code.entry import load_entry

    found = load_entry(use, base)

    def call(event: Event) -> None:
        answer = found(event)
        if inspect.iscoroutine(answer):
            asyncio.run(answer)

    return call
