"""An ended branch -> whether it is what the chat template writes, compared in a process of its own.

    guard = BranchGuard(template, spec.model, base)
    # None: each branch is what the template writes
    finding = await guard.check(conversation, written.trajectory, branches)

It trusts nothing that made the tape: not the proofs of bridges, not quoting, not earlier renderings. The messages that
the model was shown before a branch's last reply are rendered by Jinja as they are, and compared as text with the
decoded ids up to that reply (guard_child.py). White space inside of what was sampled may differ, because it stays as it
was sampled; nothing else may. What was not sampled is encoded again and must give the same ids. Sampled ids are not
canonical, so they are not encoded.

This process only hands over what is stored of the episode. A child that dies, hangs or fails is replaced, and what it
had is asked again, one episode at a time. An episode that has no answer after `TRIES` was not checked: its finding is
the reason.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import structlog
from pydantic_core import to_json

from engine.clocks import after_rounds
from engine.processes.worker import Worker, WorkerError
from engine.tokens.jinja_template import JinjaTemplate
from engine.tokens.plain_tokenizer import PlainTokenizer

if TYPE_CHECKING:
    from engine.schemas.model import ModelSpec
    from engine.tokens.conversation import Conversation
    from engine.tokens.template import ChatTemplate

log = structlog.get_logger(__name__)

TRIES = 3
"""How often an episode is asked before it counts as unanswered: with others first, then alone."""
SECONDS = 60.0
"""Time for an answer, and one more second for each `TOKENS_A_SECOND`, which are far fewer than are compared in it."""
TOKENS_A_SECOND = 10_000
MOST_TOKENS = 1 << 20
"""Tokens that are asked about at once, unless one episode has more."""
_files: dict[tuple[int, bytes], IO[bytes]] = {}
"""Tokenizers, by process (a fork has its own) and content. The files have no name, so that a process that is killed
leaves none behind."""
COMPARE = "engine.tokens.bridge.guard_child:compare"


class BranchDifference(msgspec.Struct, frozen=True):
    """A place where a branch is not what the template writes."""

    branch: int
    token: int
    """Its index in the branch."""
    id: int
    turns: int
    """How many replies the branch has."""
    message: str
    spelled: bool
    """It is because text that only spells a special token was hidden from the template."""


BranchFinding = BranchDifference | str
"""A difference, or why there is no answer for an episode: it was not checked."""


class BranchGuard:
    """Checks the episodes of one chat format.

    Args:
        template: The chat template.
        model: The spec's `model`, from which it was loaded.
        base: The folder that relative paths in `model` are under.
    """

    def __init__(self, template: ChatTemplate, model: ModelSpec, base: Path) -> None:
        self._template = template
        self._model = model
        self._base = base

    async def check(
        self, conversation: Conversation, trajectory: str, branches: Sequence[tuple[str, bytes]]
    ) -> BranchFinding | None:
        """Compare the branches of an ended episode with what the template writes; None where each is that.

        Args:
            conversation: The episode's conversation.
            trajectory: Its trajectory as it is stored: JSON with `messages`.
            branches: The spans and the ids of each branch, as they are stored.
        """
        job = _Job(self._told, conversation, trajectory, branches)
        job.answer = asyncio.get_running_loop().create_future()
        global _current
        if _current is None or _current.process != os.getpid():  # after a fork, another one
            _current = _Asking()
        _current.put(job)
        return await job.answer

    @cached_property
    def _told(self) -> bytes:
        """What the child needs of the chat format, as JSON."""
        template = self._template
        facts: dict[str, Any] = {
            "tool_role": template.tool_role,
            "alternates": template.alternates,
            "skips_system": template.skips_system,
            "allow_special": template.allow_special,
            "marker": None if template.vision is None else template.vision.marker_id,
        }
        backend = getattr(template.fast.full, "backend_tokenizer", None)
        plain = isinstance(template.fast.full, PlainTokenizer)
        if isinstance(template, JinjaTemplate) and backend is not None and (plain or sys.platform == "linux"):
            facts |= template.source.facts
            file = Path(template.fast.full.name_or_path, "tokenizer.json").absolute() if plain else _saved(backend)
            facts["tokenizer"] = str(file)
        else:
            facts |= {"model": self._model.model_dump(mode="json", by_alias=True), "base": str(self._base.absolute())}
        facts["key"] = blake2b(to_json(facts), digest_size=16).hexdigest()
        return to_json(facts)


class _Job:
    """One episode that waits for its answer."""

    __slots__ = ("_branches", "_conversation", "_trajectory", "answer", "tokens", "told", "tries")

    answer: asyncio.Future[BranchFinding | None]
    """Of the loop that waits."""

    def __init__(
        self, told: bytes, conversation: Conversation, trajectory: str, branches: Sequence[tuple[str, bytes]]
    ) -> None:
        self.told = told
        self._trajectory = trajectory
        self._branches = branches
        self._conversation = conversation
        self.tokens = sum([len(ids) for _, ids in branches]) // 4
        self.tries = 0

    def line(self) -> bytes:
        """What the child gets of it: the episode; for each branch its spans and ids; and for each the thread before its
        last reply, replies as they were written, tools, tokens that another branch sampled, and the time.

        A thread is how many of the episode's first messages it has or, where it has others, numbers of these and
        messages.
        """
        threads = []
        for number, asked in sorted(self._conversation.asked.items()):
            thread, count = asked.thread, asked.length - 1
            shown: Any = count
            if thread.numbers is not None:
                pairs = zip(thread.messages[:count], thread.numbers, strict=False)
                shown = [message if place is None else place for message, place in pairs]
            verbatim = {place: view for place, view in thread.verbatim.items() if place < count}
            inherited = self._conversation.tapes[number].inherited
            threads.append((shown, verbatim, asked.tools, inherited, asked.made))
        branches = msgspec.json.encode(self._branches)  # ids in base64
        parts = [b'{"episode":', self._trajectory.encode(), b',"branches":', branches, b',"shown":']
        return b"".join([*parts, to_json(threads, inf_nan_mode="constants"), b"}"])


class _Asking:
    """A thread that asks the child, which all guards of this process share. Both start with the first episode."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._fresh: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
        """Of each loop: what is gathered."""
        self._jobs: queue.SimpleQueue[list[_Job]] = queue.SimpleQueue()
        self._waiting: deque[_Job] = deque()
        self.child: Worker | None = None
        threading.Thread(target=self._serve, name="guard", daemon=True).start()
        atexit.register(self._end)

    def put(self, job: _Job) -> None:
        """Ask about an episode, together with those that end in the same few rounds of its loop."""
        loop = job.answer.get_loop()
        if loop not in self._fresh:
            self._fresh[loop] = []
            after_rounds(loop, partial(self._submit, loop))
        self._fresh[loop].append(job)

    def _submit(self, loop: asyncio.AbstractEventLoop) -> None:
        self._jobs.put(self._fresh.pop(loop))

    def _serve(self) -> None:
        while True:
            jobs = self._next()
            try:
                if jobs:
                    self._answer(jobs)
            except Exception as error:  # noqa: BLE001 - nobody may wait for ever
                _tell([(job, f"{type(error).__name__}: {error}") for job in jobs])

    def _next(self) -> list[_Job]:
        """All that waits, of one chat format."""
        if not self._waiting:
            self._waiting += self._jobs.get()
        with suppress(queue.Empty):
            while True:
                self._waiting += self._jobs.get_nowait()
        jobs: list[_Job] = []
        tokens, chat_format = 0, self._waiting[0].told
        while self._waiting and tokens < MOST_TOKENS and self._waiting[0].told == chat_format:
            job = self._waiting.popleft()
            tokens += job.tokens
            if not job.answer.cancelled():
                jobs.append(job)
        return jobs

    def _answer(self, jobs: Sequence[_Job]) -> None:
        try:
            answers = self._ask(jobs)
        except WorkerError as error:
            answers = [{"error": str(error)}] * len(jobs)
        again: list[_Job] = []
        findings: list[tuple[_Job, BranchFinding | None]] = []
        for job, answer in zip(jobs, answers, strict=True):
            job.tries += 1
            if "error" not in answer:
                findings.append((job, BranchDifference(**answer) if answer else None))
            elif job.tries < TRIES:
                again.append(job)
            else:
                findings.append((job, f"{answer['error']} ({TRIES} times)"))
        _tell(findings)
        for job in again:
            self._answer([job])

    def _ask(self, jobs: Sequence[_Job]) -> list[dict[str, Any]]:
        seconds = SECONDS + sum(job.tokens for job in jobs) / TOKENS_A_SECOND
        try:
            lines = b",".join([job.line() for job in jobs])
        except Exception as error:
            raise WorkerError(f"{type(error).__name__}: {error}") from error
        try:
            self.child = self.child or Worker(COMPARE)
            answers: list[dict[str, Any]] = self.child.ask(
                b'{"form":%b,"episodes":[%b]}' % (jobs[0].told, lines), seconds=seconds
            )
        except WorkerError as error:
            if self.child is None or self.child.ended:
                self.child = None
                log.warning(
                    "the process that checks ended episodes is started again", reason=str(error), episodes=len(jobs)
                )
            raise
        return answers

    def _end(self) -> None:
        if self.child is not None:
            self.child.end()


def _tell(findings: Iterable[tuple[_Job, BranchFinding | None]]) -> None:
    """Answer jobs, those of one event loop at once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Job, BranchFinding | None]]] = {}
    for job, finding in findings:
        by_loop.setdefault(job.answer.get_loop(), []).append((job, finding))
    for loop, of_loop in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: nobody waits there
            loop.call_soon_threadsafe(_resolve, of_loop)


def _resolve(findings: Iterable[tuple[_Job, BranchFinding | None]]) -> None:
    for job, finding in findings:
        if not job.answer.done():  # nobody waits any more, or it was answered
            job.answer.set_result(finding)


_current: _Asking | None = None
"""The thread of this process."""


def _saved(backend: Any) -> str:
    """A file with a tokenizer of `tokenizers`: one for each content, so that the child reads it once however many runs
    there are."""
    text = backend.to_str().encode()
    process = os.getpid()
    key = process, blake2b(text, digest_size=16).digest()
    if key not in _files:
        file = tempfile.TemporaryFile()  # noqa: SIM115  (the child reads it as long as this process runs)
        file.write(text)
        file.flush()
        _files.setdefault(key, file)
    return f"/proc/{process}/fd/{_files[key].fileno()}"
