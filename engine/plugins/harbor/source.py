"""Task folders of Harbor's form as rows: `tasks: {source: harbor, path: FOLDER}`.

And what holds for the source `harbor`, and for the adapter that runs them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from engine.errors import SpecError
from engine.plugins.harbor.folders import HarborError, UnsupportedTaskError, read_task, task_folders
from engine.schemas.entry import AdapterFacts
from engine.schemas.tasks import SourceFacts
from engine.spec.rows.row import ListRows, Rows
from engine.spec.rows.sources import TASKS, fault, task_file
from engine.spec.text.diagnostic import Diagnostic, Origin
from engine.spec.text.near import short

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec

SOURCE = SourceFacts(keys=("path", "unsupported"), opens="engine.plugins.harbor.source:task_rows")
ADAPTER = AdapterFacts(
    name="harbor",
    runs="engine.plugins.harbor.environment:HarborEnvironment",
    use="`shell` (the model has a tool of that name) or `program` (for an agent program); with "
    "`tasks: {source: harbor}`",
    names="name",
    rewards="end",
    thread_safe=True,
    tools="some",
)
MOST_REFUSED = 20
"""Task folders whose reasons for being refused are listed."""


def task_rows(loaded: LoadedSpec, limit: int | None) -> Rows:
    """The task folders of `tasks.path`, each as a row with `folder`, its path relative to the spec.

    Raises:
        SpecError: one of them cannot be read, or does not run here and may not be left out; it names each.
    """
    drops = loaded.spec.tasks.unsupported == "drop"
    rows: list[dict[str, Any]] = []
    refused: list[Diagnostic] = []
    dropped: list[str] = []
    at = loaded.origin((*TASKS, "path"))
    try:
        folders = task_folders(task_file(loaded))
    except HarborError as error:
        raise fault(loaded, "tasks.no-file", str(error), None, at) from error
    for folder in folders:
        try:
            if not loaded.access.allows(folder):
                raise HarborError("it lies outside of what is read", folder)
            task = read_task(folder)
            rows.append(
                {
                    "name": task.name,
                    "instruction": task.instruction,
                    "agent_seconds": task.agent_seconds,
                    "verifier_seconds": task.verifier_seconds,
                    "folder": os.path.relpath(folder, loaded.base),
                }
            )
        except HarborError as error:
            if drops and isinstance(error, UnsupportedTaskError):
                dropped.append(str(error))
                continue
            place = Origin(str(error.path), error.line or 1, 1)
            refused.append(Diagnostic("tasks.harbor", "error", error.message, None, place, (*TASKS, "path")))
    if refused:
        more = len(refused) - MOST_REFUSED
        if more > 0:
            rest = f"and {more} other task folders of `{short(loaded.spec.tasks.file)}`"
            refused = [*refused[:MOST_REFUSED], Diagnostic("tasks.harbor", "error", rest, None, at, (*TASKS, "path"))]
        raise SpecError(refused)
    if dropped and not rows:
        message = f"none of the {len(dropped)} task folders runs here: {dropped[0]}"
        raise fault(loaded, "tasks.harbor", message, None, at)
    if dropped:
        import structlog  # takes 80 ms, and few specs read task folders

        log = structlog.get_logger(__name__)
        log.warning("task folders are left out, because they do not run here", count=len(dropped), first=dropped[0])
    return ListRows(rows)
