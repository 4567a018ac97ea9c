"""The engine without the folder of this plugin."""

from __future__ import annotations

from pathlib import Path

from one_deleted import ROOT, copy_without, engine, python

USERS = (
    "engine.plugins.show.command",
    "engine.plugins.show.show_list",
    "engine.plugins.compare.command",
    "engine.plugins.show.listing.listing",
)


def test_lists_and_other_commands_work_without_it(tmp_path: Path) -> None:
    root = copy_without(["view"], tmp_path / "copy")
    assert python(root, "-c", f"import {', '.join(USERS)}").returncode == 0
    assert engine(root, "--help").returncode == 0
    assert engine(root, "validate", str(ROOT / "specs" / "guess_number.yaml")).returncode == 0
    refused = engine(root, "view", "latest")
    assert refused.returncode == 2
    assert "it belongs to the plugin `view`, which is not installed: pip install" in refused.stderr
