"""Every YAML block of docs/data.md with an adapter is valid, and runs where its library is installed.

Blocks that show only the keys of an adapter are completed with a model, tasks and a prompt.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from adapters_kit import earned, run_spec, shown
from slow_cases import slow_but_each
from test_adapter_verl import ITEM, row, write
from test_harbor import COMMAND, needs_sandbox, write_task
from typer.testing import CliRunner

from engine.cli.main import app
from engine.schemas.entry import ADAPTERS, TOOL_ADAPTERS

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "data.md"
SERVER = """\
import os

try:
    from mcp.server.mcpserver import MCPServer as Server
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server

server = Server("blocks")


@server.tool()
def search(query: str) -> str:
    '''Search.'''
    return f"{query}: {len(os.environ['API_KEY'])}"


@server.tool()
def other() -> str:
    '''Is not in `only`.'''
    return ""


server.run("stdio")
"""


def adapters_of(document: Mapping[str, Any]) -> list[str]:
    """The adapters that a document names."""
    owners = [document.get("environment") or {}, *(document.get("tools") or [])]
    return [owner["adapter"] for owner in owners if "adapter" in owner]


def blocks() -> dict[str, dict[str, Any]]:
    """The blocks of the page with an adapter, by adapter and number."""
    found: dict[str, dict[str, Any]] = {}
    for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        document = yaml.safe_load(text) if "adapter: " in text else {}
        for adapter in adapters_of(document)[:1]:
            number = sum(name.startswith(adapter) for name in found)
            found[f"{adapter}_{number}"] = document
    return found


BLOCKS = blocks()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the blocks name; environments and data of other projects have stand-ins of the same form."""
    write(tmp_path, [ITEM], [row()])
    (tmp_path / "tools.yaml").rename(tmp_path / "gsm8k_tool_config.yaml")
    geo3k = {"problem": "<image>What is 8 / 15?", "answer": "8/15", "images": ["https://example.org/1.png"]}
    for data, content in (("geo3k_imgurl_processed", geo3k), ("gsm8k_multi_turn", row())):
        (tmp_path / data).mkdir()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([content]), tmp_path / data / "train.parquet")
    shutil.copy(HERE / "env_count.py", tmp_path / "env_count.py")
    shutil.copy(HERE / "env_vf.py", tmp_path / "my_env.py")
    (tmp_path / "server.py").write_text(SERVER)
    write_task(tmp_path / "tasks/sum")
    example = tmp_path / "slime" / "examples" / "geo3k_vlm_multi_turn"
    example.mkdir(parents=True)
    shutil.copy(HERE / "env_count.py", example / "env_geo3k.py")
    monkeypatch.setenv("API_KEY", "secret-of-the-test")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # its `python`
    return tmp_path


def completed(block: Mapping[str, Any], tokenizer: Path, replies: list[str], **changes: Any) -> dict[str, Any]:
    """A whole spec of a block."""
    return {
        "spec": "episode/v1",
        "name": "block",
        "tasks": {"source": "inline", "rows": [{"id": "a", "question": "Why?", "label": 7}], "id": "id"},
        "prompt": [{"role": "user", "content": "Begin."}],
        "machine": "step",
        **block,
        "model": {"path": str(tokenizer), "tool_calls": "plain", "tool_role": "user"},
        "backend": {"kind": "scripted", "replies": replies},
        **changes,
    }


def test_every_adapter_has_a_block() -> None:
    named = {name for block in BLOCKS.values() for name in adapters_of(block)}
    assert named == {*ADAPTERS.of_plugins(), *TOOL_ADAPTERS.of_plugins()}


@pytest.mark.parametrize("name", slow_but_each(2, BLOCKS))
def test_a_block_is_valid(folder: Path, tiny_tokenizer_dir: Path, name: str) -> None:
    """As it is printed: with its own model, backend and tasks, where it has them."""
    block = BLOCKS[name]
    own = {key: block[key] for key in ("model", "backend") if key in block}
    document = completed(block, tiny_tokenizer_dir, ["x"], **own)
    if "preset" in document["tasks"] or "spec" in block:
        del document["prompt"]
    (folder / "block.yaml").write_text(yaml.safe_dump(document))
    result = CliRunner().invoke(app, ["validate", str(folder / "block.yaml")])
    assert result.exit_code == 0, result.output
    assert "error[" not in result.output


@pytest.mark.slow  # by default: test_adapter_slime
def test_slime_runs(folder: Path, tiny_tokenizer_dir: Path) -> None:
    (episode,) = run_spec(
        folder, completed(BLOCKS["slime_0"], tiny_tokenizer_dir, ["one", "two", "three", "four"])
    ).values()
    assert episode.outcome.failure is None
    assert len(shown(episode)) >= 1


@pytest.mark.adapters
@pytest.mark.skipif(find_spec("gymnasium") is None, reason="needs the extra `gymnasium`")
def test_gymnasium_runs(folder: Path, tiny_tokenizer_dir: Path) -> None:
    document = completed(BLOCKS["gymnasium_0"], tiny_tokenizer_dir, ["down", "up"], limits={"assistant_turns": 2})
    episodes = run_spec(folder, document)
    assert len(episodes) == 2
    assert all(episode.outcome.failure is None and "FFF" in shown(episode)[0] for episode in episodes.values())


@pytest.mark.slow
@pytest.mark.skipif("VISGYM_SOURCE" not in os.environ, reason="set VISGYM_SOURCE to a checkout of VisGym")
def test_visgym_builds_and_shows_its_prompt(folder: Path, tiny_tokenizer_dir: Path) -> None:
    """With text alone: a picture needs a vision model (`tests/plugins/adapters/test_gymnasium_frames.py`)."""
    (folder / "VisGym").symlink_to(os.environ["VISGYM_SOURCE"])
    block = BLOCKS["gymnasium_1"]
    environment = {**block["environment"], "with": {**block["environment"]["with"], "show": "observation"}}
    document = completed(
        block, tiny_tokenizer_dir, ["('move', 0)"], environment=environment, limits={"assistant_turns": 1}
    )
    (episode,) = run_spec(folder, document).values()
    assert episode.outcome.failure is None
    assert "maze" in shown(episode)[0]


@pytest.mark.adapters
@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs the extra `reasoning-gym`")
def test_reasoning_gym_runs(folder: Path, tiny_tokenizer_dir: Path) -> None:
    block = BLOCKS["reasoning_gym_0"]
    tasks = {**block["tasks"], "limit": 2}
    document = completed(block, tiny_tokenizer_dir, ["<answer>-1</answer>"] * 3, tasks=tasks)
    episodes = run_spec(folder, document)
    assert [len(episode.turns) for episode in episodes.values()] == [3, 3]
    assert all(earned(episode)[1:] == [0.0, 0.0] for episode in episodes.values())


@pytest.mark.adapters
@pytest.mark.skipif(find_spec("mcp") is None, reason="needs the extra `mcp`")
def test_mcp_runs(folder: Path, tiny_tokenizer_dir: Path) -> None:
    """The server that is a command. It gets the variable, and the model only sees the tool of `only`."""
    tool = BLOCKS["mcp_0"]["tools"][0]
    document = completed(
        BLOCKS["mcp_0"], tiny_tokenizer_dir, ['<call>search(query="tea")</call>', "Done."], tools=[tool]
    )
    (episode,) = run_spec(folder, document).values()
    assert episode.outcome.failure is None
    assert episode.messages[2].text == f"tea: {len('secret-of-the-test')}"


@needs_sandbox
@pytest.mark.slow  # by default: tests/plugins/harbor/test_harbor.py
def test_harbor_runs(folder: Path, tiny_tokenizer_dir: Path) -> None:
    document = completed(BLOCKS["harbor_0"], tiny_tokenizer_dir, [f"<call>shell({COMMAND!r})</call>", "Done."])
    (episode,) = run_spec(folder, document).values()
    assert (episode.outcome.failure, episode.outcome.reward) == (None, 1.0)
