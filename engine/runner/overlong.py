"""Tasks whose prompt leaves no room for a turn: refused, or left out and counted, before the run (`tasks.overlong`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import structlog

from engine.errors import SpecError
from engine.runner.prompt_lengths import PromptLengths
from engine.spec.text.diagnostic import Diagnostic

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec
    from engine.spec.rows.mix import TaskList
    from engine.tokens.template import ChatTemplate

log = structlog.get_logger(__name__)


def fitting_tasks(
    tasks: TaskList, loaded: LoadedSpec, template: ChatTemplate, processes: int | None = None
) -> TaskList:
    """The tasks whose prompt, with a turn of `limits.turn_tokens`, fits `limits.episode_tokens` and the model's context.

    Counted are the prompt of the spec or the row, its images (other than URLs), the first messages of a `pure` environment, and the
    schemas of its tools: of the row, or of the spec's functions. What the `reset` of other environments adds is not known here.

    Args:
        tasks: The tasks of the spec.
        loaded: The spec.
        template: The model's chat format.
        processes: Number of processes that tokenise long prompts. See `engine.preparing`.

    Raises:
        SpecError: `tasks.overlong: error`, and a prompt is too long; or all of them are.
    """
    spec = loaded.spec
    bounds = [most for most in (spec.limits.episode_tokens, spec.model.context, template.context) if most is not None]
    if spec.tasks.overlong is None or not bounds:
        return tasks
    room = min(bounds) - spec.limits.turn_tokens
    lengths = PromptLengths(loaded, template, processes).of(tasks, room)
    long = np.flatnonzero(lengths > room)
    if not len(long):
        return tasks
    first = int(long[0])
    words = (
        f"{len(long)} of {len(tasks)} tasks have a prompt that leaves no room for a turn of {spec.limits.turn_tokens} within "
        f"{min(bounds)} tokens; the first is row {tasks[first].index + 1} with {lengths[first]} tokens"
    )
    if spec.tasks.overlong == "error" or len(long) == len(tasks):
        fix = "set `tasks.overlong: drop`, or allow more tokens"
        origin = loaded.origin(("tasks", "overlong"))
        raise SpecError([Diagnostic("tasks.overlong", "error", words, fix, origin, ("tasks", "overlong"))])
    log.warning("tasks are left out", reason=words)
    return tasks.chosen(np.flatnonzero(lengths <= room))
