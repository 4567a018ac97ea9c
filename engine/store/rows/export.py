"""Converts stored episodes to training rows, one per branch.

    for row in export_rows(store): ...                    # dicts, arrays as numpy
    write_jsonl(export_rows(store), Path("rows.jsonl"))

`columns.py` has the meaning of each column of a row, `parquet.py` its type; docs/rows.md has both.

With a `vision`, a row of a branch with images also has the tensors that a forward pass needs besides `input_ids`, under
the names of the model's family: `pixel_values` and `image_grid_thw` for Qwen-VL. `loader.py` makes batches of rows.

Invariants:
- The arrays of a branch are unchanged from the store. Rewards and advantages are computed from
  the sealed ledger, so another credit method needs no new run.
- A group is the trainable finished episodes of one task; a baseline is computed from these episodes only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import LedgerError
from engine.masking import mask
from engine.rewards.credit import Member, Values, Where, credit_tokens, place
from engine.rewards.ledger import SealedLedger
from engine.schemas.credit import CreditSpec
from engine.schemas.experts import experts_as_text
from engine.schemas.reward_spec import RewardsSpec
from engine.store.private import whole_file
from engine.store.rows.columns import json_text, message_row, outcome_row, task_row

if TYPE_CHECKING:
    from engine.schemas.environment import Task
    from engine.schemas.trajectory import Branch, Trajectory
    from engine.store.reader import RunReader
    from engine.tokens.vision import Vision

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """How rows are made from a run."""

    credit: CreditSpec
    placement: Where
    base: Path | None
    """The spec's folder, for a credit method by entry point."""
    values: Mapping[str, Sequence[Sequence[float]]] | None
    """A critic's values, if there are any. None: the caller computes them; if the credit needs them, advantages are 0."""
    vision: Vision | None
    """Makes tensors from images; None if rows need none."""
    evaluation: bool
    """Whether the run is an evaluation: then no row is trainable."""
    metadata: Mapping[str, Any] | None = None
    """The origin of the rows; None inside a trainer."""
    members: bool = False
    """Whether rows have the column `group`: the trainable members by episode id, from which a trainer computes credit again."""


def export_rows(
    store: RunReader,
    *,
    credit: CreditSpec | None = None,
    trainable_only: bool = False,
    score: str | None = None,
    values: Mapping[str, Sequence[Sequence[float]]] | None = None,
    vision: Vision | None = None,
    keep: Callable[[Trajectory], bool] | None = None,
) -> Iterator[Row]:
    """Yield the training rows of every finished episode, in the order of tasks, samples and branches.

    Only one task's episodes are in memory at a time. In an evaluation (`engine eval`) no row is trainable.

    Args:
        store: The run, which may still be running.
        credit: How turn rewards become advantages. The default is the method of the run's spec, or of the score.
        trainable_only: Leave out rows that are not trainable.
        score: Label of a score of `engine rescore`, whose rewards are used.
        values: A critic's values, for methods that need them: episode id -> for each turn, one for each sampled token.
        vision: The model's images (`vision_of(store)`, or a run's own `format.vision`): rows then carry their tensors.
        keep: Which episodes have rows. Advantages are computed from all episodes of the group, as without it.

    Raises:
        StoreError: the run has no such score.
        LedgerError: the credit method needs values that are missing.
    """
    plan = plan_of(store, credit=credit, score=score, values=values, vision=vision)
    for task_id, group in groupby(store.trajectories(score), key=lambda trajectory: trajectory.task_id):
        episodes = list(group)
        kept = {each.episode_id for each in episodes if keep is None or keep(each)}
        rows = group_rows(episodes, plan, trainable_only, store.task(task_id)) if kept else ()
        yield from (row for row in rows if row["episode_id"] in kept)


def plan_of(
    store: RunReader,
    *,
    credit: CreditSpec | None = None,
    score: str | None = None,
    values: Mapping[str, Sequence[Sequence[float]]] | None = None,
    vision: Vision | None = None,
) -> Plan:
    """Return how rows are made from a run. The arguments are those of `export_rows`.

    Raises:
        StoreError: the run has no such score.
    """
    rewards = RewardsSpec.model_validate(store.score(score).rewards if score else store.header.rewards)
    base = Path(store.header.spec_path).parent if store.header.spec_path else None
    method = credit or rewards.credit
    metadata = _metadata(store, method, score)
    return Plan(method, rewards.placement, base, values or {}, vision, store.header.evaluation, metadata)


def credit_of(store: RunReader, score: str | None = None) -> CreditSpec:
    """Return the credit method of the run's spec, or of the spec that it was scored with under this label."""
    return RewardsSpec.model_validate(store.score(score).rewards if score else store.header.rewards).credit


def member_of(trajectory: Trajectory, values: Sequence[Sequence[float]] | None = None) -> Member:
    """Convert a finished episode to a member of its group.

    Raises:
        LedgerError: in some turn the number of values differs from the number of sampled tokens.
    """
    turns = trajectory.turns
    sizes = [turn.end - turn.start for turn in turns]
    if values is not None and [len(row) for row in values] != sizes:
        raise LedgerError(
            f"{trajectory.episode_id}: values for turns of {[len(row) for row in values]} tokens; they have {sizes}"
        )
    return Member(
        SealedLedger.from_postings(trajectory.postings, len(turns)),
        state_keys=[turn.state_key for turn in turns],
        values=None if values is None else np.array([value for row in values for value in row], np.float64),
        ends=list(accumulate(sizes)),
    )


def _metadata(store: RunReader, credit: CreditSpec, score: str | None) -> dict[str, Any]:
    header = store.header
    return {
        "spec": header.name,
        "model": (header.spec.get("model") or {}).get("path"),
        "engine_version": header.engine_version,
        "created": header.created,
        "credit": mask(json_text(credit.model_dump(mode="json", by_alias=True))),
        "score": score,
    }


def group_rows(
    group: Sequence[Trajectory], plan: Plan, trainable_only: bool = False, task: Task | None = None
) -> Iterator[Row]:
    """Return the training rows of one group, the finished episodes of one task.

    Raises:
        LedgerError: the credit method needs values that are missing.
    """
    members = [member_of(trajectory, (plan.values or {}).get(trajectory.episode_id)) for trajectory in group]
    chosen = [
        number
        for number, trajectory in enumerate(group)
        if trajectory.outcome.trainable and trajectory.turns and not plan.evaluation
    ]
    without_values = plan.values is None and plan.credit.needs_values
    found = (
        [members[number].broadcast(np.zeros(members[number].ledger.turns)) for number in chosen]
        if without_values
        else credit_tokens(plan.credit, [members[number] for number in chosen], base=plan.base)
    )
    advantages = dict(zip(chosen, found, strict=True))
    of_group = {group[number].episode_id: members[number] for number in chosen}
    for number, (trajectory, member) in enumerate(zip(group, members, strict=True)):
        shared = _shared(trajectory, member.ledger, plan, task)
        for branch in trajectory.branches:
            row = _row(shared, branch, plan.placement, advantages.get(number))
            if plan.members:
                row["group"] = of_group
            if plan.vision is not None and branch.images:
                row |= plan.vision.tensors([[image.image for image in branch.images]])
            if row["trainable"] or not trainable_only:
                yield row


def _shared(trajectory: Trajectory, ledger: SealedLedger, plan: Plan, task: Task | None) -> Row:
    return {
        "run_id": trajectory.run_id,
        "task_id": trajectory.task_id,
        "episode_id": trajectory.episode_id,
        "sample_index": trajectory.sample_index,
        "seed": trajectory.seed,
        "unchecked": Counter(turn.branch for turn in trajectory.turns if turn.prompt_unchecked),
        "turn_rewards": np.array(ledger.totals, np.float64),
        "parts": ledger.parts,
        "outcome": outcome_row(trajectory.outcome),
        "messages": [message_row(message) for message in trajectory.messages],
        **task_row(task, trajectory.facts),
        "metadata": plan.metadata,
    }


def _row(shared: Row, branch: Branch, placement: Where, advantages: list[Values] | None) -> Row:
    trainable = advantages is not None and bool(branch.loss_mask.any())
    return {
        "run_id": shared["run_id"],
        "task_id": shared["task_id"],
        "episode_id": shared["episode_id"],
        "task_index": shared["task_index"],
        "sample_index": shared["sample_index"],
        "branch": branch.index,
        "seed": shared["seed"],
        "trainable": trainable,
        "input_ids": branch.input_ids,
        "loss_mask": branch.loss_mask,
        "logprobs": branch.logprobs,
        "weight_versions": branch.weight_versions,
        "turn_ids": branch.turn_ids,
        "token_rewards": place(branch, shared["turn_rewards"], placement, shared["parts"]),
        "advantages": _on_tokens(branch, advantages) if trainable and advantages is not None else None,
        "unchecked_prompts": shared["unchecked"][branch.index],
        "turn_rewards": shared["turn_rewards"],
        "outcome": shared["outcome"],
        "messages": shared["messages"],
        "images": [image.plain() for image in branch.images],
        "routed_experts": branch.routed_experts,
        "task_fields": shared["task_fields"],
        "facts": shared["facts"],
        "metadata": shared["metadata"],
    }


def _on_tokens(branch: Branch, advantages: list[Values]) -> np.ndarray:
    """Place each turn's advantages on its sampled tokens, in order. float32 [tokens]."""
    placed = np.zeros(len(branch.input_ids), np.float32)
    sampled = branch.loss_mask == 1
    for turn in np.unique(branch.turn_ids[sampled]):
        placed[sampled & (branch.turn_ids == turn)] = advantages[turn]
    return placed


def write_jsonl(rows: Iterable[Row], path: Path) -> int:
    """Write rows as JSON lines, one at a time, and return their number.

    Numbers are written with the fewest digits that give the same float back. JSON has no NaN and no infinities: they
    become null. The file appears under its name only when it is complete.

    Raises:
        StoreError: the file cannot be written.
    """
    import orjson

    count = 0
    with whole_file(path) as draft, draft.open("wb") as file:
        for row in rows:
            if row.get("routed_experts") is not None:
                row = row | {"routed_experts": experts_as_text(row["routed_experts"])}
            file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
            count += 1
    return count
