"""Notices by apprise: the requests and mails that real local servers get, with the addresses of the services replaced."""

from __future__ import annotations

import base64
import email
import hashlib
import hmac
import json
import queue
import socket
import threading
from collections.abc import Iterator
from email.message import Message
from email.policy import default
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, urlsplit

import pytest
import structlog
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, LoginPassword

from engine.errors import EngineError
from engine.plugins.notices import channels
from engine.plugins.notices.observers import Notifier
from engine.plugins.notices.spec import NotifySpec

apprise = pytest.importorskip("apprise")

TEXT = "demo-1: run failed: no server replies"


class Request(NamedTuple):
    path: str
    query: dict[str, list[str]]
    body: Any


class Service:
    """A real HTTP server that keeps the JSON that is POSTed."""

    def __init__(self) -> None:
        self.requests: queue.Queue[Request] = queue.Queue()
        self.status, self.answer = 200, b"ok"
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                url = urlsplit(self.path)
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.requests.put(Request(url.path, parse_qs(url.query), body))
                self.send_response(service.status)
                self.end_headers()
                self.wfile.write(service.answer)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def next(self) -> Request:
        return self.requests.get(timeout=120)


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.server.shutdown()
    made.server.server_close()


def notifier(url: str) -> Notifier:
    return Notifier(NotifySpec(services_env=["SERVICE"]), "demo-1", environ={"SERVICE": url})


async def send(url: str) -> list[str]:
    """Send a notice, and return what was logged as the reasons of failed deliveries."""
    made = notifier(url)
    with structlog.testing.capture_logs() as logs:
        await made.notify("failed", reason="no server replies")
    return [entry["reason"] for entry in logs]


async def test_slack_gets_the_text_by_its_webhook(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    from apprise.plugins.slack import NotifySlack

    monkeypatch.setattr(NotifySlack, "webhook_url", f"{service.url}/services")
    url = "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"
    assert await send(url) == []
    request = service.next()
    assert request.path == "/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"
    (attachment,) = request.body["attachments"]
    assert (attachment["title"], attachment["text"]) == ("demo-1: failed", TEXT)


async def test_discord_gets_the_text_by_its_webhook(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    from apprise.plugins.discord import NotifyDiscord

    monkeypatch.setattr(NotifyDiscord, "notify_url", f"{service.url}/api/webhooks")
    token = "B" * 40 + "discord-token-of-64-chars"
    assert await send(f"https://discord.com/api/webhooks/123456789012345678/{token}") == []
    request = service.next()
    assert request.path == f"/api/webhooks/123456789012345678/{token}"
    assert TEXT in json.dumps(request.body)


@pytest.mark.parametrize(
    "url", ["feishu://{secret}@{token}", "https://open.feishu.cn/open-apis/bot/v2/hook/{token}?secret={secret}"]
)
async def test_feishu_gets_the_text_with_its_signature(
    url: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.answer = b'{"code": 0, "msg": "success"}'
    secret, token = "feishu+secret-0123456789", "0123456789abcdef-feishu"
    made = notifier(url.format(secret=quote(secret), token=token))
    monkeypatch.setattr(channels, "FEISHU", f"{service.url}/open-apis/bot/v2/hook")
    await made.notify("failed", reason="no server replies")
    request = service.next()
    assert request.path == f"/open-apis/bot/v2/hook/{token}"
    signed = f"{request.body['timestamp']}\n{secret}".encode()
    sign = base64.b64encode(hmac.new(signed, b"", hashlib.sha256).digest()).decode()
    assert request.body == {
        "msg_type": "text", "content": {"text": TEXT}, "sign": sign, "timestamp": request.body["timestamp"],
    }  # fmt: skip


@pytest.mark.parametrize(
    "url", ["dingtalk://{secret}@{token}", "https://oapi.dingtalk.com/robot/send?access_token={token}&secret={secret}"]
)
async def test_dingtalk_gets_the_text_with_its_signature(
    url: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server decodes the query once, as DingTalk does: what it gets is the signature itself."""
    service.answer = b'{"errcode": 0, "errmsg": "ok"}'
    secret, token = "SECdingtalksecret0123456789", "0123456789abcdefDingtalkToken"
    made = notifier(url.format(secret=secret, token=token))
    monkeypatch.setattr(channels, "DINGTALK", f"{service.url}/robot/send")
    await made.notify("failed", reason="no server replies")
    request = service.next()
    assert (request.path, request.query["access_token"]) == ("/robot/send", [token])
    signed = f"{request.query['timestamp'][0]}\n{secret}".encode()
    expected = base64.b64encode(hmac.new(secret.encode(), signed, hashlib.sha256).digest()).decode()
    assert request.query["sign"] == [expected]
    assert request.body == {"msgtype": "text", "text": {"content": TEXT}}


def test_robots_without_a_secret_send_unsigned_messages() -> None:
    assert channels.robot_of("dingtalk://Token01234") == (channels.dingtalk, "Token01234", None)
    assert channels.robot_of("feishu://Token01234") == (channels.feishu, "Token01234", None)
    assert channels.dingtalk("Token01234", None, "x", 1.0)[1] == {"access_token": "Token01234"}
    assert channels.feishu("Token01234", None, "x", 1.0)[2] == {"msg_type": "text", "content": {"text": "x"}}


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (200, b'{"errcode": 310000, "errmsg": "sign not match"}', "status 200, code 310000: sign not match"),
        (200, b'{"code": 19021, "msg": "sign match fail"}', "status 200, code 19021: sign match fail"),
        (403, b"no such robot Token0123456789", "status 403, code 0: no such robot ${SERVICE}"),
    ],
)
async def test_a_robot_that_refuses_is_logged_without_its_token(
    status: int, answer: bytes, said: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused messages have status 200 and a code."""
    service.status, service.answer = status, answer
    monkeypatch.setattr(channels, "DINGTALK", f"{service.url}/robot/send")
    assert await send("dingtalk://Token0123456789") == [f"the service of SERVICE did not take it: {said}"]


class Mailbox:
    """What a real SMTP server does with mails: keeps them, for users with the right password."""

    def __init__(self) -> None:
        self.mails: queue.Queue[Message] = queue.Queue()
        self.users: list[str] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        if "nobody@example.org" in envelope.rcpt_tos:
            return "554 refused for trainer with mail-password-77"
        self.mails.put(email.message_from_bytes(envelope.content, policy=default))
        return "250 OK"

    def authenticate(self, server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        right = isinstance(data, LoginPassword) and data.password == b"mail-password-77"
        if right:
            self.users.append(data.login.decode())
        return AuthResult(success=right)


@pytest.fixture
def mailbox() -> Iterator[tuple[Mailbox, int]]:
    box = Mailbox()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    controller = Controller(
        box, hostname="127.0.0.1", port=port, authenticator=box.authenticate, auth_require_tls=False, auth_required=True
    )
    controller.start()
    yield box, port
    controller.stop()


async def test_a_mail_arrives_at_an_smtp_server(mailbox: tuple[Mailbox, int]) -> None:
    box, port = mailbox
    url = f"mailto://trainer:mail-password-77@127.0.0.1:{port}?from=engine@example.org&to=me@example.org&mode=insecure&format=text"
    assert await send(url) == []
    mail = box.mails.get(timeout=120)
    assert (mail["Subject"], mail["To"]) == ("demo-1: failed", "me@example.org")
    assert "engine@example.org" in mail["From"]
    body = mail.get_body(("plain",))  # type: ignore[attr-defined]
    assert body.get_content().strip() == TEXT
    assert box.users == ["trainer"]


async def test_a_mail_that_is_refused_shows_no_password(mailbox: tuple[Mailbox, int]) -> None:
    _, port = mailbox
    url = f"mailto://trainer:mail-password-77@127.0.0.1:{port}?from=engine@example.org&to=nobody@example.org&mode=insecure"
    (reason,) = await send(url)
    assert reason.startswith("the service of SERVICE did not take it")
    assert "mail-password-77" not in reason


async def test_a_service_that_refuses_is_logged_without_its_token(
    service: Service, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from apprise.plugins.discord import NotifyDiscord

    token = "C" * 40 + "discord-token-of-64-chars"
    monkeypatch.setattr(NotifyDiscord, "notify_url", f"{service.url}/{token}")
    service.status = 404
    (reason,) = await send(f"https://discord.com/api/webhooks/123456789012345678/{token}")
    assert reason.startswith("the service of SERVICE did not take it: Failed to send")
    assert "404" in reason
    assert token not in reason + "".join(capfd.readouterr())


@pytest.mark.parametrize("url", ["nonsense://0123456789abcdef", "0123456789abcdef", "slack://0123456789abcdef"])
def test_a_url_that_is_not_known_is_an_error_at_the_start_that_does_not_show_it(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EngineError, match=r"SERVICE \(notify.services_env\) does not hold a URL") as caught:
        notifier(url)
    out, err = capfd.readouterr()
    assert "0123456789abcdef" not in str(caught.value) + out + err


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(EngineError, match=r"pip install 'episode-engine\[notify\]'"):
        notifier("slack://0123456789abcdef")
