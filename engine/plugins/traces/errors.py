"""Errors of traces."""

from __future__ import annotations

from engine.errors import EngineError
from engine.schemas.trajectory import Blame


class TraceError(EngineError):
    """Traces cannot be written: a package is missing, or the folder cannot be created."""

    kind = "trace_setup"
    blame: Blame = "spec"
