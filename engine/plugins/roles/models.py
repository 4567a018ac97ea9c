"""Model-played users and judges: models other than the policy that reply in an episode.

A role's model is reached through the same `Backend` protocol as the policy, with its own chat format. Where it has the
policy's weights and declares no backend, its requests go to the policy's backend; roles with the same weights and the
same backend share one.

Invariant: no reply of a role's model is written to the tape. Its reasoning does not leave this file, its tokens are
counted and dropped, and its errors are blamed on its role, never on the policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.actions.calling.code_call import call_spec_code, on_main_loop
from engine.actions.services import EpisodeService, ServiceInputs
from engine.backends.slots import Slots
from engine.deadline import Deadlines
from engine.episode.episode import derive_seed
from engine.errors import ContextOverflow, EngineError, SpecCodeError, TrainError
from engine.plugins.roles.players import frozen_refusal, role_section, role_weights
from engine.schemas.base import Struct
from engine.schemas.environment import EpisodeView, UserTurn
from engine.schemas.generation import GenerateRequest
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent
from engine.spec.added import PlayedRole, played_roles
from engine.spec.template import fields_of, fill, own_spans

if TYPE_CHECKING:
    from engine.actions.action import EpisodeObjects
    from engine.actions.calling.workers import Workers
    from engine.backends.backend import Backend
    from engine.schemas.environment import Task
    from engine.schemas.role import Mark, UserSpec
    from engine.schemas.trajectory import Blame
    from engine.spec.text.diagnostic import DataPath
    from engine.tokens.template import ChatTemplate
    from engine.tokens.views import IntendedTokens

SILENCE = "(says nothing)"
"""Replaces a reply without text."""
_WHO = {"user": "User", "assistant": "Assistant"}
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


class ModelUser:
    """One episode's user, played by a model.

    Args:
        spec: Its prompt, marks and limits.
        model: Returns the model; called for each answer, so that a replay needs no model.
        grader: A user that decides by rule first; None if the spec has none.
        workers: Run the grader.
    """

    def __init__(self, spec: UserSpec, model: Callable[[], RoleModel], grader: Any, workers: Workers) -> None:
        self._spec = spec
        self._model = model
        self._grader = grader
        self._workers = workers

    @on_main_loop
    async def respond(self, view: EpisodeView) -> UserTurn:
        """Ask the grader, then the model, and read the marks of its reply.

        Raises:
            SpecCodeError: the model or the grader failed; the blame is the user's.
        """
        verdict = await self._verdict(view)
        if verdict.satisfied:
            return verdict
        model = self._model()
        words = verdict.content if isinstance(verdict.content, str) else ""
        fields = self._fields(view, words)
        said = await model.reply(
            self.prompt(view, words),
            intended=[own_spans(item.content, fields) for item in self._spec.prompt],
            episode_id=view.episode_id,
            turn=view.user_turn,
            seed=derive_seed(view.seed, model.name, view.user_turn),
        )
        turn = read_marks(said.text, self._spec.marks)
        return verdict.model_copy(
            update={
                "content": turn.content,
                "satisfied": turn.satisfied,
                "solved": verdict.solved or turn.solved,
                "rewards": [*verdict.rewards, *turn.rewards],
                "facts": {**verdict.facts, **turn.facts},
                "tokens": said.tokens,
                "recover": None,
            }
        )

    async def _verdict(self, view: EpisodeView) -> UserTurn:
        """The grader's turn; an empty turn if there is no grader."""
        if self._grader is None:
            return UserTurn()
        assert self._spec.grader is not None
        what = f"`{self._spec.grader.use}`.respond"
        turn = await call_spec_code(
            self._workers,
            self._grader.respond,
            view,
            seconds=self._spec.seconds,
            blame="user",
            what=what,
            effects=self._spec.effects,
        )
        if not isinstance(turn, UserTurn):
            raise SpecCodeError(
                f"{what} returned {type(turn).__name__}; it must return a UserTurn", blame="user", kind="user_bad_reply"
            )
        return turn

    def prompt(self, view: EpisodeView, verdict: str = "") -> list[Message]:
        """The model's prompt: the spec's prompt and, if that names neither dialogue nor reply, the dialogue with
        swapped roles: the policy has the role `user` and speaks first."""
        fields = self._fields(view, verdict)
        prompt = [Message(role=item.role, content=fill(item.content, fields)) for item in self._spec.prompt]
        named = {name for item in self._spec.prompt for name in fields_of(item.content)}
        if named & {"reply", "dialogue"}:
            return prompt
        turned = [
            Message(role="user" if role == "assistant" else "assistant", content=text)
            for role, text in dialogue_of(view)
        ]
        if turned and turned[0].role == "assistant":
            prompt.append(Message(role="user", content=self._spec.opener))
        return [*prompt, *turned]

    @staticmethod
    def _fields(view: EpisodeView, verdict: str) -> dict[str, Any]:
        return {
            "task": view.task.fields,
            "reply": view.reply or SILENCE,
            "dialogue": "\n\n".join(f"{_WHO[role]}: {text}" for role, text in dialogue_of(view)),
            "verdict": verdict,
            "turn": view.user_turn,
        }


def dialogue_of(view: EpisodeView) -> list[tuple[str, str]]:
    """(role, text) of the visible messages of the episode, from the last message before its first turn.

    Consecutive messages of one role are joined; an empty assistant message gets a placeholder where the user is to
    answer it.
    """
    messages = list(view.messages)
    replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
    first = replies[len(replies) - (view.turn + 1)] if view.turn >= 0 and len(replies) > view.turn else len(messages)
    start = first
    while start > 0 and messages[start - 1].role == "user":
        start -= 1
    said: list[tuple[str, str]] = []
    for message in messages[start:]:
        text = message.text.strip()
        if message.role not in _WHO or not text:
            continue
        if said and said[-1][0] == message.role:
            said[-1] = (message.role, f"{said[-1][1]}\n\n{text}")
        else:
            said.append((message.role, text))
    if view.turn >= 0 and (not said or said[-1][0] != "assistant"):
        said.append(("assistant", SILENCE))
    return said


def read_marks(text: str, marks: Sequence[Mark]) -> UserTurn:
    """Separate the text of a reply, which the policy sees, from its marks, which the engine reads.

    Raises:
        SpecCodeError: the number of a mark is invalid.
    """
    satisfied = solved = False
    rewards: list[RewardEvent] = []
    facts: dict[str, Any] = {}
    for mark in marks:
        pattern = re.compile(mark.pattern if mark.pattern is not None else re.escape(mark.text or ""))
        match = pattern.search(text)
        if match is None:
            continue
        satisfied |= mark.satisfied
        solved |= mark.solved
        rewards += mark.rewards
        facts.update(mark.facts)
        if mark.reward is not None:
            try:
                value = float(match[1] or "")
            except ValueError:
                value = nan
            if not isfinite(value):
                raise SpecCodeError(
                    f"the user's model gave {match[1]!r} in a mark; it must give a number",
                    blame="user",
                    kind="user_bad_reply",
                )
            cause = f"the user's model says {match[0]}"
            rewards.append(RewardEvent(name=mark.reward, value=value, cause=cause))
        text = pattern.sub("", text)
    return UserTurn(content=text.strip(), satisfied=satisfied, solved=solved, rewards=rewards, facts=facts)


class RoleReply(Struct, frozen=True, kw_only=True):
    """One reply of a role's model."""

    text: str
    """The text without reasoning and surrounding whitespace."""
    tokens: int
    """Number of sampled tokens, including reasoning; 0 if the backend answers only in text."""
    cut: bool
    """Whether it reached the token limit."""


@dataclass(slots=True)
class RoleBackend:
    """A backend that serves the models of roles."""

    backend: Backend
    slots: Slots
    """One slot for each generation that may be in flight."""
    borrowed: bool
    """Whether it is the policy's backend, which the policy's owner opens and closes."""


class RoleModel:
    """The model of one role. All episodes share it.

    Args:
        role: Its name, such as `user` or `judge`, which marks its requests in a shared backend; sampling and limits;
            the blame and the kinds of its failures.
        format: Chat format of this model.
        served: The backend that serves it.
        base_model: Requests use the base model, even while the policy is an adapter in the backend.
    """

    def __init__(
        self,
        role: PlayedRole,
        format: ChatTemplate,
        served: RoleBackend,
        *,
        base_model: bool = False,
    ) -> None:
        self.name = role.name
        self._base_model = base_model
        self._spec = spec = role.spec
        self._format = format
        self._served = served
        self._blame: Blame = role.blame
        self._stop = sorted({*format.stop_token_ids, *spec.sampling.stop_token_ids})
        self._kinds = role.kinds

    def request_episode(self, episode_id: str) -> str:
        """The episode's id in the role's requests; it differs from the policy's id if they share a backend."""
        return f"{self.name}@{episode_id}" if self._served.borrowed else episode_id

    async def reply(
        self,
        messages: Sequence[Message],
        *,
        episode_id: str,
        turn: int,
        seed: int,
        intended: Sequence[IntendedTokens] = (),
    ) -> RoleReply:
        """Sample one reply. The request holds a slot of the backend, and its deadline begins with the slot.

        Args:
            messages: The whole prompt.
            episode_id: Id of the episode.
            turn: Index of this answer among the role's answers, from 0.
            seed: Sampling seed.
            intended: For each of the first messages, where special tokens are intended as tokens; see
                `MessageViews.of`.

        Raises:
            SpecCodeError: no reply; the blame is the role's and the kind `<role>_<kind of the backend's error>`.
        """
        backend, spec = self._served.backend, self._spec
        try:
            request = self._request(messages, episode_id, turn, seed, intended)
            async with self._served.slots:
                outage = backend.outage  # time in which no server is reachable does not count
                with Deadlines(spec.seconds).begin() if outage is None else outage.clocks.timeout(spec.seconds):
                    generation = await backend.generate(request)
            if generation.finish.type == "abort":
                raise self._fault("its backend abandoned the reply", "aborted")
            if generation.text is not None:
                parsed = self._format.replies.parse_text(generation.text, turn=turn)
            else:
                parsed = self._format.replies.parse(generation.output_ids, before=request.input_ids, turn=turn)
        except TimeoutError:
            raise self._fault(f"no answer within {spec.seconds:g} s; set its `timeout`", "timeout") from None
        except SpecCodeError:
            raise
        except EngineError as error:
            if error.stops_run:
                raise
            raise self._fault(str(error), error.kind) from error
        tokens = len(generation.output_ids)
        return RoleReply(text=without_reasoning(parsed.content), tokens=tokens, cut=generation.finish.type == "length")

    def _request(
        self,
        messages: Sequence[Message],
        episode_id: str,
        turn: int,
        seed: int,
        intended: Sequence[IntendedTokens],
    ) -> GenerateRequest:
        prompt = self._format.render(messages, intended=dict(enumerate(intended)))
        served, spec = self._served, self._spec
        contexts = [self._format.context, served.backend.context]
        context = min((value for value in contexts if value), default=None)
        room = spec.turn_tokens if context is None else min(spec.turn_tokens, context - len(prompt))
        if room < 1:
            raise ContextOverflow(f"its prompt has {len(prompt)} tokens; the model's context has {context}")
        return GenerateRequest(
            episode_id=self.request_episode(episode_id),
            turn=turn,
            input_ids=np.asarray(prompt, np.int32),
            sampling=spec.sampling,
            max_new_tokens=room,
            stop_token_ids=self._stop,
            seed=seed,
            adapter=None if served.borrowed or spec.backend is None else spec.backend.adapter_name,
            base_model=self._base_model,
            messages=list(messages) if served.backend.declared.takes_messages else None,
        )

    def _fault(self, words: str, kind: str) -> SpecCodeError:
        part = "the user's model" if self._blame == "user" else f"the model of `{self.name}`"
        return SpecCodeError(f"{part}: {words}", blame=self._blame, kind=f"{self._kinds}_{kind}")

    def release(self, episode_id: str) -> None:
        """Release what the backend keeps for this role of an episode that has ended."""
        self._served.backend.release(self.request_episode(episode_id))


def without_reasoning(text: str) -> str:
    """Remove reasoning and surrounding whitespace from a reply, whether or not its chat template handles reasoning."""
    said = text.rpartition(_THINK_CLOSE)[2]
    return said.partition(_THINK_OPEN)[0].strip()


class RoleModels(EpisodeService):
    """The models of all roles of a spec, by the path where each is declared. `start` loads formats and opens
    backends."""

    def __init__(self, inputs: ServiceInputs) -> None:
        self._inputs = inputs
        self._loaded = inputs.loaded
        self._policy = RoleBackend(inputs.backend, inputs.slots, borrowed=True)
        self._backends: dict[str, RoleBackend] = {}
        self._models: dict[DataPath, RoleModel] = {}
        self._declared = played_roles(inputs.loaded.spec)

    async def start(self, backends: Sequence[Backend] = ()) -> None:
        """Load the formats and start the backends. If one fails, the started ones are closed.

        Raises:
            EngineError: a model cannot be loaded, or a backend cannot serve it.
            TrainError: kind `train_setup`: a role with `weights: frozen` would have the weights that are trained.
        """
        from engine.tokens.loading import load_format  # `engine validate` imports this module and needs no tokenizer

        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            for path, role in self._declared.items():
                part = role.spec
                weights = role_weights(self._loaded.spec, role) if self._inputs.training else "apart"
                copied = weights == "copy"
                borrows = role.shares_policy(self._loaded.spec) and not copied
                scripted = not borrows and role_section(self._loaded, path).spec.backend.scripted
                if self._inputs.only_scripted and not scripted:
                    continue
                if weights == "impossible":
                    raise TrainError("; ".join(frozen_refusal(role.name, self._loaded.spec)), kind="train_setup")
                template = self._inputs.template if part.model is None else load_format(part.model, self._loaded.base)
                served = self._policy if borrows else await self._open(path, template, copied=copied)
                self._models[path] = RoleModel(role, template, served, base_model=weights == "base")
            undo.pop_all()

    async def _open(self, path: DataPath, template: ChatTemplate, *, copied: bool) -> RoleBackend:
        """Return a backend for a role: one that is open for the same weights, or a new one."""
        section = role_section(self._loaded, path)
        if copied:  # the policy's settings, and the weights of `model.path`
            section = replace(section, spec=section.spec.model_copy(update={"backend": self._loaded.spec.backend}))
        key = section.spec.model_dump_json(include={"model": {"path", "revision"}, "backend": True})
        if section.spec.backend.scripted:
            key += str(path)  # each role has its own script
        if key not in self._backends:
            from engine.backends.registry import open_backend  # `validate` reads the roles of a spec without backends

            backend = open_backend(section, template)
            served = RoleBackend(backend, Slots(self._loaded.spec.rollout.concurrency), borrowed=False)
            self._backends[key] = served  # before it starts, so that it is closed if the start fails
            await backend.start()
        return self._backends[key]

    async def open(self, task: Task | None, objects: EpisodeObjects) -> None:
        """Let the model play the episode's user, if one does; a grader is then its part."""
        objects.parts[RoleModels] = self
        user = self._loaded.spec.users_by_name.get(objects.user_name)
        if user is not None and user.model_played:
            path = ("users", objects.user_name) if objects.user_name else ("user",)
            objects.user = ModelUser(user, lambda: self.model(*path), objects.user, self._inputs.code)

    def model(self, *path: str) -> RoleModel:
        """The model of the role declared at `path`.

        Raises:
            SpecCodeError: the role has no model: `start` was not called, or its backend may not be opened.
        """
        try:
            return self._models[path]
        except KeyError:
            role = self._declared[path]
            raise SpecCodeError(
                f"no model plays `{role.name}` here: script its answers, or give it a scripted backend",
                blame=role.blame,
                kind=f"{role.kinds}_not_played",
            ) from None

    def release(self, episode_id: str) -> None:
        """Release an episode that has ended in every role's backend."""
        for model in self._models.values():
            model.release(episode_id)

    async def close(self) -> None:
        """Close the backends that were opened here; the policy's stays."""
        backends, self._backends, self._models = list(self._backends.values()), {}, {}
        for served in backends:
            await served.backend.close()

    @property
    def backends(self) -> list[Backend]:
        """The backends that were opened here."""
        return [served.backend for served in self._backends.values()]

    def stats(self) -> dict[str, Any]:
        """Counts of each backend that was opened here, by the kind of its first role."""
        return {
            f"{index}:{served.backend.declared.kind_name()}": served.backend.stats()
            for index, served in enumerate(self._backends.values())
        }


def open_service(inputs: ServiceInputs) -> RoleModels | None:
    """The hook `open_service`: None if no model plays a role."""
    return RoleModels(inputs) if played_roles(inputs.loaded.spec) else None
