"""Exceptions keep their fields when another process sends them, as Ray and process pools do."""

from __future__ import annotations

import pickle

import pytest

from engine.errors import BackendError, ContextOverflow, EngineError, ImageError, SpecError, TrainError
from engine.spec.text.diagnostic import Diagnostic, Origin


@pytest.mark.parametrize(
    "error",
    [
        TrainError("no rows", kind="no_data"),
        BackendError("down", kind="sampler", retryable=True, retry_after=2.0),
        ContextOverflow("too long"),
        ImageError("not a picture", kind="image_unreadable"),
        SpecError([Diagnostic("rule", "error", "wrong", "right", Origin("spec.yaml", 3, 1))]),
        EngineError("a plain one"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_is_the_same_in_another_process(error: EngineError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))
