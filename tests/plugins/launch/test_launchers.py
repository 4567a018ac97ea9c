"""What starts servers is found by the kind of the backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from written_specs import save_spec, scripted_spec

from engine.errors import BackendError
from engine.known_plugins import KNOWN
from engine.plugin import installed
from engine.plugins.launch.servers import ServerProcesses
from engine.plugins.servers.launched import launched_servers
from engine.schemas.backend import ServersSpec
from engine.schemas.sections import used_plugins
from engine.spec.load import LoadedSpec, load_spec
from engine.validate import check_spec


def loaded_with(folder: Path, tokenizer: Path, **backend: Any) -> LoadedSpec:
    plain = scripted_spec("plain", tokenizer, ["Done."], tool_calls=None) | {"machine": "single_turn"}
    return load_spec(save_spec(folder / "spec.yaml", plain | {"backend": backend}))


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_each_kind_has_its_launcher(kind: str, tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    loaded = loaded_with(tmp_path, tiny_tokenizer_dir, kind=kind, launch={"gpus": [0, 1]})
    assert isinstance(loaded.spec.backend, ServersSpec)
    servers = launched_servers(loaded.spec.backend, loaded)
    assert isinstance(servers, ServerProcesses)
    assert len(servers.urls) == 2
    assert "launch" in used_plugins(loaded.spec)


def test_servers_that_run_already_need_no_launcher(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    loaded = loaded_with(tmp_path, tiny_tokenizer_dir, kind="sglang", urls=["http://127.0.0.1:9"])
    assert isinstance(loaded.spec.backend, ServersSpec)
    assert launched_servers(loaded.spec.backend, loaded) is None
    assert used_plugins(loaded.spec) == {"sglang"}


def test_without_the_plugin_a_launch_is_refused_at_its_key(
    tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(installed().plugins, "launch")
    loaded = loaded_with(tmp_path, tiny_tokenizer_dir, kind="sglang", launch={"gpus": 0})
    told = f"it belongs to the plugin `launch`, which is not installed: {KNOWN['launch']['install'][0]}"
    (error,) = [item for item in check_spec(loaded) if item.rule == "backend.no-launcher"]
    assert (error.path, error.fix) == (("backend", "launch"), told)
    assert isinstance(loaded.spec.backend, ServersSpec)
    with pytest.raises(BackendError) as caught:
        launched_servers(loaded.spec.backend, loaded)
    assert (str(caught.value), caught.value.kind) == (
        f"`backend.launch` cannot start `sglang` servers: {told}",
        "launch",
    )


def test_without_the_plugin_several_launches_are_one_error(
    tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = {"kind": "sglang", "launch": {"gpus": 0}}
    user = {"backend": backend, "prompt": [{"role": "system", "content": "Ask."}]}
    plain = scripted_spec("plain", tiny_tokenizer_dir, ["Done."], tool_calls=None)
    loaded = load_spec(save_spec(tmp_path / "spec.yaml", plain | {"backend": backend, "user": user}))
    monkeypatch.delitem(installed().plugins, "launch")
    (error,) = [item for item in check_spec(loaded) if item.rule == "backend.no-launcher"]
    assert error.path == ("backend", "launch")
