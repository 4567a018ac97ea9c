"""Errors of notices."""

from __future__ import annotations

from engine.errors import EngineError
from engine.schemas.trajectory import Blame


class NoticeError(EngineError):
    """A channel of `notify` cannot work: a variable is not set, or a command or a package is missing."""

    kind = "notice_setup"
    blame: Blame = "spec"
