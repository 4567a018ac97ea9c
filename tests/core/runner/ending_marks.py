"""The marks of those cases of endings.py that need a plugin. Not in that file: scripts without tests/kit import it too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from installed_plugins import needs_plugin

MARKS = {case: [needs_plugin("roles")] for case in ("a judge", "a user that a model plays")}


def marked(params: Iterable[Any]) -> list[Any]:
    """The parameters, whose first value is a case, with the marks of the case."""
    return [
        pytest.param(*param.values, id=param.id, marks=[*param.marks, *MARKS.get(param.values[0], ())])
        for param in params
    ]
