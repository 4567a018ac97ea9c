"""Which tools an episode was shown: one line for a run whose episodes share them."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from engine.errors import StoreError
from engine.store.tool_schemas import FILE, ToolSchemas

ADD, READ = {"name": "add"}, {"name": "read"}


def test_shared_tools_are_written_once_and_others_for_their_episode(tmp_path: Path) -> None:
    schemas = ToolSchemas(tmp_path)
    for number, tools in enumerate([[ADD], [ADD], [READ], [], [ADD]]):
        schemas.note(f"t{number}/0", tools)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == stat.S_IRUSR | stat.S_IWUSR
    before = (tmp_path / FILE).read_bytes()
    again = ToolSchemas(tmp_path)
    for each in (schemas, again):
        assert [json.loads(each.of(f"t{n}/0") or "null") for n in range(5)] == [[ADD], [ADD], [READ], None, [ADD]]
    again.note("t2/0", [READ])
    assert (tmp_path / FILE).read_bytes() == before
    again.note("t2/0", [ADD])  # the episode began again, and its code has changed
    assert ToolSchemas(tmp_path).of("t2/0") == again.of("t2/0") == json.dumps([ADD], separators=(",", ":"))


@pytest.mark.parametrize("end", range(-45, 0, 9))
def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path, end: int) -> None:
    schemas = ToolSchemas(tmp_path)
    schemas.note("a/0", [ADD])
    schemas.note("b/0", [READ])
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:end])
    schemas = ToolSchemas(tmp_path)
    schemas.note("b/0", [READ])
    schemas.note("c/0", [])
    again = ToolSchemas(tmp_path)
    assert [again.of(f"{name}/0") for name in "abc"] == ['[{"name":"add"}]', '[{"name":"read"}]', ""]


def test_a_run_without_the_file_has_no_tools(tmp_path: Path) -> None:
    assert ToolSchemas(tmp_path).of("a/0") == ""
    with pytest.raises(StoreError, match="cannot be written"):
        ToolSchemas(tmp_path / "gone").note("a/0", [ADD])


def test_lines_of_some_episodes_give_the_same_tools(tmp_path: Path) -> None:
    schemas = ToolSchemas(tmp_path)
    schemas.note("a", [{"name": "add"}])
    schemas.note("b", [{"name": "find"}])
    schemas.note("c", [])
    read = ToolSchemas(tmp_path, schemas.lines(["b", "d"]))
    assert [read.of(each) for each in "abd"] == ['[{"name":"add"}]', '[{"name":"find"}]', '[{"name":"add"}]']
    assert ToolSchemas(tmp_path, schemas.lines("c")).of("c") == ""
    assert ToolSchemas(tmp_path / "none").lines("a") == []
