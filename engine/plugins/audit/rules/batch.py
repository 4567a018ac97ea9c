"""Rules about rewards, groups and weight versions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import isfinite

import numpy as np

from engine.plugins.audit.examine import Evidence, Examined, first_difference
from engine.plugins.audit.findings import RowFinding


def reward_unseen(rows: Sequence[Examined], known: Evidence) -> Iterator[RowFinding]:
    """Rewards that reach no trained token."""
    for row in rows:
        own = row.row
        if own.reward is not None and not isfinite(own.reward):
            yield row.finding("reward_unseen", "error", f"the reward is {own.reward}")
            continue
        if own.has_ids and own.reward and not row.runs:
            yield row.finding(
                "reward_unseen", "error", f"the reward {own.reward:g} belongs to a row without a trained token"
            )
        elif own.excluded and own.reward:
            yield row.finding(
                "reward_unseen",
                "warning",
                f"the row has the reward {own.reward:g} and is marked to be left out of the loss",
            )
        elif own.token_rewards is not None:
            places = np.flatnonzero((own.token_rewards != 0) & (own.mask == 0))
            if len(places):
                at = int(places[0])
                yield row.finding(
                    "reward_unseen",
                    "warning",
                    f"{len(places)} rewards by token are on tokens with loss mask 0, the first of {own.token_rewards[at]:g}: a sum over the row "
                    "has it, an estimator that goes from token to token leaves it out",
                    at,
                )
        if len(own.turn_rewards) > 1 and any(own.turn_rewards):
            told = ", ".join(f"{value:g}" for value in own.turn_rewards[:6])
            yield row.finding(
                "reward_unseen",
                "warning",
                f"rewards by turn ({told}) are in a field beside the tokens; the reward that is trained is {own.reward}",
            )


def mixed_group(rows: Sequence[Examined], known: Evidence) -> Iterator[RowFinding]:
    """Groups whose rows begin with other prompts or belong to other tasks, so that their rewards are no baseline for each other."""
    groups: dict[str, dict[str, Examined]] = defaultdict(dict)
    for row in rows:
        groups[row.row.group].setdefault(row.row.trajectory or f"row {row.index}", row)
    for name, members in groups.items():
        first, *others = members.values()
        for row in others:
            if _prompt_key(row) != _prompt_key(first):
                at = (
                    None
                    if row.row.prompt_ids is None or first.row.prompt_ids is None
                    else first_difference(row.row.prompt_ids.tolist(), first.row.prompt_ids.tolist())
                )
                yield row.finding(
                    "mixed_group",
                    "error",
                    f"group {name} begins with another prompt in {first.row.place}",
                    at,
                    response=False,
                )
            elif (
                row.row.label is not None and first.row.label is not None and str(row.row.label) != str(first.row.label)
            ):
                yield row.finding(
                    "mixed_group",
                    "error",
                    f"group {name} has the answer {first.row.label!r} in {first.row.place} and {row.row.label!r} here, with the same prompt",
                )


def _prompt_key(row: Examined) -> bytes | str | None:
    return row.row.prompt_text if row.row.prompt_ids is None else row.row.prompt_ids.tobytes()


def no_versions(rows: Sequence[Examined], known: Evidence) -> Iterator[RowFinding]:
    """Trained tokens whose weight version is not known."""
    without = [row for row in rows if row.row.versions is None and not row.row.row_versions]
    if without and len(without) == len(rows):
        yield RowFinding(
            rule="no_versions",
            severity="info",
            row=-1,
            place="all rows",
            message="no row names the weight version that sampled it",
        )
    else:
        for row in without:
            yield row.finding("no_versions", "warning", "this row names no weight version, and others do")
    for row in rows:
        if row.row.versions is None and len(set(row.row.row_versions)) > 1:
            found = sorted(set(row.row.row_versions))
            yield row.finding(
                "no_versions",
                "warning",
                f"tokens of the versions {found[0]} to {found[-1]} are in one row, and no token says which",
            )
        elif row.row.versions is not None:
            places = np.flatnonzero((row.row.versions < 0) & (row.row.mask != 0))
            if len(places):
                yield row.finding(
                    "no_versions",
                    "warning",
                    f"{len(places)} trained tokens have no weight version",
                    int(places[0]),
                )
