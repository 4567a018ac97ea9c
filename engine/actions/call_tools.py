"""`call_tools`: executes the model's tool calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.actions.action import BuiltInAction, EpisodeObjects, post_rewards
from engine.episode.episode import Episode
from engine.errors import SpecCodeError
from engine.schemas.journal import ToolsRecord
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

if TYPE_CHECKING:
    from engine.actions.calling.workers import Workers
    from engine.schemas.machine import StateSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate


class CallToolsAction(BuiltInAction):
    """Execute the newest turn's calls in parallel, and add the results in the order of the calls.

    Calls beyond the limit `tool_calls` inside one turn get an error result.
    """

    name = "call_tools"

    def __init__(self, loaded: LoadedSpec, state: StateSpec, template: ChatTemplate, code: Workers) -> None:
        super().__init__(loaded, state, template, code)
        self._most = loaded.spec.limits.tool_calls

    async def perform(self, episode: Episode, objects: EpisodeObjects) -> ToolsRecord:
        """Return one result per attempted call.

        Raises:
            SpecCodeError: the spec has no tools.
        """
        if objects.toolbox is None:
            raise SpecCodeError("tools are called, but the spec has none", blame="spec", kind="no_tools")
        attempts = episode.reply.attempts
        left = self._most - episode.counts.tool_calls if self._most is not None else len(attempts)
        results = await objects.toolbox.call_all(attempts, episode.turn, episode.view, budget=left)
        return ToolsRecord(results=results)

    def apply(self, episode: Episode, record: ToolsRecord) -> str:
        """Add the results to the conversation, and write their rewards and facts. A fact `solved: true` marks the outcome as solved."""
        for result in record.results:
            if result.error not in ("malformed", "limit"):
                episode.counts.tool_calls += 1
            if result.error is not None:
                episode.counts.tool_errors += 1
            episode.facts.update(result.facts)
            if result.rewards:
                rewards = [_own_call(event, result.call_id) for event in result.rewards]
                post_rewards(episode, rewards, f"tool:{result.name}")
            episode.solved = episode.solved or result.facts.get("solved") is True
        episode.conversation.add(
            [
                Message(role="tool", content=result.content, tool_call_id=result.call_id, name=result.name)
                for result in record.results
            ]
        )
        return "results"

    def pipelined(self, episode: Episode, objects: EpisodeObjects) -> bool:
        """Return whether every called tool is pure: such calls can be repeated without any effect."""
        return self.effects(episode, objects) == "pure"

    def effects(self, episode: Episode, objects: EpisodeObjects) -> str:
        """Return the strongest effects of the called tools."""
        called = {objects.toolbox.effects(call.name) for call in episode.reply.calls} if objects.toolbox else set()
        if "external" in called:
            return "external"
        return "replayable" if "replayable" in called else "pure"


def _own_call(event: RewardEvent, call_id: str) -> RewardEvent:
    """The event with the tool's own call in place of `this`."""
    changed = {
        key: part.model_copy(update={"call": call_id})
        for key, part in (("part", event.part), ("to_part", event.to_part))
        if part is not None and part.call == "this"
    }
    return event.model_copy(update=changed) if changed else event
