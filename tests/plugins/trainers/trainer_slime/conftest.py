"""A spec, a fake router and slime's arguments."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from slime_kit import (
    document,
    slime_args,
    start_router,
)

from engine.plugins.trainers.slime.rollouts import SlimeEpisodes


@pytest.fixture
def write(tmp_path: Path, tiny_model_dir: Path) -> Callable[..., Path]:
    def make(model: Path | None = None, **changes: Any) -> Path:
        path = tmp_path / "spec.yaml"
        path.write_text(yaml.safe_dump(document(model or tiny_model_dir, **changes)))
        return path

    return make


@pytest.fixture
def router(tiny_model_dir: Path) -> Iterator[Any]:
    fake, stop = start_router(tiny_model_dir)
    yield fake
    stop()


@pytest.fixture
def args(router: Any, write: Callable[..., Path]) -> Iterator[Any]:
    made = slime_args(router.url, write(), rollout_function_path="slime.rollout.sglang_rollout.generate_rollout")
    yield made
    SlimeEpisodes.of(made).stop()


REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if m.role != 'assistant' or loop.last else 'said' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def rewriting(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A model whose template replaces earlier replies, so that an episode of two turns has two rows."""
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "rewriting"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = REWRITING
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(REWRITING)
    return folder


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mpu` of one process, and slime's slicing without context parallelism, which returns its argument."""
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda with_context_parallel: 1)
    core, cp_utils = ModuleType("megatron.core"), ModuleType("slime.backends.megatron_utils.cp_utils")
    core.mpu = mpu  # type: ignore[attr-defined]
    cp_utils.slice_log_prob_with_cp = lambda values, total, response: values  # type: ignore[attr-defined]
    for name in ("megatron", "slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.setitem(sys.modules, "slime.backends.megatron_utils.cp_utils", cp_utils)


@pytest.fixture
def source() -> Path:
    found = os.environ.get("SLIME_SOURCE")
    if not found:
        pytest.skip("SLIME_SOURCE is not set: a checkout of THUDM/slime, commit 624b824a8")
    return Path(found)
