"""A driver has its part of the limits of chat APIs."""

from __future__ import annotations

from pathlib import Path

from written_specs import save_spec

from engine.plugins.drivers.session import of_driver
from engine.spec.load import load_spec


def test_the_limits_of_all_backends_and_of_worker_processes_are_those_of_the_whole_run(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    api = {"kind": "openai", "url": "http://127.0.0.1:9", "model": "m", "requests_per_minute": 100}
    path = save_spec(
        tmp_path / "spec.yaml",
        {
            "spec": "episode/v1",
            "name": "limits",
            "model": {"path": str(tiny_tokenizer_dir)},
            "backend": api | {"tokens_per_minute": 9000},
            "tasks": {"source": "inline", "rows": [{"id": "a", "workers": 7}], "id": "id"},
            "prompt": [{"role": "user", "content": "2 + 2?"}],
            "user": {
                "model": {"path": str(tiny_tokenizer_dir)},
                "prompt": [{"role": "user", "content": "Judge it."}],
                "backend": api,
            },
            "tools": [{"use": "engine.environments.tools:calculator", "isolation": {"mode": "process", "workers": 8}}],
            "rollout": {"drivers": 3},
        },
    )
    found = of_driver(load_spec(path), 3, 0).spec.model_dump()
    assert (found["backend"]["requests_per_minute"], found["backend"]["tokens_per_minute"]) == (34, 3000)
    assert found["user"]["backend"]["requests_per_minute"] == 34
    assert found["tools"][0]["isolation"]["workers"] == 3
    assert found["tasks"]["rows"] == [{"id": "a", "workers": 7}]
