"""What services are made from, outside of a run."""

from __future__ import annotations

from typing import Any

from engine.actions.calling.workers import Workers
from engine.actions.services import ServiceInputs
from engine.backends.backend import Backend
from engine.backends.slots import Slots
from engine.spec.load import LoadedSpec
from engine.tokens.template import ChatTemplate


def service_inputs(loaded: LoadedSpec, template: ChatTemplate, backend: Backend, **others: Any) -> ServiceInputs:
    """The inputs of a run with four generation slots."""
    return ServiceInputs(loaded=loaded, template=template, code=Workers(), backend=backend, slots=Slots(4), **others)
