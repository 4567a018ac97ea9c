"""Classes of trainers that an adapter extends are those of the tested version, or the import says what differs."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

from engine.errors import TrainError
from engine.plugins.trainers import library
from engine.plugins.trainers.library import check_overrides, late_subclass, overrides


class Base:
    """Stands for a trainer's class."""

    def __init__(self, config: Any, extra: Any = None) -> None: ...

    def step(self, batch: Any, *rest: Any, **more: Any) -> None: ...

    def log(self) -> None: ...


def adapter(**parameters: str) -> type:
    """Stands for an adapter's class: overridden methods with their parameters, and two of its own."""

    def method(self: Any, *args: Any) -> None: ...

    class Adapter:
        def close(self) -> None: ...

    for name in {"step": None} | parameters:
        made = FunctionType(method.__code__, {})
        setattr(Adapter, name, overrides(parameters[name])(made) if name in parameters else made)
    return Adapter


def test_methods_as_they_were_tested_pass() -> None:
    check_overrides(adapter(step="batch, *rest, **more"), Base, "verl")


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"step": "batch, *rest"}, "`Base.step` has the parameters (batch, *rest, **more) and not (batch, *rest)"),
        ({"step": "batch, *rest, **more", "_step": "batch"}, "`Base._step` is missing"),
        ({"step": "batch, *rest, **more", "__init__": "config"}, "`Base.__init__` has the parameters (config, extra)"),
        ({}, "`Base.step` has the name of a method of the adapter"),
    ],
)
def test_what_differs_is_named_with_both_versions(
    parameters: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "version", lambda name: "0.9.7")
    with pytest.raises(TrainError) as caught:
        check_overrides(adapter(**parameters), Base, "verl")
    assert said in str(caught.value)
    assert str(caught.value).startswith("the adapter was tested with verl 0.9.1 and does not fit verl 0.9.7: ")
    assert str(caught.value).endswith("; pip install 'verl==0.9.1'")
    assert caught.value.kind == "train_setup"


@pytest.mark.parametrize(("installed", "warned"), [("0.9.1", False), ("0.9.2", True)])
def test_a_version_that_was_not_tested_is_logged(
    installed: str, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "version", lambda name: installed)
    check_overrides(adapter(step="batch, *rest, **more"), Base, "verl")
    assert ("the adapter was tested with another version" in "".join(capsys.readouterr())) is warned


def _without(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(trainer, "_compute_loss")


def _with_more(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_prepare_inputs", lambda self, generation_batch, step: generation_batch)


def _with_own(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_images", lambda self: {}, raising=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without, "`GRPOTrainer._compute_loss` is missing"),
        (
            _with_more,
            r"`GRPOTrainer._prepare_inputs` has the parameters \(generation_batch, step\) and not \(generation_batch\)",
        ),
        (_with_own, "`GRPOTrainer._images` has the name of a method of the adapter"),
    ],
)
def test_another_trl_is_refused_at_import(
    change: Callable[[Any, pytest.MonkeyPatch], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl = pytest.importorskip("trl")
    from engine.plugins.trainers import trl as adapter

    assert adapter.EngineGRPOTrainer is adapter.EngineGRPOTrainer
    late_subclass.cache_clear()
    try:
        with monkeypatch.context() as changed:
            change(trl.GRPOTrainer, changed)
            with pytest.raises(TrainError, match=said):
                _ = adapter.EngineGRPOTrainer
    finally:
        late_subclass.cache_clear()
    assert adapter.EngineGRPOTrainer.__name__ == "EngineGRPOTrainer"
