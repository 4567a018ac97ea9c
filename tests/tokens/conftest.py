"""Chat formats on real tokenizers, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_kit import TEMPLATES, make_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a tokenizer for each of TEMPLATES."""
    return {name: make_tokenizer(tmp_path_factory.mktemp(name), text) for name, text in TEMPLATES.items()}


@pytest.fixture(scope="session")
def formats(tokenizer_dirs: dict[str, Path]) -> Any:
    """`formats(template, **model)`: the chat format of one of TEMPLATES; made once for each combination."""
    from engine.schemas.model import ModelSpec
    from engine.tokens.format import ChatFormat, load_format

    made: dict[str, ChatFormat] = {}

    def get(template: str, **model: Any) -> ChatFormat:
        key = f"{template} {sorted(model.items())}"
        if key not in made:
            made[key] = load_format(ModelSpec(path=str(tokenizer_dirs[template]), **model), Path())
        return made[key]

    return get
