"""docs/plugins.md names every hook, and where its form stands."""

from __future__ import annotations

import re
from pathlib import Path

from engine.plugin import HOOKS

ROOT = Path(__file__).parents[1]


def test_each_hook_is_on_the_page_with_the_module_that_has_it() -> None:
    page = (ROOT / "docs/plugins.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|.*\| `([\w/]+\.py)` \|$", page, re.M)
    named = {hook: module for hooks, module in rows for hook in re.findall(r"`(\w+)`", hooks)}
    assert named.keys() == HOOKS
    assert [hook for hook, module in named.items() if f'Hook("{hook}")' not in (ROOT / module).read_text()] == []
