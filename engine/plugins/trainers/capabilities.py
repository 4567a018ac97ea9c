"""What a spec uses, and what other trainers carry of it: the table of `capabilities.yaml`, read by
`engine validate SPEC --trainer verl` and by docs/trainers.md.

Nothing here imports a trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from engine.actions.facts import ACTIONS
from engine.machine.machine import resolved_machine
from engine.schemas.base import Struct
from engine.schemas.message import ImagePart
from engine.schemas.sections import written
from engine.spec.added import TrainerUse, spec_facts
from engine.spec.text.diagnostic import DataPath, Diagnostic, Severity
from engine.validate.model_files import model_files

if TYPE_CHECKING:
    from engine.schemas.train import TrainSpec
    from engine.spec.load import LoadedSpec


REFUSED, APPROXIMATED, UNKNOWN = "trainer.refused", "trainer.approximated", "trainer.unknown"
RULE_OF: dict[str, tuple[str, Severity, str]] = {
    "refused": (REFUSED, "error", "not carried"),
    "approximated": (APPROXIMATED, "warning", "carried in part"),
    "unknown": (UNKNOWN, "warning", "unknown"),
}
"""Rule, severity and words of each status that is a finding."""
_Row = tuple[bool, str, DataPath, str]
"""Whether a thing is used, a key of `THINGS`, the key of the spec that uses it, and how not to use it."""


def uses(loaded: LoadedSpec) -> list[TrainerUse]:
    """Return each thing that a spec uses, once. What only an episode shows is not among them, such as the branches of a
    chat template that rewrites history."""
    spec = loaded.spec
    credit = spec.rewards.credit
    names = {state.action for state in resolved_machine(spec).states.values() if state.action is not None}
    actions = [facts for name in names if (facts := ACTIONS.get(name)) is not None]
    several = len(actions) < len(names) or any(  # tokens stand between those of the model
        facts.speaks in ("user", "tool") or facts.events is None or facts.rewrites_history for facts in actions
    )
    by_token = credit.token_formula is not None
    bonuses = spec.train is not None and bool(spec.train.advantage_bonuses)
    added = [use for facts in spec_facts(spec) for use in facts.trainer_uses]
    rewrites = not added and any(facts.rewrites_history for facts in actions)
    images = _images(loaded)
    sources = [spec.rewards.scorer is not None, bool(spec.users_by_name), spec.environment is not None]
    named = sum(sources) > 1 or bool(spec.rewards.reassign)
    other, both = "use another trainer", "or use another trainer"
    rows: list[_Row] = [
        (spec.backend.exact_ids, "token_ids", ("model",), other),
        (several, "masks", ("machine",), f"{other}, or episodes of one turn"),
        (
            several and credit.uses_turn_rewards,
            "turn_credit",
            ("rewards", "credit"),
            "use `rewards.credit: {method: outcome}`, or another trainer",
        ),
        (
            by_token,
            "token_bonuses",
            ("rewards", "credit"),
            "use a credit method without values by token, or another trainer",
        ),
        (
            bonuses and not by_token,
            "token_bonuses",
            ("train", "advantage_bonuses"),
            f"remove the bonuses, {both}",
        ),
        (rewrites, "branches", ("machine",), f"remove the state that shortens the conversation, {both}"),
        (images is not None, "images", images or (), other),
        (spec.backend.asks_experts, "expert_routing", ("backend", "routed_experts"), f"remove it, {both}"),
        (named, "reward_names", ("rewards",), f"read the names in the run store, {both}"),
    ]
    if spec.train is not None:
        rows += _uses_of_training(spec.train, difficulty="difficulty" in written(spec))
    return added + [TrainerUse(thing=thing, path=path, fix=fix) for used, thing, path, fix in rows if used]


def _uses_of_training(train: TrainSpec, *, difficulty: bool) -> list[_Row]:
    """What the section `train` uses. `difficulty`: whether it has the key of that plugin."""
    asynchrony = train.asynchrony
    oversampled = {
        ("train", "asynchrony", "oversample"): asynchrony.oversample > 1.0,
        ("train", "difficulty"): difficulty,
        ("train", "dynamic_sampling"): train.dynamic_sampling,
    }
    oversampling = next((path for path, used in oversampled.items() if used), ())
    corrected = train.rollout_correction.kind != "none"
    correction = "set `train.rollout_correction: {kind: none}`, or use another trainer"
    staleness = ("train", "asynchrony", "max_staleness")
    return [
        (train.kl.in_reward, "kl_in_reward", ("train", "kl", "in"), "use `train.kl.in: loss`, or `engine train`"),
        (corrected, "logprobs", ("train", "rollout_correction"), correction),
        (asynchrony.max_staleness > 0, "versions", staleness, "set it to 0, or use another trainer"),
        (bool(oversampling), "oversampling", oversampling, "turn it off, or use another trainer"),
    ]


def _images(loaded: LoadedSpec) -> DataPath | None:
    """The key that shows that the model is shown images, or that it is made for them; None if none does."""
    spec = loaded.spec
    if spec.model.max_images is not None:
        return ("model", "max_images")
    for number, message in enumerate(spec.messages):
        if not isinstance(message.content, str) and any(isinstance(part, ImagePart) for part in message.content):
            return ("prompt", number)
    conversation = spec.conversation
    if conversation is not None and conversation.images is not None and "images" in conversation.model_fields_set:
        return ("prompt", "images")
    files = model_files(loaded)
    return ("model", "path") if files is not None and files.sees else None


Status = Literal["carried", "approximated", "refused", "unknown"]
"""`carried`: exactly. `approximated`: something of it is lost. `refused`: it does not arrive. `unknown`: nobody has
looked."""


class Carried(Struct, frozen=True):
    """How a trainer carries one thing."""

    status: Status
    how: str
    """By what it is carried, what is lost, or why it is refused."""


class TrainerTable(Struct, frozen=True):
    """One trainer."""

    title: str
    version: str
    """The version, or the commit, that the table is about."""
    ran: bool
    """Whether the hand-over of advantages was executed, and not only read in the source."""
    way_in: str
    """The shortest way in."""
    things: Mapping[str, Carried]
    """One entry for each of `THINGS`."""

    def findings(self, loaded: LoadedSpec) -> list[Diagnostic]:
        """Return a finding for each thing that the spec uses and the trainer does not carry exactly."""
        findings = []
        for use in uses(loaded):
            carried = self.things[use.thing]
            if carried.status == "carried":
                continue
            rule, severity, words = RULE_OF[carried.status]
            message = f"{self.title} {self.version}: {words}: {THINGS[use.thing]}; {carried.how}"
            findings.append(Diagnostic(rule, severity, message, use.fix, loaded.origin(use.path), use.path))
        return findings


_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
THINGS: Mapping[str, str] = _TABLE["things"]
"""The things that a spec may use, in the order of the table."""
TRAINERS: Mapping[str, TrainerTable] = {
    name: TrainerTable(
        **values | {"things": {thing: Carried(*how.popitem()) for thing, how in values["things"].items()}}
    )
    for name, values in _TABLE["trainers"].items()
}
"""The trainers by the name that `--trainer` takes."""


def __getattr__(name: str) -> TrainerTable:
    """A trainer by its name in capitals: what the entry points of the point `trainers` name."""
    if name.isupper() and name.lower() in TRAINERS:
        return TRAINERS[name.lower()]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
