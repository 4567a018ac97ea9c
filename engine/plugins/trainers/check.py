"""What a spec uses, compared with what a trainer carries: `engine validate SPEC --trainer verl`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.actions.action_facts import ActionFacts
from engine.actions.facts import ACTIONS
from engine.errors import TrainError
from engine.machine.machine import resolved_machine
from engine.schemas.message import ImagePart
from engine.schemas.sections import written
from engine.spec.added import spec_facts
from engine.spec.text.diagnostic import DataPath, Severity
from engine.validate.model_files import model_files

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.spec.load import LoadedSpec

REFUSED, APPROXIMATED, UNKNOWN = "trainer.refused", "trainer.approximated", "trainer.unknown"
RULE_OF: dict[str, tuple[str, Severity, str]] = {
    "refused": (REFUSED, "error", "not carried"),
    "approximated": (APPROXIMATED, "warning", "carried in part"),
    "unknown": (UNKNOWN, "warning", "unknown"),
}
"""Rule, severity and words of each status that is a finding."""


@dataclass(frozen=True, slots=True)
class Use:
    """One thing that a spec uses."""

    thing: str
    """A key of `THINGS`."""
    path: DataPath
    """The key of the spec that uses it."""
    fix: str
    """How not to use it."""


def uses(loaded: LoadedSpec) -> Iterator[Use]:
    """Yield each thing that a spec uses, once. What only an episode shows is not among them, such as the branches of a chat template
    that rewrites history."""
    spec = loaded.spec
    train, credit = spec.train, spec.rewards.credit
    names = {state.action for state in resolved_machine(spec).states.values() if state.action is not None}
    actions = [facts for name in names if (facts := ACTIONS.get(name)) is not None]
    several = len(actions) < len(names) or any(map(_puts_tokens_between, actions))
    if spec.backend.exact_ids:
        yield Use("token_ids", ("model",), "use another trainer")
    if several:
        yield Use("masks", ("machine",), "use another trainer, or episodes of one turn")
    if several and credit.uses_turn_rewards:
        yield Use("turn_credit", ("rewards", "credit"), "use `rewards.credit: {method: outcome}`, or another trainer")
    if credit.token_formula is not None:
        yield Use(
            "token_bonuses", ("rewards", "credit"), "use a credit method without values by token, or another trainer"
        )
    elif train is not None and train.advantage_bonuses:
        yield Use("token_bonuses", ("train", "advantage_bonuses"), "remove the bonuses, or use another trainer")
    added = [Use(use.thing, use.path, use.fix) for facts in spec_facts(spec) for use in facts.trainer_uses]
    yield from added
    if not added and any(facts.rewrites_history for facts in actions):
        yield Use("branches", ("machine",), "remove the state that shortens the conversation, or use another trainer")
    if (images := _images(loaded)) is not None:
        yield Use("images", images, "use another trainer")
    if spec.backend.asks_experts:
        yield Use("expert_routing", ("backend", "routed_experts"), "remove it, or use another trainer")
    sources = [spec.rewards.scorer is not None, bool(spec.users_by_name), spec.environment is not None]
    if sum(sources) > 1 or spec.rewards.reassign:
        yield Use("reward_names", ("rewards",), "read the names in the run store, or use another trainer")
    if train is None:
        return
    if train.kl.in_reward:
        yield Use("kl_in_reward", ("train", "kl", "in"), "use `train.kl.in: loss`, or `engine train`")
    if train.rollout_correction.kind != "none":
        yield Use(
            "logprobs",
            ("train", "rollout_correction"),
            "set `train.rollout_correction: {kind: none}`, or use another trainer",
        )
    if train.asynchrony.max_staleness > 0:
        yield Use("versions", ("train", "asynchrony", "max_staleness"), "set it to 0, or use another trainer")
    path = _oversampled(spec)
    if path is not None:
        yield Use("oversampling", path, "turn it off, or use another trainer")


def _puts_tokens_between(facts: ActionFacts) -> bool:
    """Whether an action puts tokens between those of the model."""
    return facts.speaks in ("user", "tool") or facts.events is None or facts.rewrites_history


def _images(loaded: LoadedSpec) -> DataPath | None:
    """The key that shows that the model is shown images, or that it is made for them; None if none does."""
    spec = loaded.spec
    if spec.model.max_images is not None:
        return ("model", "max_images")
    for number, message in enumerate(spec.messages):
        if not isinstance(message.content, str) and any(isinstance(part, ImagePart) for part in message.content):
            return ("prompt", number)
    own = spec.conversation
    if own is not None and own.images is not None and "images" in own.model_fields_set:
        return ("prompt", "images")
    files = model_files(loaded)
    return ("model", "path") if files is not None and files.sees else None


def _oversampled(spec: EpisodeSpec) -> DataPath | None:
    train = spec.train
    if train is None:
        return None
    if train.asynchrony.oversample > 1.0:
        return ("train", "asynchrony", "oversample")
    if "difficulty" in written(spec):
        return ("train", "difficulty")
    return ("train", "dynamic_sampling") if train.dynamic_sampling else None


def refuse(loaded: LoadedSpec, trainer: str, problems: Mapping[str, bool]) -> None:
    """Raise TrainError of kind `train_setup` that names the problems which are so, each with what to change."""
    named = [text for text, refused in problems.items() if refused]
    if named:
        raise TrainError(f"{loaded.path}: with {trainer}, change these: " + "; ".join(named), kind="train_setup")
