from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from engine.plugins.doctor.command import models
from engine.tokens.catalogue import MANIFEST

app = typer.Typer()
app.command()(models)


def test_the_list_says_what_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPISODE_ENGINE_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    name = "smollm2-135m-instruct"
    listed = CliRunner().invoke(app)
    assert listed.exit_code == 0
    assert [line.split()[:4] for line in listed.output.splitlines()[1:3]] == [
        [name, "135M", "93", "MB"],
        ["tiny-qwen2_5-vl", "0.35M,", "random", "none"],
    ]
    assert "no: the first run makes it" in listed.output
    assert "no: the first run fetches it" in listed.output
    folder = tmp_path / "models" / name
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    rows = [json.loads(line) for line in CliRunner().invoke(app, ["--json"]).output.splitlines()]
    assert [row["name"] for row in rows] == [name, "tiny-qwen2_5-vl", "tiny-qwen2"]
    assert rows[0] == {
        "name": name,
        "hub_id": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "parameters": "135M",
        "download_mb": 93,
        "licence": "Apache-2.0",
        "cached": str(folder),
    }
