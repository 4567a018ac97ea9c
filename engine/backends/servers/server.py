"""One server: its connections, whether it is available, and the requests that are in flight to it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import msgspec

from engine.backends.http.client import HttpClient
from engine.backends.http.refusal import UNAVAILABLE, error_text
from engine.backends.http.reply import HttpFailure
from engine.errors import BackendError
from engine.schemas.base import Struct


class ImageFacts(Struct, frozen=True, kw_only=True):
    """How one server processes images."""

    processor: str
    """Its image processor's backend as `/server_info` names it: `auto` (torchvision where it has one), `torchvision`, `pil`."""
    unscaled_gap: float
    """Largest difference, in nats, of a prompt's log-probs between the image as it comes and as it is sent: about 0
    where the server scales as the rows' processor does."""


class Server:
    """One server, and what is known about it."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self.http = HttpClient(url, headers=headers)
        self.healthy = True
        self.resting = False
        """It asked for a pause (429) that has not ended."""
        self.in_flight = 0
        self.served = 0
        """Number of replies."""
        self.assigned = 0
        """Number of episodes that were assigned to it."""
        self.errors = 0
        """Number of 5xx replies in a row."""
        self.heard = 0.0
        """Time of the newest reply, or of the first request in flight; monotonic seconds."""
        self.version: str | None = None
        """Name of its weights, from its newest reply."""
        self.seeded = False
        """Whether it uses the seed of a request."""
        self.images: ImageFacts | None = None
        """How it processes images, for a model with a vision tower."""
        self.counts: Counter[str] = Counter()
        """`failed` (connections), `5xx`, `429`, `rejoined`."""
        self.refusals = 0
        """Number of 429 replies in a row."""
        self.rest: asyncio.TimerHandle | None = None
        """Ends its pause."""

    @property
    def usable(self) -> bool:
        """Whether a request may be sent to it now."""
        return self.healthy and not self.resting

    def begin(self) -> None:
        """Count a request that is sent."""
        if self.in_flight == 0:
            self.heard = time.monotonic()
        self.in_flight += 1

    def end(self) -> None:
        """Count a request that was answered or cancelled."""
        self.in_flight -= 1
        self.heard = time.monotonic()

    async def json(self, method: str, path: str, body: Any = None, *, timeout: float = 30.0) -> Any:  # noqa: ASYNC109
        """Send a small request. Returns its decoded reply; None if the body is empty.

        Raises:
            BackendError: No reply in `timeout` seconds (kind `unreachable`, retryable), or a status other than 2xx (kind
                `http_<status>`); the message includes the server's.
        """
        try:
            async with asyncio.timeout(timeout):
                reply = await self.http.request(method, path, b"" if body is None else msgspec.json.encode(body))
        except TimeoutError:
            message = f"{self.url}{path} did not answer within {timeout:g} s"
            raise BackendError(message, kind="unreachable", retryable=True, refused=True) from None
        except HttpFailure as failure:
            raise BackendError(
                f"{self.url}{path}: {failure}", kind="unreachable", retryable=True, refused=True
            ) from None
        if not 200 <= reply.status < 300:
            message = f"{self.url}{path} answered {reply.status}: {error_text(reply)}"
            raise BackendError(
                message,
                kind=f"http_{reply.status}",
                retryable=reply.status >= 500,
                refused=reply.status in (429, *UNAVAILABLE),
                retry_after=reply.retry_after,
            )
        if not reply.body:
            return None
        try:
            return msgspec.json.decode(reply.body)
        except msgspec.DecodeError:
            return reply.body.decode(errors="replace")

    def stats(self) -> dict[str, Any]:
        """Counts and state; JSON values only."""
        return {
            "url": self.url,
            "healthy": self.healthy,
            "in_flight": self.in_flight,
            "served": self.served,
            "episodes": self.assigned,
            "connections": self.http.opened,
            "weight_version": self.version,
            **self.counts,
        }
