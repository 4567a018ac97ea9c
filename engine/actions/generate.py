"""`generate`: samples one reply of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import TYPE_CHECKING, Any

from engine.actions.action import Action, EpisodeObjects
from engine.actions.action_facts import rooms_of
from engine.episode.episode import Episode, NewestReply
from engine.errors import BackendError
from engine.rewards.state_key import compile_state_key
from engine.schemas.generation import GenerateRequest
from engine.schemas.journal import GenerationRecord
from engine.schemas.message import MalformedCall, ToolCall
from engine.schemas.trajectory import Turn
from engine.tokens.conversation import Conversation

if TYPE_CHECKING:
    from engine.actions.calling.workers import Workers
    from engine.schemas.machine import StateSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate

LONG_TEXT = 1 << 16
"""Maximum number of characters that are tokenised on the event loop."""
_TOKENIZING = ThreadPoolExecutor(1, "tokenize")


class GenerateAction(Action):
    """Send the prompt's token ids to the backend, and append the reply's token ids to the tape."""

    name = "generate"

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        super().__init__(loaded, state, template, code)
        spec = loaded.spec
        self._sampling = spec.sampling
        self._most = min(spec.limits.turn_tokens, spec.sampling.max_new_tokens or spec.limits.turn_tokens)
        self._longest_prompt = min((most for limit, most in self.bounds if limit.unit == "tokens"), default=inf)
        self._stop = sorted({*template.stop_token_ids, *spec.sampling.stop_token_ids})
        self._longest = template.fast.longest
        self.vision = template.vision
        """How images become tokens; None for a model without images."""
        self._banned = self.vision.banned if self.vision is not None else []
        self._sends_messages = spec.backend.takes_messages
        self._adapter = spec.backend.adapter_name
        self._asks_experts = spec.backend.asks_experts
        self._state_key = compile_state_key(spec.rewards.credit)
        self._most_images = min(spec.limits.images or inf, spec.model.max_images or inf)
        self._rooms = rooms_of(spec, template)

    def limit(self, episode: Episode) -> tuple[str, float] | None:
        """Return the first limit that is reached, and its count; tokens of a text that is certainly too long are
        estimated from below."""
        conversation = episode.conversation
        least = None if conversation.characters <= LONG_TEXT else self._too_long(episode)
        for limit, most in self.bounds:
            if limit.unit == "tokens":
                count = len(conversation.prompt()) if least is None else least
            else:
                assert limit.count is not None  # `bounds_of` returns only counted limits
                count = limit.count(episode)
            if count > most or (count == most and not limit.inclusive):
                return limit.name, count
        return None

    def _too_long(self, episode: Episode) -> int | None:
        """Return the minimum number of tokens of the prompt, if it exceeds a limit; None means: tokenise the prompt."""
        waiting = episode.conversation.characters
        if waiting <= LONG_TEXT:
            return None
        least = episode.conversation.length + waiting // self._longest
        return least if least > self._longest_prompt else None

    def overflow(self, episode: Episode) -> tuple[str, float] | None:
        """Return the limit under which the prompt leaves no room for a reply, and the prompt's tokens; or `images` and
        their number, if some must go. At most once per turn."""
        if episode.made_room_at == episode.turn:
            return None
        for room in self._rooms:
            if (shown := room.images(episode.conversation, self._most_images)) is not None:
                return "images", float(shown)
        bounds = [(limit, most) for limit, most in self.bounds if limit.unit == "tokens"]
        least = self._too_long(episode)
        count = len(episode.conversation.prompt()) if bounds and least is None else least or 0
        return next(
            ((limit.name, float(count)) for limit, most in bounds if count + self._reserve(int(most)) > most), None
        )

    def _reserve(self, most: int) -> int:
        """Tokens that must be free for a reply, and for what an action that makes room needs."""
        free = min(self._most, most // 4)
        for room in self._rooms:
            free = room.reserve(free)
        return free

    def prepare(self, episode: Episode) -> Awaitable[object] | None:
        """Tokenise a long text in a thread, one at a time: a megabyte takes about a second and much memory."""
        if episode.conversation.characters <= LONG_TEXT or self._too_long(episode) is not None:
            return None
        return asyncio.get_running_loop().run_in_executor(_TOKENIZING, episode.conversation.prompt)

    async def perform(self, episode: Episode, objects: EpisodeObjects) -> GenerationRecord:
        """Sample one reply, and check it before anything is stored. A generation slot is held only while the reply is
        requested. Raises: BackendError: it is not what was requested."""
        request = self._request(episode, episode.conversation, episode.turn + 1, episode.sampling)
        assert objects.sampler is not None  # where nothing is sampled, nothing is performed
        generation = await objects.sampler.generate(request)
        if objects.sampler.checks_replies and self.vision is None and generation.routed_experts is None:
            episode.conversation.checked = generation
        else:
            episode.conversation.check(generation)
        count, most = len(generation.output_ids), request.max_new_tokens
        if count > most:
            raise BackendError(f"the backend sampled {count} tokens; at most {most} were requested", kind="bad_reply")
        if self._asks_experts and generation.routed_experts is None:
            raise BackendError("the backend did not report the routed experts", kind="bad_reply")
        return GenerationRecord(generation=generation, whole=episode.conversation.whole)

    def request_ahead(
        self, episode: Episode, conversation: Conversation, turn: int, asked: Mapping[str, Any]
    ) -> GenerateRequest | None:
        """Make the request for a later turn; None if a limit would stop it.

        Args:
            episode: The episode.
            conversation: A conversation with the turn's prompt.
            turn: The turn's number.
            asked: What changes of the spec's sampling.

        Raises:
            EngineError: The prompt cannot be made.
        """
        counts = {"turns": turn, "tokens": len(conversation.prompt()), "images": len(conversation.thread.images)}
        if any(limit.is_reached(counts[limit.unit], most) for limit, most in self.bounds):
            return None
        return self._request(episode, conversation, turn, asked)

    def _request(
        self, episode: Episode, conversation: Conversation, turn: int, asked: Mapping[str, Any]
    ) -> GenerateRequest:
        prompt, tape = conversation.prompt(), conversation.tape
        assert tape is not None
        images, spans = tape.placed_images()
        room = int(min(self._most, self._longest_prompt - len(prompt)))
        sampling = self._sampling
        if asked:  # stop texts are added to the spec's, other parameters replaced
            changes = {name: value for name, value in asked.items() if name != "max_tokens"}
            if stop := changes.get("stop"):
                changes["stop"] = [*dict.fromkeys([*sampling.stop, *stop])]
            sampling = sampling.model_copy(update=changes)
        return GenerateRequest(
            episode_id=episode.id,
            turn=turn,
            input_ids=prompt,
            sampling=sampling,
            max_new_tokens=min(room, asked.get("max_tokens", self._most)),
            stop_token_ids=self._stop,
            banned_token_ids=self._banned,
            seed=episode.turn_seed(turn),
            images=images,
            image_spans=spans,
            adapter=self._adapter,
            experts_from=tape.routed if self._asks_experts else None,
            messages=list(conversation.thread.messages) if self._sends_messages else None,
            tools=conversation.tools if self._sends_messages else None,
        )

    def apply(self, episode: Episode, record: GenerationRecord) -> str:
        """Append the reply to the tape and parse it."""
        generation = record.generation
        episode.conversation.recorded = record.whole
        episode.conversation.prompt()  # a replay has not built the prompt yet
        state_key = (
            None
            if self._state_key is None
            else self._state_key.compute(episode.facts, episode.conversation.messages, episode.guard_values)
        )
        episode.turn += 1
        reply = episode.conversation.reply(generation, episode.turn)
        attempts = reply.attempts
        calls: list[ToolCall] = []
        malformed: list[MalformedCall] = []
        for attempt in attempts:
            if isinstance(attempt, ToolCall):
                calls.append(attempt)
            else:
                malformed.append(attempt)
        episode.reply = NewestReply(
            text=reply.content,
            finish=generation.finish.type,
            matched=generation.finish.matched,
            tokens=len(generation.output_ids),
            attempts=attempts,
            calls=calls,
            malformed=malformed,
        )
        episode.counts.sampled_tokens += episode.reply.tokens
        event = _event(episode.reply)
        place = episode.conversation.turns[-1]
        episode.sampled_in += [episode.state]
        episode.turns.append(
            Turn(
                index=episode.turn,
                branch=place.branch,
                start=place.start,
                end=place.end,
                finish=generation.finish,
                event=event,
                state_key=state_key,
                seconds=generation.seconds,
                queue_seconds=generation.queue_seconds,
                cached_tokens=generation.cached_tokens,
                prompt_tokens=generation.prompt_tokens,
                prompt_unchecked=generation.prompt_unchecked,
                reply_tokens=generation.sampled_tokens,
                cost=generation.cost,
            )
        )
        return event

    def pipelined(self, episode: Episode, objects: EpisodeObjects) -> bool:
        """Return True: a reply that is lost has no effect outside, and is sampled again."""
        return True


def _event(reply: NewestReply) -> str:
    if reply.finish == "abort":
        return "aborted"
    if reply.finish == "length":
        return "truncated"  # tool calls in a truncated reply are not executed, even if they can be parsed
    if reply.malformed:
        return "malformed"
    return "tool_calls" if reply.attempts else "answered"
