"""A service of groups over a scripted spec: in this process, and as a command."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from shipped_tokenizers import unpack
from written_specs import save_spec

from engine.backends.registry import open_backend
from engine.environments.color_square import problems
from engine.plugins.agents.server import server_of_loop
from engine.plugins.serve.client import Group, GroupClient
from engine.plugins.serve.groups import GroupService
from engine.runner.runner import Runner
from engine.schemas.model import ModelSpec
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore, list_runs
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate

ROOT = Path(__file__).parents[3]
TOKEN = "a secret token"
SPEC: dict[str, Any] = {
    "spec": "episode/v1",
    "name": "served",
    "model": {"path": "qwen2_5_vl"},
    "tasks": {
        "source": "python",
        "use": "engine.environments.color_square:problems",
        "with": {"count": 6, "seed": 3, "turns": 2, "size": 56},
        "id": "id",
    },
    "environment": {"use": "engine.environments.color_square:ColorSquare", "effects": "pure"},
    "user": {"use": "engine.environments.color_square:Viewer"},
    "machine": "retry_with_feedback",
    "limits": {"assistant_turns": 2, "user_turns": 2},
    "rollout": {"samples_per_task": 3, "concurrency": 4},
    "backend": {"kind": "scripted", "replies": "replies.yaml"},
}
TASKS = [row["id"] for row in problems(count=6, seed=3, turns=2, size=56)]
REPLIES = {
    "cases": [
        {"task": TASKS, "sample": 1, "replies": ["green", "blue"]},
        {"task": TASKS, "sample": 2, "replies": ["red", "yellow"]},
    ],
    "replies": ["blue", "red"],
}


TOKENIZER: dict[str, Path] = {}
FORMAT: dict[str, ChatTemplate] = {}


def unpacked(folder: Path) -> None:
    """Unpack the tokenizer, once for all tests of a process."""
    if not TOKENIZER:
        TOKENIZER["folder"] = unpack("qwen2_5_vl", folder)
        FORMAT["format"] = load_format(ModelSpec(path=str(TOKENIZER["folder"])), TOKENIZER["folder"])


def written(folder: Path, **changes: Any) -> Path:
    (folder / "replies.yaml").write_text(yaml.safe_dump(REPLIES))
    changes = {"model": {"path": str(TOKENIZER["folder"])}} | changes
    return save_spec(folder / "spec.yaml", SPEC | changes)


@asynccontextmanager
async def serving(
    path: Path, form: ChatTemplate | None = None, halted: list[BaseException] | None = None, **options: Any
) -> AsyncIterator[tuple[GroupService, str]]:
    """The service of a spec over the run beside it, and its address."""
    out, loaded = path.parent / "runs", load_spec(path)
    runs = list_runs(out) if out.exists() else []
    store = RunStore.open(runs[0]) if runs else RunStore.create(out, RunHeader.of(loaded))
    form, tasks = form or FORMAT["format"], load_tasks(loaded)
    backend = open_backend(loaded, form)
    await backend.start()
    runner = Runner(loaded, tasks, form, backend, store, keep_going=True, training=True)
    halted = [] if halted is None else halted
    try:
        async with runner.serving():
            service = GroupService(loaded, tasks, form, backend, store, runner, TOKEN, halted.append, **options)
            address = await server_of_loop().listen("127.0.0.1", 0, service.service.answer)
            try:
                yield service, address
            finally:
                await service.close()
                await server_of_loop().stop_listening()
    finally:
        await backend.close()
        store.close()


async def read(address: str, id: str, **asked: Any) -> list[Group]:
    """All groups of a request, by number."""

    def work() -> list[Group]:
        with GroupClient(address, TOKEN, patience=30) as client:
            return sorted(client.groups(id, **asked), key=lambda group: group.number)

    return await asyncio.to_thread(work)


async def ask(address: str, path: str, body: Any, token: str = TOKEN) -> tuple[int, Any]:
    async with httpx.AsyncClient(base_url=address, timeout=None, trust_env=False) as http:
        reply = await http.post(path, content=json.dumps(body), headers={"authorization": f"Bearer {token}"})
    lines = reply.text.splitlines()
    return reply.status_code, [json.loads(line) for line in lines] if reply.status_code == 200 else reply.json()[
        "error"
    ]


def content(groups: list[Group]) -> list[Any]:
    keys = ("episode_id", "branch", "input_ids", "loss_mask", "logprobs", "weight_versions", "advantages", "image_data")
    return [[{key: row[key] for key in keys} for row in group.batch.to_pylist()] for group in groups]


@contextmanager
def command(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`engine serve`; its process and address."""
    env = os.environ | {"EPISODE_ENGINE_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "engine.cli.main", "serve", "--quiet", *arguments]
    process = subprocess.Popen(line, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for text in process.stdout:
            lines.append(text)
            if found := re.match(r"Serving \S+ at (http://\S+);", text):
                break
        else:
            raise AssertionError("".join(lines))
        assert TOKEN not in "".join(lines)
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
