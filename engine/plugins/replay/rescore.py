"""Rescore: apply other reward rules and another credit method to stored episodes, without a model.

Invariant: only the section `rewards` of the new spec is used, and the results of the run's own rules are unchanged. A
spec that differs in a way that would have changed the episodes is refused, and the message names each place.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from engine.errors import StoreError
from engine.masking import mask_values
from engine.runner.replay import Replayer
from engine.store import header

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.trajectory import Trajectory
    from engine.spec.load import LoadedSpec
    from engine.store.scores import EpisodeScore
    from engine.store.store import RunStore
    from engine.tokens.template import ChatTemplate

MATTERS = ("model", "prompt", "environment", "tools", "user", "users", "machine", "limits", "recover")
"""Sections that decide the content of episodes. The other sections (how, where and how often was sampled) are not
used."""


@dataclass(slots=True)
class Rescored:
    """The result of rescoring a run."""

    label: str
    episodes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Number of episodes to which the rules could not be applied, by kind of failure."""
    examples: dict[str, str] = field(default_factory=dict)
    """The description of one such failure, by kind."""
    changed: list[tuple[str, float, float]] = field(default_factory=list)
    """The episodes with a turn whose rewards have changed: id, reward before and after."""
    before: float = 0.0
    """Sum of the episodes' rewards by the run's own rules; `after` is the sum by the new rules."""
    after: float = 0.0

    def add(self, stored: Trajectory, score: EpisodeScore) -> None:
        """Count one episode."""
        self.episodes += 1
        self.before += stored.outcome.reward
        self.after += score.outcome.reward
        if [turn.rewards for turn in stored.turns] != score.rewards:
            self.changed.append((stored.episode_id, stored.outcome.reward, score.outcome.reward))
        failure = score.outcome.failure
        if failure is not None and failure != stored.outcome.failure:
            self.failures[failure.kind] += 1
            self.examples.setdefault(failure.kind, f"{stored.episode_id}: {failure.message}")


def differences(old: EpisodeSpec, new: EpisodeSpec) -> list[str]:
    """Describe the places where the new spec would have changed the episodes."""
    before, after = old.model_dump(mode="json", by_alias=True), new.model_dump(mode="json", by_alias=True)
    parts = {name: (before.get(name), after.get(name)) for name in MATTERS}
    parts["rewards.scorer"] = before["rewards"].get("scorer"), after["rewards"].get("scorer")
    return [
        f"{path}: {_short(one)} in the run, {_short(other)} in the spec"
        for name, (of_run, of_spec) in parts.items()
        for path, one, other in header.differences(of_run, of_spec, name, in_lists=True)
    ]


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def under(old: LoadedSpec, new: LoadedSpec) -> LoadedSpec:
    """Return the run's spec with the rewards of another spec.

    Raises:
        StoreError: the other spec would have changed the episodes; the message names each place.
    """
    places = differences(old.spec, new.spec)
    if places:
        more = [f"… and {len(places) - 8} more"] if len(places) > 8 else []
        listed = "\n  ".join([*places[:8], *more])
        raise StoreError(
            f"{new.path}: this spec would have changed the episodes. Only `rewards.reassign`, "
            "`rewards.credit` and `rewards.placement` may differ (the answers of a scorer are in the journal):\n  "
            f"{listed}"
        )
    return replace(old, spec=old.spec.model_copy(update={"rewards": new.spec.rewards}))


async def rescore(
    store: RunStore, new: LoadedSpec, format: ChatTemplate, label: str, *, replace_label: bool = False
) -> Rescored:
    """Score every finished episode of a run with another spec's rewards, and store the result under a label.

    Args:
        store: The run, open for writing.
        new: The other spec, checked.
        format: The run's chat format.
        label: The score's label.
        replace_label: Replace an existing score with this label.

    Returns:
        The result. A rule that cannot be applied to an episode, or that would have led to another event, is a
        typed failure of that episode's score.

    Raises:
        StoreError: the spec would have changed the episodes, or there is a score with this label.
    """
    loaded = under(store.header.loaded_spec(), new)
    if not replace_label and label in {head.label for head in store.scores()}:
        raise StoreError(f"there is a score `{label}` already; give this one another --label, or --replace that one")
    result = Rescored(label)
    scores: dict[str, EpisodeScore] = {}
    replayer = Replayer(loaded, format, store)
    try:
        for stored in store.trajectories():
            score = await replayer.rescore(stored, store.task(stored.task_id))
            scores[stored.episode_id] = score
            result.add(stored, score)
    finally:
        replayer.close()
    rewards = mask_values(loaded.spec.rewards.model_dump(mode="json", by_alias=True))
    await store.put_score(label, rewards, scores, spec_path=str(new.path), replace=replace_label)
    return result
