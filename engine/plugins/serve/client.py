"""A client of `engine serve SPEC`: groups of finished episodes as Arrow record batches. It needs httpx and pyarrow, and
nothing else.

    with GroupClient("http://127.0.0.1:8700", token_file="token") as client:
        for group in client.groups("step-1", count=8, version=0):
            train(group.batch)                       # columns: docs/rows.md

A lost or restarted service is waited for, and each group arrives exactly once. The three sums of a group are compared
with what arrived. This file may be copied alone.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import httpx
import pyarrow as pa

_ARROW = "application/vnd.apache.arrow.stream"


class ServeError(Exception):
    """The service refused a request, or what arrived is not what it sent. `code` is a name for programs."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Sums:
    """What both sides of a hand-over compare."""

    tokens: int
    trained: int
    advantages: float
    """Sum of the absolute advantages of trained tokens."""

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> Sums:
        """The sums of some rows."""
        tokens = trained = 0
        total = 0.0
        masks, advantages = batch.column("loss_mask").to_pylist(), batch.column("advantages").to_pylist()
        for mask, values in zip(masks, advantages, strict=True):
            tokens += len(mask)
            trained += sum(mask)
            total += sum(abs(value) for value, is_trained in zip(values, mask, strict=True) if is_trained)
        return cls(tokens, trained, total)

    def check(self, other: Sums) -> None:
        """Compare the sums of what was handed over with those of what the trainer has.

        Raises:
            ServeError: code `handover`: they differ, so a part of the rows was lost or changed.
        """
        apart = abs(self.advantages - other.advantages)
        if (self.tokens, self.trained) != (other.tokens, other.trained) or apart > 1e-6 * max(1.0, self.advantages):
            raise ServeError(f"handed over {self}, but there are {other}; do not train on these rows", "handover")


@dataclass(frozen=True)
class Group:
    """The finished episodes of one task."""

    number: int
    """Its number in the request, from 0."""
    task_id: str
    version: int
    """The weight version when it began."""
    batch: pa.RecordBatch
    """Its rows; none if `note["left_out"]` says why."""
    sums: Sums
    note: dict[str, Any]
    """All that the service says about it."""

    @property
    def images(self) -> dict[str, bytes]:
        """The encoded images of its rows, by digest."""
        return {each["image"]: each["data"] for row in self.batch.column("image_data").to_pylist() for each in row}


class GroupClient(AbstractContextManager["GroupClient"]):
    """A service.

    Args:
        url: Its address.
        token: Its bearer token. Default: from `token_file`, else from the variable EPISODE_ENGINE_TOKEN.
        token_file: A file that holds the token.
        patience: Seconds without any answer after which a lost service is given up.
    """

    def __init__(
        self, url: str, token: str | None = None, *, token_file: str | Path | None = None, patience: float = 600.0
    ) -> None:
        if token is None:
            token = Path(token_file).read_text() if token_file else os.environ.get("EPISODE_ENGINE_TOKEN", "")
        headers = {"authorization": f"Bearer {token.strip()}"}
        timeout = httpx.Timeout(None, connect=10.0)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)
        self._patience = patience

    def health(self) -> dict[str, Any]:
        """What the service does now."""
        return self._json("GET", "/health")

    def weights(self, version: int) -> None:
        """Tell the service that its servers sample with weights of `version` from now on. Push them first."""
        self._json("POST", "/weights", {"version": version})

    def cancel(self, id: str) -> None:
        """Cancel a request."""
        self._json("POST", "/cancel", {"id": id})

    def groups(
        self,
        id: str,
        *,
        tasks: Sequence[str] | Literal["next"] = "next",
        count: int | None = None,
        samples: int | None = None,
        version: int | None = None,
        sampling: dict[str, Any] | None = None,
        trainer: str | None = None,
    ) -> Iterator[Group]:
        """Yield the groups of a request, each once, in the order in which they finish.

        Args:
            id: Its name, which you choose. The same name gets the same groups again, also after a restart of either
                side.
            tasks: Ids of tasks, or `next`: the next `count` ones.
            count: Number of groups of `next`; 1 if it is not given.
            samples: Episodes of each group; by default the spec's `rollout.samples_per_task`.
            version: The trainer's weight version; refused if it is not the newest.
            sampling: Keys of the spec's `sampling` with other values.
            trainer: The trainer's name: what it cannot carry of the spec is refused.

        Raises:
            ServeError: the service refused, stopped with an error, or was away for `patience`.
        """
        body: dict[str, Any] = {"id": id, "tasks": tasks if tasks == "next" else list(tasks)}
        body |= {"count": count, "samples": samples}
        body |= {"version": version, "sampling": sampling, "trainer": trainer}
        body = {key: value for key, value in body.items() if value is not None}
        seen: set[int] = set()
        last = time.monotonic()
        while True:
            try:
                with self._http.stream(
                    "POST", "/groups", json=body | {"skip": sorted(seen)}, headers={"accept": _ARROW}
                ) as reply:
                    if reply.status_code != 200:
                        reply.read()
                        _raise(reply)
                    for note, batch in _batches(reply):
                        if (end := note.get("end")) is not None:
                            if "error" in end:
                                raise ServeError(end["error"]["message"], end["error"]["code"])
                            if end.get("cancelled"):
                                raise ServeError(f"the request {id!r} was cancelled", "cancelled")
                            if not end.get("stopped"):
                                return
                            break
                        about = note["group"]
                        sums = Sums(**about["sums"])
                        sums.check(Sums.of(batch))
                        group = Group(about["number"], about["task_id"], about["version"], batch, sums, about)
                        last = time.monotonic()
                        if group.number not in seen:
                            seen.add(group.number)
                            yield group
                        last = time.monotonic()
            except httpx.TransportError as error:
                if time.monotonic() - last > self._patience:
                    raise ServeError(f"the service was away for {self._patience:g} s: {error}", "away") from error
            time.sleep(0.5)

    def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        began = time.monotonic()
        while True:
            try:
                reply = self._http.request(method, path, json=body)
                if reply.status_code != 200:
                    _raise(reply)
                found: dict[str, Any] = reply.json()
                return found
            except httpx.TransportError as error:
                if time.monotonic() - began > self._patience:
                    raise ServeError(f"the service was away for {self._patience:g} s: {error}", "away") from error
            time.sleep(0.5)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _raise(reply: httpx.Response) -> None:
    try:
        error = reply.json()["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": reply.text[:500], "code": "unknown"}
    if reply.status_code in (429, 503):
        raise httpx.TransportError(error["message"])  # the same request may succeed later
    raise ServeError(f"{reply.status_code}: {error['message']}", error["code"])


class _Body(io.RawIOBase):
    """The body of a reply as a file."""

    def __init__(self, reply: httpx.Response) -> None:
        self._parts = reply.iter_bytes()
        self._left = b""
        self.error: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            while not self._left:
                self._left = next(self._parts)
        except StopIteration:
            return 0
        except Exception as error:
            self.error = error
            raise
        part = self._left[: len(buffer)]
        self._left = self._left[len(part) :]
        buffer[: len(part)] = part
        return len(part)


def _batches(reply: httpx.Response) -> Iterator[tuple[dict[str, Any], pa.RecordBatch]]:
    """Each record batch with what is said about it."""
    body = _Body(reply)
    try:
        reader = pa.ipc.open_stream(io.BufferedReader(body))
        while True:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
            yield json.loads(metadata[b"note"]), batch
    except StopIteration:
        raise httpx.RemoteProtocolError("the answer has no end") from None
    except (pa.ArrowException, OSError) as error:
        raise body.error or httpx.RemoteProtocolError(f"the answer was cut: {error}") from error
