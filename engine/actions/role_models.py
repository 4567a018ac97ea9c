"""Model-played users and judges: models other than the policy that reply in an episode.

A role's model is reached through the same `Backend` protocol as the policy, with its own chat format. Where it has the
policy's weights and declares no backend, its requests go to the policy's backend; roles with the same weights and the same
backend share one.

Invariant: no reply of a role's model is written to the tape. Its reasoning goes no further than this file, its tokens are
counted and dropped, and whatever goes wrong with it is blamed on the part that it plays, never on the policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from engine.actions.role_weights import frozen_refusal, role_weights, shares_policy
from engine.backends.registry import open_backend
from engine.errors import ContextOverflow, EngineError, TrainError, WorldError
from engine.schemas.backend import LocalBackendSpec
from engine.schemas.episode import EpisodeSpec
from engine.schemas.generation import GenerateRequest
from engine.schemas.message import Message
from engine.schemas.role import RoleSpec
from engine.spec.load import LoadedSpec
from engine.tokens.loading import load_format

if TYPE_CHECKING:
    from engine.backends.base import Backend
    from engine.backends.http.outage import Outage
    from engine.schemas.trajectory import Blame
    from engine.spec.diagnostic import DataPath
    from engine.tokens.format import ChatFormat
    from engine.tokens.views import IntendedTokens


RoleBackends = Literal["any", "scripted", "none"]
"""Backends that may serve roles: any one; scripted ones, of the role's own; or none, as in a replay."""

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class RoleReply:
    """One reply of a role's model."""

    text: str
    """Without reasoning and without surrounding blanks."""
    tokens: int
    """How many were sampled, the reasoning's too; 0 where the backend answers in text alone."""
    cut: bool
    """It ran out of tokens."""


@dataclass(slots=True)
class RoleBackend:
    """A backend that serves the models of roles."""

    backend: Backend
    slots: asyncio.Semaphore
    """One for each generation that may be in flight."""
    borrowed: bool
    """It is the policy's: opened and closed by whoever runs the policy."""


class RoleModel:
    """The model that plays one role. Shared by all episodes.

    Args:
        name: Of the part, such as `user` or `judge`: names its requests in a backend that it shares.
        spec: Model, sampling and limits.
        format: Its own chat format.
        served: The backend that serves it.
        blame: Who is to blame where it fails; also the beginning of every kind of failure.
        base_model: Its requests are for the base model, also while the policy is an adapter in the backend.
    """

    def __init__(
        self,
        name: str,
        spec: RoleSpec,
        format: ChatFormat,
        served: RoleBackend,
        blame: Blame,
        *,
        base_model: bool = False,
    ) -> None:
        self.name = name
        self._base_model = base_model
        self._spec = spec
        self._format = format
        self._served = served
        self._blame: Blame = blame
        self._stop = sorted({*format.stop_token_ids, *spec.sampling.stop_token_ids})
        self._kind = _kind(blame)

    def request_episode(self, episode_id: str) -> str:
        """The episode's id in the role's requests: a different one than the policy's, where they share a backend."""
        return f"{self.name}@{episode_id}" if self._served.borrowed else episode_id

    async def say(
        self,
        messages: Sequence[Message],
        *,
        episode_id: str,
        turn: int,
        seed: int,
        intended: Sequence[IntendedTokens] = (),
    ) -> RoleReply:
        """One reply. It holds a slot of its backend while it is asked for, and the deadline begins with the slot.

        Args:
            messages: The whole prompt.
            episode_id: The episode's own id.
            turn: Which of the part's answers this is, from 0.
            seed: For sampling.
            intended: For each of the first messages, where special tokens are intended as tokens; see `MessageViews.of`.

        Raises:
            WorldError: no reply, blamed on the part; kind `<part>_<what the backend says>`.
        """
        try:
            request = self._request(messages, episode_id, turn, seed, intended)
            async with self._served.slots, self._timeout():
                generation = await self._served.backend.generate(request)
            if generation.finish.type == "abort":
                raise self._fault("its backend gave the reply up", "aborted")
            if generation.text is not None:
                parsed = self._format.replies.parse_text(generation.text, turn=turn)
            else:
                parsed = self._format.replies.parse(generation.output_ids, before=request.input_ids, turn=turn)
        except TimeoutError:
            raise self._fault(f"no answer within {self._spec.seconds:g} s; set its `timeout`", "timeout") from None
        except WorldError:
            raise
        except EngineError as error:
            if error.stops_run:
                raise
            raise self._fault(str(error), error.kind) from error
        tokens = len(generation.output_ids)
        return RoleReply(spoken(parsed.content), tokens, cut=generation.finish.type == "length")

    def _request(
        self,
        messages: Sequence[Message],
        episode_id: str,
        turn: int,
        seed: int,
        intended: Sequence[IntendedTokens],
    ) -> GenerateRequest:
        prompt = self._format.render(messages, intended=dict(enumerate(intended)))
        sends_messages = self._served.backend.declared.takes_messages
        own = self.request_episode(episode_id)
        return GenerateRequest(
            episode_id=own,
            turn=turn,
            input_ids=np.asarray(prompt, np.int32),
            sampling=self._spec.sampling,
            max_new_tokens=self._room(prompt),
            stop_token_ids=self._stop,
            seed=seed,
            adapter=None if self._served.borrowed or self._spec.backend is None else self._spec.backend.adapter_name,
            base_model=self._base_model,
            messages=list(messages) if sends_messages else None,
        )

    def _timeout(self) -> AbstractAsyncContextManager[Any]:
        """The deadline of one answer. Time in which its servers cannot be reached does not count."""
        outage = self._served.backend.outage
        return asyncio.timeout(self._spec.seconds) if outage is None else outage.clocks.timeout(self._spec.seconds)

    def _room(self, prompt: Sequence[int] | np.ndarray) -> int:
        contexts = [self._format.context, self._served.backend.context]
        context = min((value for value in contexts if value), default=None)
        room = self._spec.turn_tokens if context is None else min(self._spec.turn_tokens, context - len(prompt))
        if room < 1:
            raise ContextOverflow(f"its prompt has {len(prompt)} tokens; the model attends to {context}")
        return room

    def _fault(self, words: str, kind: str) -> WorldError:
        part = "the user's model" if self._blame == "user" else f"the model of `{self.name}`"
        return WorldError(f"{part}: {words}", blame=self._blame, kind=f"{self._kind}_{kind}")

    def release(self, episode_id: str) -> None:
        """The episode is over: what the backend keeps for this part of it may go."""
        self._served.backend.release(self.request_episode(episode_id))


def _kind(blame: Blame) -> str:
    """How the kinds of a part's failures begin."""
    return "user" if blame == "user" else "judge"


def spoken(text: str) -> str:
    """A reply without the reasoning in it, whether or not its template knows of reasoning; blanks around it are cut off."""
    said = text.rpartition(_THINK_CLOSE)[2]
    return said.partition(_THINK_OPEN)[0].strip()


class RoleModels:
    """The models of all roles of a spec, by the path where each is declared. `start` loads formats and opens backends.

    Args:
        loaded: The spec.
        format: The policy's chat format.
        backend: The policy's backend, started by its owner.
        slots: The policy's generation slots.
        allowed: Which backends may serve roles.
        training: The weights of the policy change while episodes run.
    """

    def __init__(
        self,
        loaded: LoadedSpec,
        format: ChatFormat,
        backend: Backend,
        slots: asyncio.Semaphore,
        *,
        allowed: RoleBackends = "any",
        training: bool = False,
    ) -> None:
        self._loaded = loaded
        self._training = training
        self._format = format
        self._policy = RoleBackend(backend, slots, borrowed=True)
        self._allowed = allowed
        self._backends: dict[str, RoleBackend] = {}
        self._models: dict[DataPath, RoleModel] = {}
        self._declared = roles_of(loaded.spec)

    async def start(self) -> None:
        """Load the formats and start the backends; what was started is closed again where one fails.

        Raises:
            EngineError: a model cannot be had, or a backend cannot serve it.
            TrainError: kind `train_setup`: a role with `weights: frozen` would have the weights that are trained.
        """
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            for path, (name, part, blame) in self._declared.items():
                weights = role_weights(self._loaded.spec, part) if self._training else "apart"
                copied = weights == "copy"
                borrows = shares_policy(self._loaded.spec, part) and not copied
                scripted = not borrows and section_of(self._loaded, path).spec.backend.scripted
                if self._allowed == "none" or (self._allowed == "scripted" and not scripted):
                    continue
                if weights == "impossible":
                    raise TrainError("; ".join(frozen_refusal(name, self._loaded.spec)), kind="train_setup")
                form = self._format if part.model is None else load_format(part.model, self._loaded.base)
                served = self._policy if borrows else await self._open(path, form, copied=copied)
                self._models[path] = RoleModel(name, part, form, served, blame, base_model=weights == "base")
            undo.pop_all()

    async def _open(self, path: DataPath, form: ChatFormat, *, copied: bool) -> RoleBackend:
        """A backend for a part: one that was opened for the same weights, or another."""
        section = section_of(self._loaded, path)
        if copied:  # the policy's settings, and the weights of `model.path`
            section = replace(section, spec=section.spec.model_copy(update={"backend": self._loaded.spec.backend}))
        key = section.spec.model_dump_json(include={"model": {"path", "revision"}, "backend": True})
        if section.spec.backend.scripted:
            key += str(path)  # each role has its own script
        if key not in self._backends:
            backend = open_backend(section, form)
            served = RoleBackend(backend, asyncio.Semaphore(self._loaded.spec.rollout.concurrency), borrowed=False)
            self._backends[key] = served  # before it starts, so that it is closed where that fails
            await backend.start()
        return self._backends[key]

    def model(self, *path: str) -> RoleModel:
        """Who plays the part declared at `path`.

        Raises:
            WorldError: no model does: `start` was not called, or its backend may not be opened.
        """
        try:
            return self._models[path]
        except KeyError:
            name, _, blame = self._declared[path]
            raise WorldError(
                f"no model plays `{name}` here: write down its answers, or give it a scripted backend",
                blame=blame,
                kind=f"{_kind(blame)}_not_played",
            ) from None

    def release(self, episode_id: str) -> None:
        """An episode is over."""
        for model in self._models.values():
            model.release(episode_id)

    async def close(self) -> None:
        """Close the backends that were opened here; the policy's stays."""
        backends, self._backends, self._models = list(self._backends.values()), {}, {}
        for served in backends:
            await served.backend.close()

    @property
    def outages(self) -> list[Outage]:
        """Those of the backends that were opened here."""
        return [served.backend.outage for served in self._backends.values() if served.backend.outage is not None]

    def stats(self) -> dict[str, Any]:
        """Counts of each backend that was opened here, by the kind of the first part that speaks through it."""
        return {
            f"{index}:{served.backend.declared.kind_name()}": served.backend.stats()
            for index, served in enumerate(self._backends.values())
        }


def roles_of(spec: EpisodeSpec) -> dict[DataPath, tuple[str, RoleSpec, Blame]]:
    """Every part that a model plays: where it is declared -> (its name, its spec, who is to blame for it)."""
    found: dict[DataPath, tuple[str, RoleSpec, Blame]] = {}
    for name, user in spec.users_by_name.items():
        if user.model_played:
            path = ("users", name) if name else ("user",)
            found[path] = (f"user:{name}" if name else "user", user, "user")
    scorer = spec.rewards.scorer
    if scorer is not None and scorer.model_played:
        found["rewards", "scorer"] = (scorer.name, scorer, "environment")
    return found


def section_of(loaded: LoadedSpec, path: DataPath) -> LoadedSpec:
    """A spec as the part at `path` sees it: its model, backend and sampling stand where the policy's stood."""
    part = roles_of(loaded.spec)[path][1]
    spec = loaded.spec.model_copy(
        update={
            "model": part.model or loaded.spec.model,
            "backend": part.backend or LocalBackendSpec(),
            "sampling": part.sampling,
        }
    )
    origins, keys = (
        {
            **{place: origin for place, origin in places.items() if place[:1] not in (("backend",), ("model",))},
            **{place[len(path) :]: origin for place, origin in places.items() if place[: len(path)] == path != place},
        }
        for places in (loaded.origins, loaded.key_origins)
    )
    return replace(loaded, spec=spec, origins=origins, key_origins=keys)
