"""The channels of notices: a webhook, services by apprise, robots of DingTalk and Feishu, a command, a function.

Each channel is a function that delivers one event and raises what went wrong. No message holds a URL of a channel: URLs
contain secrets. apprise formats the messages of its services; it has no webhook with an event's fields, no command and
no function.

DingTalk and Feishu answer a refused message with status 200 and an error code. apprise takes status 200 for success,
signs DingTalk's messages with a signature that is encoded twice, and does not sign Feishu's; so these two are written
here. Sources: DingTalk, "Custom
robot: security settings"; Feishu, "Custom bot usage guide: signature verification".
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import inspect
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from engine.errors import EngineError
from engine.logs import collected_logs
from engine.masking import remember

if TYPE_CHECKING:
    from engine.plugins.notices.spec import NotifySpec
_SECRET_PART = 8
"""Minimum length of a part of a URL that is masked, in characters."""
_APPRISE_TYPES = {"failed": "failure", "diverged": "failure", "finished": "success"}
"""apprise's type of a notice, which decides its color; other kinds are warnings."""
DINGTALK = "https://oapi.dingtalk.com/robot/send"
FEISHU = "https://open.feishu.cn/open-apis/bot/v2/hook"
_REPLY_BYTES = 65_536
"""Number of bytes of a reply that are read."""


Event = dict[str, Any]
"""`kind`, `run`, `time` (seconds since 1970), `text` (one sentence), and the fields that the caller adds."""
Channel = Callable[[Event], None]


def channels_of(spec: NotifySpec, base: Path | None, environ: Mapping[str, str], seconds: float) -> dict[str, Channel]:
    """Build every channel of a spec, by name.

    Args:
        spec: The section `notify`.
        base: The spec's folder, in which the function is looked for.
        environ: Environment variables.
        seconds: Deadline for one delivery, in seconds.

    Raises:
        EngineError: a variable is not set or holds no URL, or a command or the package apprise is missing.
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
        raise EngineError(
            f"the environment variable {variable} (notify.{key}) is not set: set it to the URL, or remove it from "
            f"`{key}`",
            kind="notice_setup",
            blame="spec",
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


def service(variable: str, environ: Mapping[str, str], seconds: float) -> Channel:
    """A channel that sends the text to the service whose URL is in a variable, by a robot below or by apprise.

    Raises:
        EngineError: apprise is not installed, or does not know the URL.
    """
    url = _url(variable, "services_env", environ)
    if (robot := robot_of(url)) is not None:

        def send_by_robot(event: Event) -> None:
            try:
                send(*robot, event["text"], seconds)
            except RuntimeError as error:
                raise RuntimeError(f"the service of {variable} did not take it: {error}") from None

        return send_by_robot
    try:
        import apprise
    except ImportError:
        raise EngineError(
            "`notify.services_env` needs the package apprise: pip install 'episode-engine[notify]'",
            kind="notice_setup",
            blame="spec",
        ) from None
    asset = apprise.AppriseAsset(app_id="episode-engine", app_url="", async_mode=False)
    with collected_logs("apprise"):
        target = apprise.Apprise.instantiate(url, asset=asset)
    if target is None:
        raise EngineError(
            f"the environment variable {variable} (notify.services_env) does not hold a URL that apprise knows: "
            "write it as in the table of services in docs/looking.md",
            kind="notice_setup",
            blame="spec",
        )

    def notify(event: Event) -> None:
        kind = _APPRISE_TYPES.get(event["kind"], "warning")
        title = f"{event['run']}: {event['kind']}"
        with collected_logs("apprise") as said:
            sent = target.notify(body=event["text"], title=title, notify_type=kind, interpret_escapes=False)
        reason = " ".join(" ".join(said).split())
        if not sent:
            raise RuntimeError(f"the service of {variable} did not take it" + (f": {reason}" if reason else ""))

    return notify


def command(words: Sequence[str], seconds: float) -> Channel:
    """A channel that runs a command with the event as JSON on its standard input.

    Raises:
        EngineError: there is no such command.
    """
    if not words or shutil.which(words[0]) is None:
        raise EngineError(
            f"notify.command: there is no command {words[0] if words else ''!r}", kind="notice_setup", blame="spec"
        )

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

    target = load_entry(use, base)

    def call(event: Event) -> None:
        answer = target(event)
        if inspect.iscoroutine(answer):
            asyncio.run(answer)

    return call


Post = tuple[str, dict[str, str], dict[str, Any]]
"""A request to a service: URL, query and body."""


def dingtalk(token: str, secret: str | None, text: str, now: float) -> Post:
    """DingTalk's request: `sign` is the HMAC-SHA256 of `timestamp\\nsecret` under the secret, in base64; the timestamp
    is in milliseconds."""
    query = {"access_token": token}
    if secret is not None:
        stamp = str(round(now * 1000))
        query |= {"timestamp": stamp, "sign": _sign(secret.encode(), f"{stamp}\n{secret}".encode())}
    return DINGTALK, query, {"msgtype": "text", "text": {"content": text}}


def feishu(token: str, secret: str | None, text: str, now: float) -> Post:
    """Feishu's request: `sign` is the HMAC-SHA256 of the empty message under `timestamp\\nsecret`, in base64; the
    timestamp is in seconds."""
    body: dict[str, Any] = {"msg_type": "text", "content": {"text": text}}
    if secret is not None:
        stamp = str(int(now))
        body |= {"timestamp": stamp, "sign": _sign(f"{stamp}\n{secret}".encode(), b"")}
    return f"{FEISHU}/{token}", {}, body


def _sign(key: bytes, message: bytes) -> str:
    return base64.b64encode(hmac.new(key, message, hashlib.sha256).digest()).decode()


Request = Callable[[str, str | None, str, float], Post]


def robot_of(url: str) -> tuple[Request, str, str | None] | None:
    """The robot that a URL names; None if it names none.

        dingtalk://SECRET@TOKEN     https://oapi.dingtalk.com/robot/send?access_token=TOKEN&secret=SECRET
        feishu://SECRET@TOKEN       https://open.feishu.cn/open-apis/bot/v2/hook/TOKEN?secret=SECRET

    Without a secret the messages are not signed.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    user, _, place = parts.netloc.rpartition("@")
    secret = unquote(user) or query.get("secret")
    by_scheme: dict[str, Request] = {"dingtalk": dingtalk, "feishu": feishu}
    if parts.scheme in by_scheme and place:
        return by_scheme[parts.scheme], unquote(place), secret
    if url.startswith(f"{DINGTALK}?") and "access_token" in query:
        return dingtalk, query["access_token"], secret
    if url.startswith(f"{FEISHU}/") and (token := parts.path.rpartition("/")[2]):
        return feishu, token, secret
    return None


def send(request: Request, token: str, secret: str | None, text: str, seconds: float) -> None:
    """Send a message.

    Raises:
        RuntimeError: the service cannot be reached, or did not accept the message. The text holds neither token nor
            signature.
    """
    url, query, body = request(token, secret, text, time.time())
    status, reply = post(url, body, seconds, query)
    try:
        answer = json.loads(reply)
        code = answer.get("errcode", answer.get("code", answer.get("StatusCode", 0)))
        said = answer.get("errmsg") or answer.get("msg") or ""
    except (ValueError, AttributeError):
        code, said = 0, reply[:200]
    if status >= 300 or code != 0:
        raise RuntimeError(f"status {status}, code {code}: {said}")


def post(url: str, body: Any, seconds: float, query: Mapping[str, str] | None = None) -> tuple[int, str]:
    """POST JSON, and return the status and the beginning of the reply, which may be slow or endless.

    Raises:
        RuntimeError: there is no valid reply in time. The text does not hold the URL.
    """
    import httpx

    end, reply = time.monotonic() + seconds, b""
    plain = {"Accept-Encoding": "identity"}  # and what comes is not unpacked: it may be a bomb
    try:
        with (
            httpx.Client(timeout=seconds, follow_redirects=False) as client,
            client.stream("POST", url, params=query or None, json=body, headers=plain) as response,
        ):
            for chunk in response.iter_raw(4096):
                reply += chunk
                if len(reply) >= _REPLY_BYTES or time.monotonic() > end:
                    break
            return response.status_code, reply[:_REPLY_BYTES].decode("utf-8", "replace")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RuntimeError(type(error).__name__) from None
