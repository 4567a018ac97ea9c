"""The engine without the folder of this plugin."""

from __future__ import annotations

from pathlib import Path

from one_deleted import ROOT, copy_without, engine, python

USERS = (
    "engine.cli.validate.command",
    "engine.validate.examine",
    "engine.plugins.serve.groups",
    "engine.plugins.schema.command",
)


def test_other_commands_work_without_it(tmp_path: Path) -> None:
    root = copy_without(["trainers"], tmp_path / "copy")
    spec = str(ROOT / "specs" / "guess_number.yaml")
    assert python(root, "-c", f"import {', '.join(USERS)}").returncode == 0
    assert engine(root, "validate", spec).returncode == 0
    refused = engine(root, "validate", spec, "--trainer", "verl")
    assert refused.returncode == 2
    assert (
        "there is no trainer `verl`; it belongs to the plugin `trainers`, which is not installed: pip install"
        in " ".join(refused.stderr.replace("│", " ").split())
    )
    old = python(root, "-c", "import engine.integrations.trainers.verl")
    assert "`engine.integrations.trainers` is `engine.plugins.trainers`" in old.stderr
