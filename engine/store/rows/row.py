"""Training rows. A row's arrays are those of its branch, unchanged from the store; what is computed stands beside them.

    row.branch.input_ids[row.places]        # the tokens that are trained
    row.advantages                          # one number for each of them
    row.columns()                           # the row in files, on the wire, and for functions of a spec

`places` alone says what is trained. In shapes, T is the number of tokens of the branch, n that of trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.rewards.credit import Where, place
from engine.schemas.base import Struct
from engine.schemas.trajectory import Branch, Outcome
from engine.store.rows.columns import Columns, json_text, message_columns, outcome_columns

if TYPE_CHECKING:
    from engine.rewards.credit import Member
    from engine.rewards.sealed import PartReward
    from engine.schemas.message import Message
    from engine.schemas.trajectory import ImageSpan

Places = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


class RowEpisode(Struct, frozen=True, kw_only=True):
    """What all rows of an episode share."""

    run_id: str = ""
    task_id: str = ""
    episode_id: str = ""
    task_index: int | None = None
    """Position of the task in its source; None inside a trainer."""
    sample_index: int = 0
    seed: int = 0
    turn_rewards: Doubles = msgspec.field(default_factory=lambda: np.zeros(0))
    """float64 [turns]."""
    outcome: Outcome = msgspec.field(default_factory=lambda: Outcome(state="", event=""))
    messages: Sequence[Message] = ()
    task_fields: Mapping[str, Any] | None = None
    """As stored; None inside a trainer."""
    facts: Mapping[str, Any] = msgspec.field(default_factory=dict)
    metadata: Mapping[str, Any] | None = None
    """The origin of the rows; None inside a trainer."""
    placement: Where | None = None
    """Where a turn's reward is put on its tokens; None in a row that no run has."""
    reward_parts: Sequence[PartReward] = ()
    """The rewards of parts of turns, which `turn_rewards` contain."""

    def columns(self) -> Columns:
        """Those columns of the episode's rows that take time to make."""
        return {
            "outcome": outcome_columns(self.outcome),
            "messages": [message_columns(message) for message in self.messages],
            "task_fields": None if self.task_fields is None else json_text(self.task_fields),
            "facts": json_text(self.facts),
        }


class RowCredit(Struct, frozen=True, kw_only=True):
    """From what a trainer computes the credit of a row again, with a critic's values or KL penalties."""

    members: Mapping[str, Member]
    """The trainable episodes of the row's group by id, also those without a row."""
    needs_values: bool = False
    """Whether the credit reads a critic's values. Until there are some, the advantages of the row hold bonuses only."""
    cut: bool = False
    """Whether a limit cut the episode after this row, so that its last state has a value."""
    bonuses: Floats | None = None
    """The advantage bonuses, float32 [n]; None if the spec has none."""


class TrainingRow(Struct, frozen=True, kw_only=True):
    """One branch of an episode, with its rewards and its credit."""

    episode: RowEpisode
    branch: Branch
    places: Places
    """The indices of the trained tokens, ascending: the branch's sampled tokens, less those of masked turns. int64
    [n]."""
    trainable: bool
    """Whether the row may be trained on."""
    advantages: Floats = msgspec.field(default_factory=lambda: np.zeros(0, np.float32))
    """float32 [n]; empty if the row is not trainable, or needs values of a critic that nobody has."""
    unchecked_prompts: int = 0
    credit: RowCredit | None = None
    """None where the advantages are final."""

    @classmethod
    def of_tokens(
        cls,
        input_ids: npt.ArrayLike,
        loss_mask: npt.ArrayLike,
        *,
        turn_ids: npt.ArrayLike | None = None,
        advantages: npt.ArrayLike | None = None,
        logprobs: npt.ArrayLike | None = None,
        weight_versions: npt.ArrayLike | None = None,
        images: Sequence[ImageSpan] = (),
        routed_experts: np.ndarray | None = None,
        episode: RowEpisode | None = None,
        index: int = 0,
    ) -> TrainingRow:
        """Make a row that no run has: of a file, or of a probe. All arguments are [T], also `advantages`; they are
        copied."""
        ids, mask = np.array(input_ids, np.int32), np.array(loss_mask, np.int32)
        places = np.flatnonzero(mask == 1)
        branch = Branch(
            index=index,
            spans=[],
            input_ids=ids,
            loss_mask=mask,
            logprobs=np.zeros(len(ids), np.float32) if logprobs is None else np.array(logprobs, np.float32),
            weight_versions=np.array(mask - 1 if weight_versions is None else weight_versions, np.int32),
            turn_ids=np.array(mask - 1 if turn_ids is None else turn_ids, np.int32),
            images=list(images),
            routed_experts=routed_experts,
        )
        of_places = np.zeros(len(places)) if advantages is None else np.asarray(advantages)[places]
        return cls(
            episode=episode or RowEpisode(),
            branch=branch,
            places=places,
            trainable=True,
            advantages=of_places.astype(np.float32),
        )

    def on_tokens(self, values: np.ndarray, dtype: npt.DTypeLike = np.float32) -> np.ndarray:
        """Numbers of the trained tokens at their places, 0 elsewhere. [n] to [T]."""
        placed = np.zeros(len(self.branch.input_ids), dtype)
        placed[self.places] = values
        return placed

    def loss_mask(self) -> npt.NDArray[np.int32]:
        """1 on trained tokens, 0 elsewhere: int32 [T]. The branch's own, unless turns are masked."""
        mask = self.branch.loss_mask
        if len(self.places) == np.count_nonzero(mask == 1):
            return mask
        return self.on_tokens(np.ones(len(self.places)), mask.dtype)

    def token_rewards(self) -> Floats | None:
        """The rewards on sampled tokens, 0.0 elsewhere: float32 [T]. None in a row that no run has.

        Raises:
            LedgerError: the branch holds a turn without a reward.
        """
        episode = self.episode
        if episode.placement is None:
            return None
        return place(self.branch, episode.turn_rewards, episode.placement, episode.reward_parts)

    def columns(self, shared: Columns | None = None) -> Columns:
        """The row as a dict, in the order of `MEANINGS`, with arrays of [T].

        Args:
            shared: What `episode.columns()` returned, where several rows of an episode are converted.

        Raises:
            LedgerError: as `token_rewards`.
        """
        episode, branch = self.episode, self.branch
        shared = shared or episode.columns()
        return {
            "run_id": episode.run_id,
            "task_id": episode.task_id,
            "episode_id": episode.episode_id,
            "task_index": episode.task_index,
            "sample_index": episode.sample_index,
            "branch": branch.index,
            "seed": episode.seed,
            "trainable": self.trainable,
            "input_ids": branch.input_ids,
            "loss_mask": self.loss_mask(),
            "logprobs": branch.logprobs,
            "weight_versions": branch.weight_versions,
            "turn_ids": branch.turn_ids,
            "token_rewards": self.token_rewards(),
            "advantages": self.on_tokens(self.advantages) if len(self.advantages) else None,
            "unchecked_prompts": self.unchecked_prompts,
            "turn_rewards": episode.turn_rewards,
            "outcome": shared["outcome"],
            "messages": shared["messages"],
            "images": [image.plain() for image in branch.images],
            "routed_experts": branch.routed_experts,
            "task_fields": shared["task_fields"],
            "facts": shared["facts"],
            "metadata": episode.metadata,
        }


def columns_of(rows: Iterable[TrainingRow]) -> Iterator[Columns]:
    """The columns of rows, made one at a time; what the rows of an episode share is made once."""
    episode: RowEpisode | None = None
    shared: Columns = {}
    for row in rows:
        if row.episode is not episode:
            episode, shared = row.episode, row.episode.columns()
        yield row.columns(shared)
