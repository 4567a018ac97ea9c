"""The rules of an audit: one small function each, and one entry in `RULES`.

A function gets all rows that it can judge and yields findings. What a rule needs of a row is declared in its entry, and
rows without it are counted as not judged, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.plugins.audit.examine import Evidence, ExaminedRow
from engine.plugins.audit.findings import RowFinding
from engine.plugins.audit.rules.batch import mixed_group, no_versions, reward_unseen
from engine.plugins.audit.rules.prompts import prompt_not_template
from engine.plugins.audit.rules.tokens import closing_trained, missing_eos, observation_trained, retokenized


@dataclass(frozen=True, slots=True)
class AuditRule:
    """A rule, and what it needs of a row."""

    name: str
    title: str
    check: Callable[[Sequence[ExaminedRow], Evidence], Iterator[RowFinding]]
    lacks: Callable[[ExaminedRow], str | None] = lambda row: None
    """Why a row cannot be judged; None if it can."""


def _no_ids(row: ExaminedRow) -> str | None:
    return None if row.foreign.has_ids else "the row holds only texts"


def _no_plain_ids(row: ExaminedRow) -> str | None:
    return _no_ids(row) or ("the row has images" if row.foreign.images else None)


def _no_reward(row: ExaminedRow) -> str | None:
    return None if row.foreign.reward is not None or row.foreign.turn_rewards else "the row has no reward"


def _no_group(row: ExaminedRow) -> str | None:
    return None if row.foreign.group else "the row names no group"


RULES: tuple[AuditRule, ...] = (
    AuditRule("retokenized", "sampled tokens that were decoded and encoded again", retokenized, _no_ids),
    AuditRule("observation_trained", "observations with loss mask 1", observation_trained, _no_ids),
    AuditRule("closing_trained", "template text after a reply with loss mask 1", closing_trained, _no_ids),
    AuditRule("missing_eos", "replies without a trained stop token", missing_eos, _no_ids),
    AuditRule(
        "prompt_not_template", "prompts that are not what the template renders", prompt_not_template, _no_plain_ids
    ),
    AuditRule("reward_unseen", "rewards that reach no trained token", reward_unseen, _no_reward),
    AuditRule("mixed_group", "groups that mix prompts or tasks", mixed_group, _no_group),
    AuditRule("no_versions", "weight versions that are missing", no_versions),
)
"""The rules, in the order in which findings of a row are listed."""
