"""Rules about rewards, groups and weight versions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import isfinite

import numpy as np

from engine.plugins.audit.examine import Evidence, ExaminedRow, first_difference
from engine.plugins.audit.findings import RowFinding


def reward_unseen(rows: Sequence[ExaminedRow], known: Evidence) -> Iterator[RowFinding]:
    """Rewards that reach no trained token."""
    for row in rows:
        foreign = row.foreign
        if foreign.reward is not None and not isfinite(foreign.reward):
            yield row.finding("reward_unseen", "error", f"the reward is {foreign.reward}")
            continue
        if foreign.has_ids and foreign.reward and not row.runs:
            message = f"the reward {foreign.reward:g} belongs to a row without a trained token"
            yield row.finding("reward_unseen", "error", message)
        elif foreign.excluded and foreign.reward:
            message = f"the row has the reward {foreign.reward:g} and is marked to be left out of the loss"
            yield row.finding("reward_unseen", "warning", message)
        elif foreign.token_rewards is not None:
            places = np.flatnonzero((foreign.token_rewards != 0) & (foreign.mask == 0))
            if len(places):
                at = int(places[0])
                yield row.finding(
                    "reward_unseen",
                    "warning",
                    f"{len(places)} rewards by token are on tokens with loss mask 0, the first of "
                    f"{foreign.token_rewards[at]:g}: a sum over the row "
                    "has it, an estimator that goes from token to token leaves it out",
                    at,
                )
        if len(foreign.turn_rewards) > 1 and any(foreign.turn_rewards):
            listed = ", ".join(f"{value:g}" for value in foreign.turn_rewards[:6])
            yield row.finding(
                "reward_unseen",
                "warning",
                f"rewards by turn ({listed}) are in a field beside the tokens; the reward that is trained is "
                f"{foreign.reward}",
            )


def mixed_group(rows: Sequence[ExaminedRow], known: Evidence) -> Iterator[RowFinding]:
    """Groups whose rows begin with other prompts or belong to other tasks, so that their rewards are no baseline for
    each other."""
    groups: dict[str, dict[str, ExaminedRow]] = defaultdict(dict)
    for row in rows:
        groups[row.foreign.group].setdefault(row.foreign.trajectory or f"row {row.index}", row)
    for name, members in groups.items():
        first, *others = members.values()
        for row in others:
            if _prompt_key(row) != _prompt_key(first):
                prompts = [one.foreign.prompt_ids for one in (row, first) if one.foreign.prompt_ids is not None]
                at = first_difference(*prompts) if len(prompts) == 2 else None
                message = f"group {name} begins with another prompt in {first.foreign.place}"
                yield row.finding("mixed_group", "error", message, at, response=False)
                continue
            label, expected = row.foreign.label, first.foreign.label
            if label is not None and expected is not None and str(label) != str(expected):
                message = (
                    f"group {name} has the answer {expected!r} in {first.foreign.place} and {label!r} here, with the "
                    "same prompt"
                )
                yield row.finding("mixed_group", "error", message)


def _prompt_key(row: ExaminedRow) -> bytes | str | None:
    return row.foreign.prompt_text if row.foreign.prompt_ids is None else row.foreign.prompt_ids.tobytes()


def no_versions(rows: Sequence[ExaminedRow], known: Evidence) -> Iterator[RowFinding]:
    """Trained tokens whose weight version is not known."""
    without = [row for row in rows if row.foreign.versions is None and not row.foreign.row_versions]
    if without and len(without) == len(rows):
        message = "no row names the weight version that sampled it"
        yield RowFinding(rule="no_versions", severity="info", row=-1, place="all rows", message=message)
        return
    for row in without:
        yield row.finding("no_versions", "warning", "this row names no weight version, and others do")
    for row in rows:
        versions = sorted(set(row.foreign.row_versions))
        if row.foreign.versions is None and len(versions) > 1:
            message = f"tokens of the versions {versions[0]} to {versions[-1]} are in one row, and no token says which"
            yield row.finding("no_versions", "warning", message)
        elif row.foreign.versions is not None:
            places = np.flatnonzero((row.foreign.versions < 0) & (row.foreign.mask != 0))
            if len(places):
                message = f"{len(places)} trained tokens have no weight version"
                yield row.finding("no_versions", "warning", message, int(places[0]))
