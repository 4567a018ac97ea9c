"""Episodes of programs that run elsewhere: they open one, talk to the model, and end it (`engine serve --api`).

Invariants:
- An episode is run by `Runner.episode`, as in `engine run`: same limits, records, rows and store.
- A sample of a task is open at most once, and done at most once.
- An episode that was open when the engine died begins again when it is opened next: its program has lost its endpoint.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from engine.errors import EngineError, SpecCodeError
from engine.plugins.agents.program import ServedProgram, ServedPrograms
from engine.plugins.agents.rewards import PATH as REWARD_PATH
from engine.plugins.agents.rewards import read_end
from engine.plugins.agents.spec import AgentSpec
from engine.plugins.serve.http import JsonService, RouteAnswer, RouteCall, ServiceError
from engine.store.store import episode_id_of

if TYPE_CHECKING:
    from engine.runner.runner import Runner
    from engine.schemas.environment import Task
    from engine.schemas.trajectory import Trajectory
    from engine.store.store import RunStore

RETRY_SECONDS = 5
"""`Retry-After` where every place is taken."""
MOST_ENDED = 10_000
"""Ended episodes whose results are kept for a second request to end them."""


class ServedEpisodes:
    """Opens and ends the episodes of one run. Use it inside `runner.serving()`.

    Args:
        runner: The run; built with `programs`.
        programs: The programs of its episodes.
        tasks: Its tasks.
        store: Its store.
        token: The token with which episodes are opened.
        halt: Called with an error that stops the service.
    """

    def __init__(
        self,
        runner: Runner,
        programs: ServedPrograms,
        tasks: Sequence[Task],
        store: RunStore,
        token: str,
        halt: Callable[[BaseException], None],
    ) -> None:
        self._runner, self._programs, self._tasks, self._halt = runner, programs, tasks, halt
        rollout = runner.spec.rollout
        self._samples = rollout.samples_per_task
        self._reward_names = AgentSpec.or_default(runner.spec).reward_names
        self.capacity = rollout.live_episodes or 2 * rollout.concurrency
        """Maximum number of open episodes."""
        self._done = store.finished()
        self._work: dict[str, asyncio.Task[Trajectory | None]] = {}
        """The episodes that run, also those that are not open yet, by id."""
        self._open: dict[str, ServedProgram] = {}
        """The programs of the open episodes, which know their endpoints, by id."""
        self._ended: dict[str, tuple[str | None, Mapping[str, Any]]] = {}
        """The keys and results of ended episodes, by id."""
        self._places: dict[str, int] | None = None
        """The position of each task by id, once it is needed."""
        self._first = 0
        """Position of the first task that may have a free sample."""
        self._closing = False
        self.service = JsonService(token, self._health)
        self.service.add("POST", "/episodes", self._post)
        self.service.add("POST", "/episodes/{id}/end", self._post_end, self._key)
        self.service.add("DELETE", "/episodes/{id}", self._delete, self._key)

    @property
    def busy(self) -> bool:
        """Whether an episode runs."""
        return bool(self._work)

    @property
    def open_ids(self) -> list[str]:
        """The ids of the open episodes, sorted."""
        return sorted(self._open)

    async def close(self) -> None:
        """Open no more episodes, and stop those that are open at the end of their journals."""
        self._closing = True
        work = list(self._work.values())
        for item in work:
            item.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    # --- routes -------------------------------------------------------------------------------------------

    def _health(self) -> Mapping[str, Any]:
        total = len(self._tasks) * self._samples
        left = total - len(self._done) - len(self._work)
        return {"open": len(self._work), "capacity": self.capacity, "finished": len(self._done), "left": left}

    async def _post(self, call: RouteCall) -> RouteAnswer:
        """Open an episode: of the task `task`, or of the `next` one."""
        call.only("task")
        wanted = call.value.get("task", "next")
        if not isinstance(wanted, str):
            raise ServiceError(400, "`task` is a task's id, or `next`", "bad_task")
        if self._closing:
            raise ServiceError(503, "the service is ending", "closing")
        if len(self._work) >= self.capacity:
            message = f"{len(self._work)} episodes are open, as many as there are places for (rollout.live_episodes)"
            raise ServiceError(429, message, "at_capacity", retry_after=RETRY_SECONDS)
        task, sample = self._next() if wanted == "next" else self._of(wanted)
        episode = episode_id_of(task.id, sample)
        expected = self._programs.expect(episode)
        work = asyncio.create_task(self._run(task, sample), name=f"episode {episode}")
        self._work[episode] = work
        await _first_of(expected, work)
        if expected.done():
            program = expected.result()
            await _first_of(program.endpoint, work)
            if program.endpoint.done() and not work.done():
                self._open[episode] = program
                return RouteAnswer(_shown(episode, program, call.host), 201)
        _, ended = self._ended.get(episode, (None, {}))
        why = ended.get("failure") or {"message": "; ".join(self._runner.faults[-1:]) or "the service is ending"}
        raise ServiceError(500, f"{episode} ended before its program could begin: {why['message']}", "not_opened")

    async def _post_end(self, call: RouteCall) -> RouteAnswer:
        """End an episode, with or without a reward; answered when it is stored."""
        call.only("status", "reward")
        status, reward = call.value.get("status", 0), call.value.get("reward")
        if isinstance(status, bool) or not isinstance(status, int) or not -255 <= status <= 255:
            raise ServiceError(
                400, "`status` is the program's exit status, a whole number; 0: it succeeded", "bad_status"
            )
        written = None if reward is None else json.dumps(reward)
        try:
            if written is not None:
                read_end(written, self._reward_names)
        except SpecCodeError as error:
            raise ServiceError(400, str(error), "bad_reward") from None
        return await self._finish(call, lambda program: program.end(status, written))

    async def _delete(self, call: RouteCall) -> RouteAnswer:
        """Give an episode up: it fails, with blame `environment`."""
        call.only()
        return await self._finish(call, ServedProgram.abandon)

    def _key(self, names: Mapping[str, str]) -> str | None:
        """The key with which an episode may be ended, also once more."""
        program = self._open.get(names["id"])
        return self._ended.get(names["id"], (None, {}))[0] if program is None else program.endpoint.result().key

    async def _finish(self, call: RouteCall, end: Callable[[ServedProgram], None]) -> RouteAnswer:
        episode = call.names["id"]
        program = self._open.get(episode)
        if program is None:
            if episode in self._ended:
                return RouteAnswer(self._ended[episode][1])
            state = "it has ended" if episode in self._done else "open it with POST /episodes"
            raise ServiceError(404, f"{episode!r} is not open; {state}", "not_open")
        end(program)
        await asyncio.wait([self._work[episode]])
        if episode not in self._ended:
            raise ServiceError(
                503, f"{episode} was stopped before its end; it begins again when it is opened", "stopped"
            )
        return RouteAnswer(self._ended[episode][1])

    # --- episodes -----------------------------------------------------------------------------------------

    async def _run(self, task: Task, sample: int) -> Trajectory | None:
        """Run one episode to its end, and note its result."""
        episode = episode_id_of(task.id, sample)
        try:
            trajectory = await self._runner.episode(task, sample)
            if trajectory is not None:
                self._runner.count(trajectory)
                self._done.add(episode)
                program = self._open.get(episode)
                self._ended[episode] = (program.endpoint.result().key if program else None, _result(trajectory))
                if len(self._ended) > MOST_ENDED:
                    del self._ended[next(iter(self._ended))]
            return trajectory
        except EngineError as error:  # it stops the run
            self._halt(error)
            return None
        finally:
            self._open.pop(episode, None)
            self._work.pop(episode, None)

    def _next(self) -> tuple[Task, int]:
        """The first sample that is neither done nor open."""
        for place in range(self._first, len(self._tasks)):
            task = self._tasks[place]
            if (sample := self._free(task)) is not None:
                return task, sample
            if (
                all(episode_id_of(task.id, sample) in self._done for sample in range(self._samples))
                and place == self._first
            ):
                self._first += 1
        raise ServiceError(410, f"every episode is done or open ({len(self._work)} are open)", "no_episodes_left")

    def _of(self, wanted: str) -> tuple[Task, int]:
        """The first such sample of a task."""
        if self._places is None:
            self._places = {task.id: place for place, task in enumerate(self._tasks)}
        if wanted not in self._places:
            raise ServiceError(404, f"there is no task `{wanted[:200]}`", "no_task")
        task = self._tasks[self._places[wanted]]
        sample = self._free(task)
        if sample is None:
            message = f"all {self._samples} episodes of task `{wanted}` are done or open (rollout.samples_per_task)"
            raise ServiceError(410, message, "no_episodes_left")
        return task, sample

    def _free(self, task: Task) -> int | None:
        taken = (episode_id_of(task.id, sample) for sample in range(self._samples))
        return next(
            (at for at, episode in enumerate(taken) if episode not in self._done and episode not in self._work), None
        )


async def _first_of(*waited: asyncio.Future[Any]) -> None:
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)


def _shown(episode: str, program: ServedProgram, host: str) -> Mapping[str, Any]:
    """What a program needs. Its addresses are those by which it reached the service."""
    endpoint = program.endpoint.result()
    address = f"http://{host}" if host else endpoint.address
    return {
        "episode": episode,
        "key": endpoint.key,
        "base_url": f"{address}/v1",
        "reward_url": f"{address}{REWARD_PATH}",
        "model": endpoint.model,
        "url": f"{address}/episodes/{quote(episode, safe='')}",
        "task": program.task,
    }


def _result(trajectory: Trajectory) -> Mapping[str, Any]:
    """The result of an episode, as a program receives it."""
    outcome = trajectory.outcome
    failure = outcome.failure
    return {
        "episode": trajectory.episode_id,
        "event": outcome.event,
        "limit": outcome.limit,
        "reward": outcome.reward,
        "rewards": outcome.rewards,
        "trainable": outcome.trainable,
        "failure": None
        if failure is None
        else {"kind": failure.kind, "blame": failure.blame, "message": failure.message},
        "turns": len(trajectory.turns),
        "rows": len(trajectory.branches),
    }
