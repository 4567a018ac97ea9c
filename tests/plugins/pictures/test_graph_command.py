"""`engine graph` draws SVG."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from engine.cli.main import app

SPEC = """\
spec: episode/v1
name: demo
model: {path: org/m}
tasks: {source: inline, rows: [{q: a}]}
machine: tools
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo.yaml").write_text(SPEC)


def engine_graph(*args: str) -> Result:
    return CliRunner().invoke(app, ["graph", "demo.yaml", *args])


def test_a_file_named_svg_holds_svg() -> None:
    result = engine_graph("--out", "pictures/machine.svg")
    assert (result.exit_code, result.output) == (0, "")
    root = ElementTree.parse("pictures/machine.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert engine_graph("--format", "svg").output == Path("pictures/machine.svg").read_text()
    assert engine_graph("--format", "mermaid", "--out", "x.svg").exit_code == 0
    assert Path("x.svg").read_text().startswith("stateDiagram-v2\n")
