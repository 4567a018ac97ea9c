"""What other trainers carry of what a spec uses: the table of `capabilities.yaml`, read by `engine validate --trainer`
and by docs/trainers.md.

Nothing here imports a trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from engine.plugins.trainers.check import RULE_OF, uses
from engine.schemas.base import Struct
from engine.spec.text.diagnostic import Diagnostic

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec

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
