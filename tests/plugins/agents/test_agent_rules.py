"""What requests of agent programs may set is what the backend has, and what a training can compute with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from written_specs import save_spec

from engine.plugins.agents.rules import _CHANGED
from engine.plugins.agents.spec import AllowedParameter
from engine.plugins.agents.wire.fields import SAMPLING
from engine.spec.load import load_spec
from engine.validate import check_spec

OPENAI = {"kind": "openai", "url": "http://127.0.0.1:1/v1", "model": "m"}


@pytest.mark.parametrize(
    ("agent", "changes", "problems"),
    [
        ({"allow": ["stop", "max_tokens", "temperature"], "ignore": ["strict"]}, {}, []),
        ({"allow": ["stop"], "ignore": ["stop"]}, {}, ["`stop` is in `allow` and in `ignore`"]),
        ({"allow": ["top_k", "top_p"]}, {"backend": OPENAI}, ["the `openai` backend does not have `top_k`"]),
        (
            {"allow": ["max_tokens", "temperature"]},
            {"train": {}, "rollout": {"samples_per_task": 2}},
            ["requests may set `temperature`, but the trainer computes log-probs with the spec's `sampling`"],
        ),
    ],
)
def test_what_requests_may_set(
    tmp_path: Path, agent: dict[str, Any], changes: dict[str, Any], problems: list[str]
) -> None:
    document = {
        "spec": "episode/v1",
        "name": "demo",
        "model": {"path": "org/m"},
        "tasks": {"source": "inline", "rows": [{"q": "a"}]},
        "agent": {"run": "true", **agent},
        "machine": "agent",
        **changes,
    }
    path = save_spec(tmp_path / "s.yaml", document)
    assert [item.message for item in check_spec(load_spec(path)) if item.rule == "agent.allow"] == problems


def test_every_parameter_that_may_be_allowed_is_read_and_checked() -> None:
    names = set(get_args(AllowedParameter))
    assert names == set(SAMPLING)
    assert names == {*_CHANGED, "max_tokens"}
