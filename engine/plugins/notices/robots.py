"""Robots of group chats in DingTalk and Feishu: signed messages, and answers that say whether they were accepted.

Both services answer a refused message with status 200 and an error code. apprise takes status 200 for success, signs DingTalk's messages
with a signature that is encoded twice, and does not sign Feishu's; so these two are written here.

Sources: DingTalk, "Custom robot: security settings"; Feishu, "Custom bot usage guide: signature verification".
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

DINGTALK = "https://oapi.dingtalk.com/robot/send"
FEISHU = "https://open.feishu.cn/open-apis/bot/v2/hook"


class Robot(NamedTuple):
    """A robot: its access token, and the secret with which messages are signed, if it has one."""

    token: str
    secret: str | None


class Post(NamedTuple):
    """A request to a service."""

    url: str
    query: dict[str, str]
    body: dict[str, Any]


def dingtalk(robot: Robot, text: str, now: float) -> Post:
    """DingTalk's request: `sign` is the HMAC-SHA256 of `timestamp\\nsecret` under the secret, in base64; the timestamp is in milliseconds."""
    query = {"access_token": robot.token}
    if robot.secret is not None:
        stamp = str(round(now * 1000))
        query |= {"timestamp": stamp, "sign": _sign(robot.secret.encode(), f"{stamp}\n{robot.secret}".encode())}
    return Post(DINGTALK, query, {"msgtype": "text", "text": {"content": text}})


def feishu(robot: Robot, text: str, now: float) -> Post:
    """Feishu's request: `sign` is the HMAC-SHA256 of the empty message under `timestamp\\nsecret`, in base64; the timestamp is in seconds."""
    body: dict[str, Any] = {"msg_type": "text", "content": {"text": text}}
    if robot.secret is not None:
        stamp = str(int(now))
        body |= {"timestamp": stamp, "sign": _sign(f"{stamp}\n{robot.secret}".encode(), b"")}
    return Post(f"{FEISHU}/{robot.token}", {}, body)


def _sign(key: bytes, message: bytes) -> str:
    return base64.b64encode(hmac.new(key, message, hashlib.sha256).digest()).decode()


Request = Callable[[Robot, str, float], Post]


def robot_of(url: str) -> tuple[Request, Robot] | None:
    """The robot that a URL names; None if it names none.

        dingtalk://SECRET@TOKEN     https://oapi.dingtalk.com/robot/send?access_token=TOKEN&secret=SECRET
        feishu://SECRET@TOKEN       https://open.feishu.cn/open-apis/bot/v2/hook/TOKEN?secret=SECRET

    Without a secret the messages are not signed.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    user, _, place = parts.netloc.rpartition("@")
    secret = unquote(user) or query.get("secret")
    own: dict[str, Request] = {"dingtalk": dingtalk, "feishu": feishu}
    if parts.scheme in own and place:
        return own[parts.scheme], Robot(unquote(place), secret)
    if url.startswith(f"{DINGTALK}?") and "access_token" in query:
        return dingtalk, Robot(query["access_token"], secret)
    if url.startswith(f"{FEISHU}/") and (token := parts.path.rpartition("/")[2]):
        return feishu, Robot(token, secret)
    return None


_REPLY_BYTES = 65_536
"""Number of bytes of a reply that are read."""


def send(request: Request, robot: Robot, text: str, seconds: float, clock: Callable[[], float] = time.time) -> None:
    """Send a message.

    Raises:
        RuntimeError: the service cannot be reached, or did not accept the message. The text holds neither token nor signature.
    """
    made = request(robot, text, clock())
    status, reply = post(made.url, made.body, seconds, made.query)
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
