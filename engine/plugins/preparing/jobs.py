"""Jobs over many rows: from the cache, in this process, or in several; and the digests that are keys of the cache, also
of what the tokens of a conversation depend on besides its messages and tools.

The first jobs run in this process. Workers start when the jobs have taken `ALONE` seconds, because a worker needs about
as long to import what it needs.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import inspect
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from engine import tokens
from engine.errors import StoreError
from engine.processes.worker import WorkerError, WorkerPool, default_processes
from engine.spec.code.entry import load_entry
from engine.store.private import private_folder, whole_file
from engine.tokens.loading import model_folders

if TYPE_CHECKING:
    from engine.schemas.model import ModelSpec

log = structlog.get_logger(__name__)

ALONE = 3.0
"""Seconds of work in this process before workers start."""
DEADLINE = 600.0
"""Seconds after which the job of a worker is given up, and done in this process."""
AHEAD = 3
"""Jobs per worker that are read before the first of them is finished."""
MOST_BYTES = 1 << 29
"""Size of a cache folder above which the entries that were written first are deleted."""
_CHECK = 32
"""Bytes of an entry's own digest, as hexadecimal digits."""


class PreparedCache:
    """Results on disk, under the digest of everything that they depend on. Nothing is ever out of date: other inputs
    have another digest.

    An entry is complete or absent: it is written under a temporary name and renamed, and processes that write the same
    entry write the same bytes. It holds the digest of its content, so a damaged one counts as absent. A cache that
    cannot be written only costs time.

    Args:
        folder: The folder; created at the first entry.
        most_bytes: Size of the folder above which the entries that were written first are deleted.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self._most = most_bytes
        self._usable = True
        self._written = False

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"

    def get(self, key: str) -> Any | None:
        """The value of a key; None if there is none, or if its entry is damaged."""
        try:
            data = self._file(key).read_bytes()
        except OSError:
            return None
        if data[:_CHECK] != digest_of_parts(key, data[_CHECK:]).encode():
            return None
        return json.loads(data[_CHECK:])

    def put(self, key: str, value: Any) -> None:
        """Write a value. A folder that cannot be written is reported once and not used again."""
        if not self._usable:
            return
        body = json.dumps(value, separators=(",", ":")).encode()
        path = self._file(key)
        try:
            private_folder(path.parent, exist_ok=True)
            with whole_file(path) as draft:
                draft.write_bytes(digest_of_parts(key, body).encode() + body)
            self._written = True
        except (OSError, StoreError) as error:
            self._usable = False
            log.warning("prepared data is not kept", reason=str(error))

    def prune(self) -> None:
        """Delete the entries that were written first, if this object has written and the folder is too large."""
        if not self._written:
            return
        entries = []
        for file in self.folder.glob("*/*"):  # entries, and drafts of processes that were killed
            with contextlib.suppress(OSError):
                status = file.stat()
                entries.append((status.st_mtime, status.st_size, file))
        size = sum(entry_size for _, entry_size, _ in entries)
        for _, entry_size, file in sorted(entries):
            if size <= self._most:
                return
            with contextlib.suppress(OSError):
                file.unlink()
            size -= entry_size


Job = tuple[str, Any]
"""A part of the rows: the digest of everything that the result depends on, and what the function gets, a JSON value."""


def prepare(
    jobs: Iterable[Job],
    *,
    local: Callable[[Any], Any],
    remote: str,
    common: Any,
    cache: PreparedCache,
    processes: int | None = None,
    alone: float = ALONE,
) -> Iterator[Any]:
    """The results of jobs, in order.

    Args:
        jobs: Read as they are needed, a few ahead of the results.
        local: The function, in this process: a job's value -> a JSON value.
        remote: The same function as `package.module:function`, called with `common` and a job's value in a worker.
        common: What all jobs share; a JSON value.
        cache: Where results are kept.
        processes: Number of worker processes. Default: `default_processes()`.
        alone: Seconds of work in this process before workers start.

    Raises:
        Exception: What `local` raises. Results before it have been given.
    """
    most = default_processes() if processes is None else processes
    spent = 0.0
    waiting: deque[tuple[Job, Future[Any]]] = deque()
    with contextlib.ExitStack() as opened:
        workers: WorkerPool | None = None
        for job in jobs:
            future: Future[Any] = Future()
            cached = cache.get(job[0])
            if cached is not None:
                future.set_result(cached)
            elif most == 1 or (workers is None and spent < alone):
                began = time.perf_counter()
                future.set_result(_in_this_process(job, local, cache))
                spent += time.perf_counter() - began
            else:
                workers = workers or opened.enter_context(WorkerPool(most, remote, common))
                future = workers.submit(_in_worker, workers, job, cache)
            waiting.append((job, future))
            while waiting and (waiting[0][1].done() or len(waiting) > AHEAD * most):
                yield _result(*waiting.popleft(), local, cache)
        while waiting:
            yield _result(*waiting.popleft(), local, cache)
    cache.prune()


def _in_this_process(job: Job, local: Callable[[Any], Any], cache: PreparedCache) -> Any:
    key, value = job
    result = local(value)
    cache.put(key, result)
    return result


def _in_worker(workers: WorkerPool, job: Job, cache: PreparedCache) -> Any:
    """A job's result, in a thread of the workers."""
    key, value = job
    result = workers.ask(json.dumps(value).encode(), seconds=DEADLINE)
    cache.put(key, result)
    return result


def _result(job: Job, future: Future[Any], local: Callable[[Any], Any], cache: PreparedCache) -> Any:
    try:
        return future.result()
    except WorkerError as error:
        log.info("a part of the rows is prepared in this process", reason=f"of a worker: {error}")
        return _in_this_process(job, local, cache)


_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
"""Suffixes of the files of tokenizers, templates, configs and processors."""
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "renderers")
_DATE = "strftime_now"
"""A template that calls it writes another text on another day."""


def rendering_digest(model: ModelSpec, base: Path) -> str:
    """Digest of the files of the model's tokenizer, template and processor, the spec's `model`, and the code that
    renders.

    Raises:
        ModelError: The model's files are not there and cannot be fetched.
    """
    folder, source = model_folders(model, base)
    files = sorted(
        file for parent in dict.fromkeys((folder, source)) for file in parent.iterdir() if file.suffix in _SUFFIXES
    )
    if model.chat_template is not None:
        files.append(base / model.chat_template)
    parts = [
        model.model_dump_json(exclude={"path", "revision", "tokenizer"}),
        digest_of_files(files),
        digest_of_files(sorted(Path(str(tokens.__file__)).resolve().parent.rglob("*.py"))),
    ]
    parts += [f"{name} {_version(name)}" for name in _LIBRARIES]
    if ":" in model.tool_calls:
        parts.append(digest_of_files([Path(inspect.getfile(load_entry(model.tool_calls, base)))]))
    dated = any(_DATE in file.read_text("utf-8", "ignore") for file in files if file.suffix in (".json", ".jinja"))
    if dated or model.renderer not in ("auto", "template"):
        parts.append(datetime.date.today().isoformat())
    return digest_of_parts(*parts)


@functools.cache  # finding a library's metadata looks through the whole import path, 30 ms
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def digest_of_parts(*parts: str | bytes) -> str:
    """Digest of several texts, as 32 hexadecimal digits. Their borders count: `("ab", "c")` is not `("a", "bc")`."""
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


def digest_of_files(files: Iterable[Path]) -> str:
    """Digest of the names and contents of files, in their order. A file that does not exist counts as such."""
    digest = blake2b(digest_size=16)
    for file in files:
        digest.update(file.name.encode("utf-8", "surrogateescape") + b"\0")
        try:
            with file.open("rb") as stream:
                while piece := stream.read(1 << 20):
                    digest.update(b"%d:" % len(piece))
                    digest.update(piece)
        except (FileNotFoundError, IsADirectoryError):
            digest.update(b"absent")
        digest.update(b"\0")
    return digest.hexdigest()
