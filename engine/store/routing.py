"""The experts of stored branches, put together from the journal, which alone holds them.

A reply has the experts of all tokens that had none before, up to the last but one of its end: those of the prompt's new tokens and
its own. So the experts of a branch are those of its turns, one after another.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.schemas.generation import Generation
from engine.schemas.journal import GenerationRecord
from engine.schemas.trajectory import Trajectory
from engine.store import codec

_ENTRY = "seq, state, event, dest, kind, payload, tokens, at, seconds"


def routed_generations(connection: sqlite3.Connection, number: int) -> list[Generation]:
    """Return the generations of an episode's newest attempt, one for each turn.

    Raises:
        StoreError: an entry of the journal is damaged.
    """
    rows = connection.execute(
        f"SELECT {_ENTRY} FROM journal WHERE episode = ?1 AND kind = 'generation' "
        "AND attempt = (SELECT attempt FROM trajectories WHERE episode = ?1) ORDER BY seq",
        (number,),
    )
    records = (codec.read_entry(row).record for row in rows)
    return [record.generation for record in records if isinstance(record, GenerationRecord)]


def with_experts(trajectory: Trajectory, routed: Sequence[int | None], generations: Sequence[Generation]) -> Trajectory:
    """Return the trajectory with the experts of its branches.

    Args:
        trajectory: The trajectory.
        routed: For each branch, how many tokens have known experts; None: they were not requested.
        generations: The generation of each turn.

    Raises:
        StoreError: the generations do not have as many.
    """
    with codec.damaged("the routing of experts"):
        found: dict[int, list[np.ndarray]] = {}
        for turn, generation in zip(trajectory.turns, generations, strict=True):
            if generation.routed_experts is not None:
                found.setdefault(turn.branch, []).append(generation.routed_experts)
        branches = []
        for branch, count in zip(trajectory.branches, routed, strict=True):
            if count is not None:
                experts = np.concatenate(found.get(branch.index, []))
                if len(experts) != count:
                    raise ValueError(
                        f"branch {branch.index} has the experts of {len(experts)} tokens instead of {count}"
                    )
                branch = replace(branch, routed_experts=experts)
            branches.append(branch)
        return replace(trajectory, branches=branches)
