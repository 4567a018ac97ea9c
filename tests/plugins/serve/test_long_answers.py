"""An answer over HTTP does not repeat a long body."""

from __future__ import annotations

import pytest

from engine.plugins.agents.wire.requests import ApiError
from engine.plugins.serve.http import ServiceError
from engine.terminal import MAX_LINE


@pytest.mark.parametrize("fault", [ServiceError, ApiError])
def test_an_answer_over_http_does_not_repeat_a_long_body(fault: type[ServiceError | ApiError]) -> None:
    words = f"`model` is {'x' * 6000!r}; write `policy`"
    made = ServiceError(400, words, "bad") if fault is ServiceError else ApiError(words)
    assert made.message.startswith("`model` is 'xxx")
    assert made.message.endswith("xxx'; write `policy`")
    assert len(made.message) <= MAX_LINE
