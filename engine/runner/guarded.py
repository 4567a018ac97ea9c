"""The guard of a run's episodes: what the rows are worth is known before they are stored.

Invariant: the end of an episode is written only after the guard has answered. Rows that are not what the chat template
writes, and rows without an answer, get a failure that says so, so that nothing trains on them. A failure of the
episode's own that makes it untrainable already is kept.

The first row with a wrong bridge turns the checks of probes off for this chat format (`Bridges.whole`): each later
prompt is found by rendering the whole conversation. The run's folder keeps that for a resume (`FILE`). Each
generation's record says how its prompt was found, so a replay finds it in the same way.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from engine.errors import StoreError
from engine.runner.failure_causes import REPAIRED
from engine.schemas.trajectory import Failure
from engine.store.private import private_file
from engine.tokens.bridge.guard import BranchFinding, BranchGuard

if TYPE_CHECKING:
    from engine.episode.episode import Episode
    from engine.schemas.trajectory import Outcome, Trajectory
    from engine.spec.load import LoadedSpec
    from engine.store.results import EncodedTrajectory
    from engine.tokens.template import ChatTemplate

log = structlog.get_logger(__name__)

FILE = "whole_prompts.json"
"""The file in a run's folder that says why every prompt is rendered whole."""
BRIDGE, PROMPT, UNGUARDED = REPAIRED, "prompt_differs", "unguarded"
KINDS = frozenset({BRIDGE, PROMPT, UNGUARDED})
"""Kinds of failures that the guard gives. None of them comes from the journal."""


class EpisodeGuard:
    """Judges the ended episodes of one run.

    Args:
        template: The chat template.
        loaded: The spec.
        folder: The run's folder.

    Raises:
        StoreError: what the run's folder says cannot be read.
    """

    def __init__(self, template: ChatTemplate, loaded: LoadedSpec, folder: Path) -> None:
        self._template = template
        self._guard = BranchGuard(template, loaded.spec.model, loaded.base)
        self._file = folder / FILE
        self.reason = read_reason(self._file)
        """Why every prompt is rendered whole; None where no row with a wrong bridge was found."""
        template.bridges.whole = template.bridges.whole or self.reason

    async def judged(self, episode: Episode, trajectory: Trajectory, encoded: EncodedTrajectory) -> Trajectory:
        """The trajectory, with a failure where its rows are not what the chat template writes.

        Args:
            episode: The ended episode.
            trajectory: Its trajectory.
            encoded: The same, as it is stored.
        """
        conversation = episode.conversation
        if conversation.history == "keep" or not conversation.asked:
            return trajectory  # with `keep`, rows are what was sampled, whatever the template would write
        finding = await self._guard.check(
            conversation, encoded.trajectory, [(row[3], row[4]) for row in encoded.branches]
        )
        if finding is None:
            return trajectory
        failure = self._failure(episode, trajectory, finding)
        return replace(trajectory, outcome=refused(trajectory.outcome, failure))

    def _failure(self, episode: Episode, trajectory: Trajectory, finding: BranchFinding) -> Failure:
        before, state = trajectory.outcome.failure, trajectory.outcome.state
        also = f". The episode had failed before: {before.kind} ({before.blame}): {before.message}" if before else ""
        if isinstance(finding, str):
            return Failure(
                kind=UNGUARDED,
                blame="engine",
                state=state,
                message="its rows were not compared with what the chat template writes, so they are not handed over "
                "as checked: "
                f"{finding}; run it again with `engine run --resume RUN --retry-failed all`{also}",
            )
        turn = max((turn.index for turn in trajectory.turns if turn.branch == finding.branch), default=-1)
        asked = sorted(episode.conversation.asked.items())[finding.branch][1]
        kind = PROMPT if finding.turns == 1 or asked.rendered_whole or finding.spelled else BRIDGE
        place = f"branch {finding.branch}, token {finding.token} (id {finding.id})"
        if finding.spelled:
            advice = (
                "a text that only spells a special token is hidden from the template, which looks for it; set "
                "model.allow_special: true "
                "if such text may become special tokens"
            )
        elif kind == PROMPT:
            advice = "this prompt was rendered whole, so please report it with the template"
        else:
            self.render_whole(f"{episode.id}, {place}: {finding.message}")
            advice = (
                "prompts of this template are rendered whole from now on, so "
                "`engine run --resume RUN --retry-failed all` repairs it"
            )
        message = f"{place}: {finding.message}; {advice}{also}"
        return Failure(kind=kind, blame="engine", state=state, turn=turn, message=message)

    def render_whole(self, reason: str) -> None:
        """Do without the checks of probes from now on, also after a resume. Only the first call has an effect.

        Raises:
            StoreError: the run's folder cannot be written.
        """
        if self.reason is not None:
            return
        log.warning("the chat template writes something that the checks of its bridges did not see", where=reason)
        self.reason = reason
        self._template.bridges.whole = self._template.bridges.whole or reason
        try:
            private_file(self._file).write_text(json.dumps({"reason": reason}) + "\n")
        except OSError as error:
            raise StoreError(f"cannot write {self._file}: {error}; is the disk full?") from error


def refused(outcome: Outcome, failure: Failure) -> Outcome:
    """An outcome with a failure of the guard; one that is untrainable by another's failure keeps that."""
    if outcome.failure is not None and outcome.failure.blame != "policy":
        return outcome
    return replace(outcome, failure=failure, trainable=False)


def as_judged(again: Trajectory, stored: Trajectory) -> Trajectory:
    """A replayed trajectory with the guard's failure of the stored one, which is not in the journal."""
    failure = stored.outcome.failure
    if failure is None or failure.kind not in KINDS:
        return again
    return replace(again, outcome=refused(again.outcome, failure))


def read_reason(file: Path) -> str | None:
    """Why prompts are rendered whole; None where they are not.

    Raises:
        StoreError: the file cannot be read.
    """
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["reason"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{file} is damaged ({error}): it says that the chat template's prompts are rendered whole. Write "
            '{"reason": "damaged"} into it, or remove it to let the run find that out again'
        ) from error
