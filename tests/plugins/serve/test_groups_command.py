"""`engine serve SPEC` as a process: the client of docs/rows.md beside a service that is killed, a full disk, tokens and notices."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serve_kit import ROOT, SPEC, TASKS, TOKEN, command, content, unpacked, written
from typer.testing import CliRunner

from engine.cli.main import app
from engine.plugins.serve.client import GroupClient, ServeError
from engine.store import RunStore, list_runs


@pytest.fixture(scope="module", autouse=True)
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One unpacked tokenizer and its chat format for all tests."""
    unpacked(tmp_path_factory.mktemp("tokenizer"))


ONLY = """
import sys
FACES = ('engine.moved_names', 'engine.plugin', 'engine.plugins', 'engine.plugins.serve', 'engine.plugins.serve.client')
class Only:
    def find_spec(self, name, path=None, target=None):
        top = name.partition('.')[0]
        allowed = {'engine', 'httpx', 'pyarrow', 'httpcore', 'h11', 'anyio', 'idna', 'certifi', 'sniffio', 'typing_extensions', 'numpy'}
        if name.startswith('engine.') and name not in FACES:
            raise ImportError('the client imports ' + name)
        if top not in allowed and top not in sys.stdlib_module_names:
            raise ImportError('the client imports ' + name)
sys.meta_path.insert(0, Only())
exec(compile(open(sys.argv[1]).read(), sys.argv[1], 'exec'))
"""


def example(folder: Path, url: str) -> subprocess.Popen[str]:
    section = (ROOT / "docs/rows.md").read_text().split("## A client")[1].split("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    assert len(found[1].splitlines()) <= 20
    (folder / "example.py").write_text(found[1])
    env = os.environ | {"EPISODE_ENGINE_TOKEN": TOKEN, "PYTHONPATH": str(ROOT), "SERVE_URL": url}
    line = [sys.executable, "-u", "-c", ONLY, str(folder / "example.py")]
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True)


HOLD = f"""
import asyncio
from pathlib import Path
from typing import Any
from engine.environments.color_square import Viewer

class Holding(Viewer):
    async def respond(self, view):
        while view.task.id == {TASKS[2]!r} and not Path({{go!r}}).exists():
            await asyncio.sleep(0.01)
        return super().respond(view)
"""
"""A user that does not answer in the third group until there is a file."""


def held(folder: Path, **changes: Any) -> Path:
    """Write the spec with that user; the file that lets it go on."""
    folder.mkdir()
    (folder / "hold.py").write_text(HOLD.format(go=str(folder / "go")))
    limits = SPEC["limits"] | {"episode_seconds": 7200}
    written(folder, user={"use": "hold:Holding", "timeout": 3600}, limits=limits, **changes)
    return folder / "go"


def statuses(folder: Path) -> dict[str, str]:
    with RunStore.open(list_runs(folder / "runs")[0], readonly=True) as store:
        return store.statuses()


@pytest.mark.slow
def test_the_example_of_the_readme_gets_each_group_once_from_a_service_that_is_killed(tmp_path: Path) -> None:
    results = []
    for name in ("calm", "killed"):
        folder = tmp_path / name
        go = held(folder)
        if name == "calm":
            go.touch()
        with command(folder, "spec.yaml", "--ahead", "1") as (process, url):
            client = example(folder, url)
            assert client.stdout is not None
            lines = [client.stdout.readline() for _ in range(2)]
            if name == "killed":
                process.send_signal(signal.SIGKILL)
                process.wait()
                done = {episode for episode, status in statuses(folder).items() if status == "done"}
                assert done == {f"{task}/{sample}" for task in TASKS[:2] for sample in range(3)}
                go.touch()
                port = url.rpartition(":")[2]
                with command(folder, "--resume", "latest", "--port", port, "--ahead", "1") as (again, _):
                    lines += client.stdout.readlines()
                    assert client.wait() == 0
                    again.send_signal(signal.SIGTERM)
                    assert again.wait() == 143
            else:
                lines += client.stdout.readlines()
                assert client.wait() == 0
        results.append(lines)
        assert set(statuses(folder).values()) == {"done"}
    assert sorted(results[0]) == sorted(results[1])
    assert len(results[0]) == len(set(results[0])) == 8


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [("secret", 0o640, "can be read by others: chmod 600"), ("", 0o600, "is empty"), (None, 0, "No such file")],
)
def test_a_token_file_that_cannot_be_used_is_refused(text: str | None, mode: int, words: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    result = CliRunner().invoke(app, ["serve", str(written(tmp_path)), "--token-file", str(file)])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_the_service_with_a_notice_and_a_restart_sends_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "full"
    tell = [sys.executable, "-c", "import sys; open('told', 'a').write(sys.stdin.read() + '\\n')"]
    go = held(folder, notify={"command": tell})
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text("another token\n")
    with command(folder, "spec.yaml", "--ahead", "1", "--token-file", str(secret)) as (process, url):
        with GroupClient(url, TOKEN) as client, pytest.raises(ServeError) as refused:
            client.weights(0)
        assert refused.value.code == "bad_token"
        with GroupClient(url, token_file=secret, patience=60) as client:
            groups = client.groups("one", count=4)
            first = [next(groups), next(groups)]
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            go.touch()
            with pytest.raises(ServeError, match="free space on the disk and resume the run"):
                next(groups)
        assert process.wait() == 1
        assert process.stdout is not None
        said = process.stdout.read()
        assert "To continue: engine serve --resume" in said
        assert "another token" not in said
    (event,) = [json.loads(line) for line in (folder / "told").read_text().splitlines()]
    assert (event["kind"], "free space on the disk" in event["reason"]) == ("failed", True)
    with (
        command(folder, "--resume", "latest", "--token-file", str(secret)) as (_, url),
        GroupClient(url, token_file=secret, patience=60) as client,
    ):
        again = sorted(client.groups("one", count=4), key=lambda group: group.number)
    assert [group.number for group in again] == [0, 1, 2, 3]
    assert content(again[:2]) == content(first)
