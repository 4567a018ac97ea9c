"""The backend of a spec that names none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from written_specs import save_spec, scripted_spec

from engine.known_plugins import KNOWN
from engine.plugins.local.spec import LocalBackendSpec
from engine.schemas.backend import default_backend
from engine.spec.load import load_spec


def test_it_is_this_one(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    spec = scripted_spec("plain", tiny_tokenizer_dir, ["Done."], tool_calls=None)
    del spec["backend"]
    assert load_spec(save_spec(tmp_path / "plain.yaml", spec)).spec.backend == default_backend() == LocalBackendSpec()


@pytest.mark.parametrize("backend", [{}, {"backend": {"kind": "local"}}])
def test_without_the_plugin_the_error_says_what_to_install(
    backend: dict[str, object], tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    spec = scripted_spec("plain", tiny_tokenizer_dir, ["Done."], tool_calls=None)
    del spec["backend"]
    path = save_spec(tmp_path / "plain.yaml", spec | backend)
    command = [sys.executable, "-m", "engine.cli.main", "validate", str(path)]
    environment = os.environ | {"ENGINE_PLUGINS_OFF": "local"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    shown = " ".join((done.stdout + done.stderr).split())
    assert (done.returncode, shown.count("error[")) == (1, 1), shown
    assert f"it belongs to the plugin `local`, which is not installed: {KNOWN['local']['install'][0]}" in shown
    assert ("`backend` needs `kind`" in shown) == (not backend)
