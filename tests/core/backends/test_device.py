"""The device that a spec names: one check for sampler and trainer, and a message that names the key."""

from __future__ import annotations

import pytest
import torch

from engine.backends.device import pick_device
from engine.errors import EngineError


@pytest.mark.parametrize("key", ["backend.device", "train.device"])
def test_what_is_not_a_device_is_refused_by_the_key_that_names_it(key: str) -> None:
    with pytest.raises(EngineError) as caught:
        pick_device("gpu0", key)
    assert str(caught.value) == f"`{key}: gpu0` is not a device; write auto, cpu, cuda or cuda:1"
    assert (caught.value.kind, caught.value.blame) == ("no_device", "spec")


def test_auto_and_cpu_are_always_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto", "backend.device") == pick_device("cpu", "train.device") == torch.device("cpu")
    with pytest.raises(EngineError, match=r"`train\.device: cuda:1`"):
        pick_device("cuda:1", "train.device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto", "backend.device") == torch.device("cuda")
