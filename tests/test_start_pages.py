"""The specs that README.md and the first pages of the documentation print are valid, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

from engine.spec.load import load_spec
from engine.validate import check_spec

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/spec-by-example.md", "docs/first-training.md")
BLOCK = re.compile(r"^```(?:python|yaml)\n# (\S+\.(?:py|yaml))\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_their_specs_are_valid(tmp_path: Path) -> None:
    files = [block for page in PAGES for block in BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))]
    for name, text in files:
        (tmp_path / name).write_text(text, encoding="utf-8")
    specs = [tmp_path / name for name, _ in files if name.endswith(".yaml")]
    assert [spec.stem for spec in specs] == ["guess", "sums", "tool", "user", "rules", "machine", "real", "train"]
    findings = {spec.stem: [item for item in check_spec(load_spec(spec)) if item.severity != "info"] for spec in specs}
    assert {name: [str(item) for item in items] for name, items in findings.items() if items} == {}
