"""Groups of episodes for trainers in other processes: `engine serve SPEC`. docs/rows.md has the interface.

Invariants:
- A request is known by its id. Repeated, it gets the same groups: finished episodes come from the store, the others
  continue from their journals.
- A group begins only while fewer than `ahead` groups of its request run or wait to be read: a slow reader stops the
  sampling.
- A request whose reader has gone, or that is cancelled, holds no slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from engine.errors import BackendError, EngineError, StoreError, TrainError, first_of
from engine.plugins.serve.group_runs import GroupRuns, ReadyGroup, overridden
from engine.plugins.serve.http import JsonService, RouteAnswer, RouteCall, ServiceError, Stream
from engine.plugins.serve.request_log import RequestLog, TakenRequest
from engine.plugins.serve.wire import ARROW, ArrowWriter, JsonWriter, WireWriter
from engine.schemas.sections import written
from engine.schemas.train import TrainSpec
from engine.storable import words_of
from engine.validate import check_spec
from engine.validate.check import TrainerError, trainer_of

if TYPE_CHECKING:
    from engine.backends.backend import Backend
    from engine.runner.groups import GroupRunner
    from engine.runner.processes import EpisodeRunner
    from engine.schemas.environment import Task
    from engine.spec.load import LoadedSpec
    from engine.store.reader import RunReader
    from engine.store.store import RunStore
    from engine.tokens.template import ChatTemplate

MAX_GROUPS = 10_000
"""Maximum number of groups of one request."""
RETRY_SECONDS = 2


@dataclass(slots=True)
class _Open:
    """A request that is being answered."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    why: dict[str, Any] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, **why: Any) -> None:
        self.why = self.why or why
        self.stop.set()


def refuse_unserved(loaded: LoadedSpec, trainer: str | None = None) -> None:
    """Refuse what a service of groups cannot do for a spec, and what a trainer cannot carry.

    Raises:
        TrainError: kind `serve_setup`; the message names all of them.
        TrainerError: there is no such trainer.
    """
    train, credit = loaded.spec.train or TrainSpec(), loaded.spec.rewards.credit
    problems = {
        f"`rewards.credit: {credit.method}` needs a critic's values, which only the trainer has": credit.needs_values,
        "`train.kl.in: reward` needs the log-probs of a reference model; use `in: loss`, or subtract the penalty in "
        "the trainer": train.kl.in_reward,
        "`train.advantage_norm: batch` needs the whole batch; set it to `none`, and whiten in "
        "the trainer": train.advantage_norm == "batch",
        "`train.dynamic_sampling` replaces groups; remove it (each group says whether it has a "
        "signal)": "dynamic_sampling" in train.model_fields_set and train.dynamic_sampling,
        "`train.difficulty` chooses tasks over steps; remove it": "difficulty" in written(loaded.spec),
        "`train.asynchrony.oversample` cancels slow groups; set it to 1": train.asynchrony.oversample > 1.0,
    }
    found = [text for text, refused in problems.items() if refused]
    if trainer is not None:
        unmet = trainer_of(trainer).findings(loaded)
        found += [f"{each.message}; {each.fix}" for each in unmet if each.severity == "error"]
    if found:
        raise TrainError(f"{loaded.path}: " + "\n".join(found), kind="serve_setup")


class GroupService:
    """Answers requests for groups. Call `start` before requests come, and `close`.

    Args:
        loaded: The spec.
        tasks: Its tasks.
        format: The chat format.
        backend: The started backend.
        store: The run's store.
        runner: Runs episodes with the spec's own sampling; the caller is inside its `serving`.
        token: The bearer token.
        halt: Called with an error that stops the service.
        max_requests: Maximum number of requests that are answered at the same time.
        ahead: Maximum number of groups of a request that run or wait to be read. Default: as many as the live episodes
            make.
        reader: Reads the run's episodes, where its drivers have stores of their own. Default: `store`.

    Raises:
        TrainError: the spec asks for what a service cannot do.
        StoreError: the log of requests cannot be read.
    """

    def __init__(
        self,
        loaded: LoadedSpec,
        tasks: Sequence[Task],
        format: ChatTemplate,
        backend: Backend,
        store: RunStore,
        runner: EpisodeRunner,
        token: str,
        halt: Callable[[BaseException], None],
        *,
        max_requests: int = 8,
        ahead: int | None = None,
        reader: RunReader | None = None,
    ) -> None:
        refuse_unserved(loaded)
        self._loaded, self._tasks, self._backend, self._halt = loaded, tasks, backend, halt
        self._samples = loaded.spec.rollout.samples_per_task
        self._max_requests, self._ahead = max_requests, ahead
        self._log = RequestLog(store.folder)
        self._runs = GroupRuns(loaded, tasks, format, backend, store, runner, self._log, reader or store)
        self._open: dict[str, _Open] = {}
        self._sent = 0
        self._closing = False
        self.service = JsonService(token, self._health)
        self.service.add("POST", "/groups", self._post)
        self.service.add("GET", "/weights", self._weights)
        self.service.add("POST", "/weights", self._set_weights)
        self.service.add("POST", "/cancel", self._cancel)

    @property
    def busy(self) -> bool:
        """Whether an episode runs."""
        return self._runs.running() > 0

    async def close(self) -> None:
        """Answer no more requests. Running groups stop at the end of their journals, and each open stream ends with an
        error."""
        self._closing = True
        opened = list(self._open.values())
        for each in opened:
            each.end(stopped=True)
        if opened:
            await asyncio.wait([asyncio.ensure_future(each.done.wait()) for each in opened], timeout=5.0)
        await self._runs.close()

    # --- routes -------------------------------------------------------------------------------------------

    def _health(self) -> Mapping[str, Any]:
        return {
            "version": self._log.version,
            "requests": len(self._open),
            "max_requests": self._max_requests,
            "episodes": self._runs.running(),
            "capacity": self._runs.capacity,
            "finished": len(self._runs.finished),
            "groups_sent": self._sent,
        }

    async def _weights(self, call: RouteCall) -> RouteAnswer:
        return RouteAnswer({"version": self._log.version, "max_staleness": self._runs.max_staleness})

    async def _set_weights(self, call: RouteCall) -> RouteAnswer:
        """The trainer tells that the servers have weights of `version` from now on."""
        call.only("version")
        version = _whole(call.value, "version", 0, None)
        declared = self._backend.declared
        if version and not (declared.scripted or (declared.weights_in_servers and declared.reports_versions)):
            raise ServiceError(
                409,
                f"`version` {version}: the {declared.kind_name()} backend has no weights that a trainer elsewhere can "
                "change, or does not report "
                "the version of a token; use `backend: {kind: sglang}`",
                "no_versions",
            )
        if version < self._log.version:
            raise ServiceError(409, f"`version` {version} is older than {self._log.version}", "old_version")
        if version > self._log.version:
            self._write(lambda: self._log.tell(version))
            self._runs.cancel_stale()
        return await self._weights(call)

    async def _cancel(self, call: RouteCall) -> RouteAnswer:
        call.only("id")
        name = _name(call.value)
        if name not in self._log.requests:
            raise ServiceError(404, f"`id`: there is no request {name!r}", "no_request")
        if name not in self._log.cancelled:
            self._write(lambda: self._log.cancel(name))
        if (opened := self._open.get(name)) is not None:
            opened.end(cancelled=True)
            await opened.done.wait()
        return RouteAnswer({"id": name, "cancelled": True})

    async def _post(self, call: RouteCall) -> Stream:
        """Run groups, and send each when it is finished."""
        call.only("id", "tasks", "count", "samples", "version", "sampling", "trainer", "skip")
        if self._closing:
            raise ServiceError(503, "the service is ending", "closing", retry_after=RETRY_SECONDS)
        value = call.value
        name = _name(value)
        self._check_trainer(value.get("trainer"))
        skip = value.get("skip", [])
        if not isinstance(skip, list) or not all(type(each) is int and each >= 0 for each in skip):
            raise ServiceError(400, "`skip` is a list of numbers of groups, from 0", "bad_skip")
        if name in self._log.cancelled:
            raise ServiceError(410, f"`id`: the request {name!r} was cancelled; use another id", "cancelled")
        if (before := self._open.get(name)) is not None:  # its reader has lost the connection
            before.end(replaced=True)
            await before.done.wait()
        if len(self._open) >= self._max_requests:
            message = (
                f"{self._max_requests} requests are being answered, as many as there are places for (--max-requests)"
            )
            raise ServiceError(429, message, "at_capacity", retry_after=RETRY_SECONDS)
        asked = {key: value[key] for key in ("tasks", "count", "samples", "sampling") if value.get(key) is not None}
        opened = self._open[name] = _Open()
        try:
            request = self._log.requests.get(name)
            if request is None:
                sampling = await self._sampling(value.get("sampling"))
                request = self._taken(name, asked, value, sampling)
            elif request.asked != asked:
                raise ServiceError(409, f"`id`: {name!r} asked for {dict(request.asked)} before", "other_request")
            groups = await self._runs.runner_of(request)
        except BaseException:
            self._forget(name, opened)
            raise
        writer: WireWriter = ArrowWriter() if ARROW in call.accept else JsonWriter()
        return Stream(writer.content_type, self._answer(request, groups, opened, frozenset(skip), writer))

    def _forget(self, name: str, opened: _Open) -> None:
        if self._open.get(name) is opened:
            del self._open[name]
        opened.done.set()

    def _check_trainer(self, trainer: Any) -> None:
        if trainer is None:
            return
        try:
            if not isinstance(trainer, str):
                raise ServiceError(400, "`trainer` is a trainer's name", "bad_trainer")
            refuse_unserved(self._loaded, trainer)
        except TrainerError as error:
            raise ServiceError(400, f"`trainer`: {error}", "bad_trainer") from None
        except TrainError as error:
            raise ServiceError(409, f"`trainer`: {error}", "not_carried") from None

    def _taken(
        self, name: str, asked: Mapping[str, Any], value: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> TakenRequest:
        """Take a new request, durably."""
        version = value.get("version")
        if version is not None and _whole(value, "version", 0, None) != self._log.version:
            message = f"`version` is {version}, and the newest that POST /weights told is {self._log.version}"
            raise ServiceError(409, message, "old_version" if version < self._log.version else "unknown_version")
        samples = self._samples if value.get("samples") is None else _whole(value, "samples", 1, 4096)
        wanted = value.get("tasks", "next")
        following = 0
        if wanted == "next":
            if not self._tasks:
                raise ServiceError(409, "the spec has no tasks", "no_tasks")
            following = 1 if value.get("count") is None else _whole(value, "count", 1, MAX_GROUPS)
            first = self._log.following
            names = [self._tasks[place % len(self._tasks)].id for place in range(first, first + following)]
        else:
            if not isinstance(wanted, list) or not wanted or len(wanted) > MAX_GROUPS:
                raise ServiceError(400, f"`tasks` is `next`, or a list of 1 to {MAX_GROUPS} ids of tasks", "bad_tasks")
            if value.get("count") is not None:
                raise ServiceError(400, '`count` is for `tasks: "next"`; leave it out', "bad_count")
            for place, each in enumerate(wanted):
                if not isinstance(each, str) or each not in self._runs.places:
                    raise ServiceError(404, f"`tasks[{place}]`: there is no task {str(each)[:200]!r}", "no_task")
            names = wanted
        uses: dict[str, int] = {}
        tasks = []
        for each in names:
            use = uses.get(each, self._log.uses.get(each, 0))
            uses[each] = use + 1
            tasks.append((each, use))
        request = TakenRequest(name, asked, tuple(tasks), samples, sampling)
        self._write(lambda: self._log.add(request, following))
        return request

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except StoreError as error:
            raise ServiceError(507, str(error), "not_stored", retry_after=RETRY_SECONDS) from None

    async def _sampling(self, given: Any) -> dict[str, Any]:
        """A request's sampling overrides, each of which has an effect on this backend."""
        if given is None:
            return {}
        if not isinstance(given, dict):
            raise ServiceError(400, "`sampling` is an object with keys of the spec's `sampling`", "bad_sampling")
        try:
            changed = overridden(self._loaded, given)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(["sampling", *map(str, first["loc"])])
            raise ServiceError(400, f"`{where}`: {first['msg']}", "bad_sampling") from None
        if not self._runs.has_runner(given):
            if found := await asyncio.to_thread(self._new_errors, changed):
                raise ServiceError(400, "`sampling`: " + "; ".join(found), "bad_sampling")
            try:
                await self._backend.check_sampling(changed.spec.sampling)
            except BackendError as error:
                status, wait = (503, RETRY_SECONDS) if error.kind == "unreachable" else (400, None)
                raise ServiceError(status, f"`sampling`: {error}", error.kind, retry_after=wait) from None
        return given

    def _new_errors(self, changed: LoadedSpec) -> list[str]:
        """Errors of a spec with other sampling that the spec does not have."""
        own, found = (
            [each for each in check_spec(spec) if each.severity == "error"] for spec in (self._loaded, changed)
        )
        known = {(each.rule, each.message) for each in own}
        return [f"{each.message}; {each.fix}" for each in found if (each.rule, each.message) not in known]

    # --- groups -------------------------------------------------------------------------------------------

    async def _answer(
        self,
        request: TakenRequest,
        group_runner: GroupRunner,
        opened: _Open,
        skip: frozenset[int],
        writer: WireWriter,
    ) -> AsyncGenerator[bytes, None]:
        """The parts of an answer: each group when it is finished, and the end."""
        numbers = [number for number in range(len(request.tasks)) if number not in skip]
        window = asyncio.Semaphore(self._ahead or max(1, -(-self._runs.capacity // request.samples)))
        ready: asyncio.Queue[ReadyGroup] = asyncio.Queue()

        async def one(number: int) -> None:
            ready.put_nowait(await self._runs.group(request, number, group_runner))

        async def produce() -> None:
            async with asyncio.TaskGroup() as groups:
                for number in numbers:
                    await window.acquire()
                    groups.create_task(one(number))

        producer = asyncio.create_task(produce(), name=f"request {request.id}")
        stopping = asyncio.create_task(opened.stop.wait())
        try:
            sent = 0
            while sent < len(numbers) and not opened.stop.is_set():
                following = asyncio.create_task(ready.get())
                try:
                    waited = (
                        [following, stopping]
                        if producer.done() and not producer.exception()
                        else [following, stopping, producer]
                    )
                    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                    if not following.done() and not stopping.done() and not producer.exception():
                        continue
                    if not following.done() and not ready.empty():  # the producer ended in the same round
                        await following
                    if not following.done():
                        break
                finally:
                    following.cancel()
                group = following.result()
                if self._runs.is_stale(request.id, group.note["number"]):  # since it was finished
                    group = group.left_out("stale")
                yield writer.group(group.rows, group.images, group.note)
                window.release()
                self._sent += 1
                sent += 1
            if producer.done() and not producer.cancelled() and (error := producer.exception()) is not None:
                fault = first_of(error) if isinstance(error, BaseExceptionGroup) else error
                if isinstance(fault, EngineError):
                    self._halt(fault)
                    yield writer.end({"error": {"message": words_of(fault), "code": fault.kind}})
                    return
                raise fault
            yield writer.end({"groups": len(request.tasks), "sent": sent, **opened.why})
        finally:
            producer.cancel()
            stopping.cancel()
            try:
                await asyncio.wait([producer, stopping])
            finally:
                self._forget(request.id, opened)


def _name(value: Mapping[str, Any]) -> str:
    name = value.get("id")
    if not isinstance(name, str) or not 0 < len(name) <= 200:
        raise ServiceError(400, "`id` is the request's name, a text of 1 to 200 characters that you choose", "bad_id")
    return name


def _whole(value: Mapping[str, Any], key: str, least: int, most: int | None) -> int:
    given = value.get(key)
    if type(given) is not int or given < least or (most is not None and given > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ServiceError(400, f"`{key}` is a whole number {span}", f"bad_{key}")
    return given
