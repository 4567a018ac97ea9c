"""Other trainers, which plugins add: what each carries of what a spec uses, `engine validate SPEC --trainer NAME`."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Protocol

from engine import plugin
from engine.errors import EngineError

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec
    from engine.spec.text.diagnostic import Diagnostic


class TrainerFacts(Protocol):
    """What an entry of the point `trainers` names."""

    def findings(self, loaded: LoadedSpec) -> list[Diagnostic]:
        """Return a finding for each thing that the spec uses and the trainer does not carry exactly."""


class TrainerError(EngineError):
    """A trainer that does not exist."""

    kind = "trainer_error"
    blame = "spec"


def trainer_of(name: str) -> TrainerFacts:
    """Return a trainer by its name.

    Raises:
        TrainerError: there is no such trainer, or its plugin is not installed.
    """
    trainers: dict[str, TrainerFacts] = plugin.loaded("trainers")
    if name in trainers:
        return trainers[name]
    near = get_close_matches(name, trainers, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(trainers) or 'none'}"
    raise TrainerError(f"there is no trainer `{name}`; {plugin.missing('trainers', name) or hint}")
