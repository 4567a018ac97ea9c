"""The notebooks of examples/notebooks run from beginning to end, show progress in one output, and are stored without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from installed_plugins import needs_plugin
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples/notebooks").glob("*.ipynb"))


@needs_plugin("local")
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, 4)  # type: ignore[no-untyped-call]
    assert not any(cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (cell,) = (cell for cell in notebook.cells if "engine.run(" in cell.source or "engine.fit(" in cell.source)
    shown = {output.output_type: output.data for output in cell.outputs if output.output_type != "stream"}
    assert "loading tiny-qwen2 …" in shown["display_data"]["text/plain"]
    assert "vowels-" in shown["execute_result"]["text/plain"]
