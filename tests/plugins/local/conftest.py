"""The local backend: what it builds without validation must be what validation would make of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from validated_structs import structs_validated

if TYPE_CHECKING:
    from engine.plugins.local.backend import LocalBackend


@pytest.fixture(autouse=True)
def _structs_validated() -> Iterator[None]:
    with structs_validated():
        yield


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> Any:
    """The tiny model in transformers, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    """Its tokenizer in transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture
async def opened(tiny_model_dir: Path, tokenizer: Any) -> AsyncIterator[Callable[..., LocalBackend]]:
    """Makes backends on the tiny model, float32, and closes them."""
    from engine.plugins.local.backend import LocalBackend
    from engine.plugins.local.spec import LocalBackendSpec

    made: list[LocalBackend] = []

    def make(max_batch: int = 4, folder: Path = tiny_model_dir, **kwargs: Any) -> LocalBackend:
        kwargs.setdefault("stash_bytes", 1 << 24)
        spec = LocalBackendSpec(max_batch=max_batch, dtype="float32", device="cpu")
        made.append(LocalBackend(lambda: folder, tokenizer.decode, spec, **kwargs))
        return made[-1]

    yield make
    for backend in made:
        await backend.close()
