"""What the endpoint of agent programs costs: `python bench/agent_programs.py [TURNS] [PROGRAMS] [TOKENIZER_FOLDER]`.

1. µs of one request, as the program sees it: to a plain HTTP server in the engine's process that hands the rendered prompt to the backend and
   answers with the text, and to the endpoint, where the request is a turn: attached, sampled, recorded, durable. One program
   sends both kinds in alternating blocks, over connections that stay open; the backend is scripted, so all the time is the engine's. The
   CPU time of the engine's process is that of programs that send one kind.
2. Many programs at once, each a Python process with three turns: wall and CPU seconds, failures, and the memory of the engine and of the processes that guard
   the programs (PSS: shared pages are divided among those that share them).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from engine.backends.backend import Backend
from engine.backends.registry import open_backend
from engine.plugins.agents.connection import Admission, ProgramConnection
from engine.runner.runner import Runner
from engine.schemas.generation import GenerateRequest, SamplingParams
from engine.schemas.message import Message
from engine.schemas.trajectory import Trajectory
from engine.spec.load import LoadedSpec, load_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate

BLOCK = 8
"""Turns of one block, which is a conversation of its own."""
CLIENT = '''
import http.client, json, os, sys, time
def caller(address, key):
    link = http.client.HTTPConnection(address)
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    def call(messages):
        body = json.dumps({"model": "policy", "messages": messages})
        link.request("POST", "/v1/chat/completions", body, headers)
        reply = link.getresponse()
        answer = json.loads(reply.read())
        assert reply.status == 200, answer
        return answer["choices"][0]["message"]
    return call
chat = caller(os.environ["OPENAI_BASE_URL"].split("/")[2], os.environ["OPENAI_API_KEY"])
def talk(call, turns, name=""):
    """Microseconds of each turn of a conversation that grows."""
    messages, found = [], []
    for at in range(turns):
        messages.append({"role": "user", "content": f"What is {at} plus 25 {name}? Answer with the number."})
        began = time.perf_counter()
        messages.append(call(messages))
        found.append((time.perf_counter() - began) * 1e6)
    return found
def reward(value):
    with open(os.environ["EPISODE_REWARD_FILE"], "w") as file:
        file.write(str(value))
'''
TIMED = """
plain = caller(os.environ["PLAIN"], "none")
talk(chat, 1)
times = [[] for _ in KINDS]
for block in range(BLOCKS):
    for found, call in zip(times, KINDS):
        found += talk(call, TURNS, block)
json.dump(times, open("times.json", "w"))
reward(1)
"""


def loaded(folder: Path, tokenizer: str, program: str, tasks: int, **changes: Any) -> LoadedSpec:
    """A spec with a program."""
    (folder / "program.py").write_text(CLIENT + program)
    spec = {
        "spec": "episode/v1",
        "name": "agents",
        "model": {"path": tokenizer},
        "backend": {"kind": "scripted", "replies": "script.json"},
        "tasks": {"source": "inline", "rows": [{"id": f"t{at}"} for at in range(tasks)], "id": "id"},
        "agent": {"run": f"exec {sys.executable} -S program.py", "timeout": "10m", **changes},
        "machine": "agent",
        "limits": {"assistant_turns": 100_000, "turn_tokens": 100},
        "rollout": {"concurrency": tasks, "live_episodes": tasks},
    }
    (folder / "script.json").write_text(json.dumps({"replies": ["It is 42."], "exhausted": "cycle"}))
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    return load_spec(folder / "spec.yaml")


async def run(spec: LoadedSpec, form: ChatTemplate, backend: Backend, out: Path) -> list[Trajectory]:
    """Run all episodes of a spec."""
    store = RunStore.create(out, RunHeader.of(spec))
    try:
        await Runner(spec, load_tasks(spec), form, backend, store).run()
        return list(store.trajectories())
    finally:
        store.close()


async def plain_server(form: ChatTemplate, backend: Backend) -> asyncio.Server:
    """A server that renders the messages, samples, and answers with the text."""

    admission = Admission()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = ProgramConnection(reader, writer, admission, "bench")
        while await connection.head() is not None:
            body = json.loads(await connection.body())
            messages = [Message(role=each["role"], content=each["content"]) for each in body["messages"]]
            request = GenerateRequest(
                episode_id="t0/0",
                turn=0,
                input_ids=np.asarray(form.render(messages), np.int32),
                sampling=SamplingParams(),
                max_new_tokens=100,
                stop_token_ids=sorted(form.stop_token_ids),
                seed=0,
            )
            text = form.decode((await backend.generate(request)).output_ids[:-1])
            await connection.json(200, {"choices": [{"message": {"role": "assistant", "content": text}}]})

    return await asyncio.start_server(serve, "127.0.0.1", 0)


async def time_turns(folder: Path, tokenizer: str, turns: int) -> None:
    """Print the first table."""
    spec = loaded(folder, tokenizer, "", 1)
    form = load_format(spec.spec.model, spec.base)
    backend = open_backend(spec, form)
    await backend.start()
    server = await plain_server(form, backend)
    host, port = server.sockets[0].getsockname()[:2]
    address, blocks = {"PLAIN": f"{host}:{port}"}, max(1, turns // BLOCK)
    times, cpu = {}, {}
    for kinds in (
        "chat",
        "plain",
        "chat",
        "plain, chat",
    ):  # the first warms up; the next two give CPU, the last one wall time
        program = TIMED.replace("BLOCKS", str(blocks)).replace("TURNS", str(BLOCK)).replace("KINDS", f"[{kinds}]")
        spec = loaded(folder, tokenizer, program, 1, env=address)
        before = time.process_time()
        [trajectory] = await run(spec, form, backend, folder / "timed")
        cpu[kinds] = (time.process_time() - before) / (blocks * BLOCK) * 1e6
        assert trajectory.outcome.failure is None, trajectory.outcome.failure
        times = json.loads((folder / "times.json").read_text())
    server.close()
    found = {"program, wall": [float(np.median(each)) for each in times], "engine, CPU": [cpu["plain"], cpu["chat"]]}
    print(
        f"| µs of a turn, {blocks * BLOCK} turns each | plain request | endpoint | added | ratio |\n|---|---|---|---|---|"
    )
    for name, (plain, endpoint) in found.items():
        print(f"| {name} | {plain:.0f} | {endpoint:.0f} | {endpoint - plain:.0f} | {endpoint / plain:.2f} |")
    print()


def memory(children_of: int) -> dict[str, float]:
    """MB (PSS) of the engine, of the keeper with its guards, and of the programs."""
    parents, names = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            pid = int(path.name)
            parents[pid] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            names[pid] = (path / "cmdline").read_text()
        except OSError:
            continue

    def below(pid: int) -> bool:
        while pid in parents and pid != children_of:
            pid = parents[pid]
        return pid == children_of

    found = {"engine": 0.0, "guards": 0.0, "programs": 0.0}
    for pid, name in names.items():
        if below(pid):
            kind = "engine" if pid == children_of else "guards" if "keeper.py" in name else "programs"
            try:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            found[kind] += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) / 1024
    return found


async def many(folder: Path, tokenizer: str, programs: int) -> None:
    """Print the second table."""
    spec = loaded(folder, tokenizer, "talk(chat, 3)\ntime.sleep(1)\nreward(1)\n", programs)
    form = load_format(spec.spec.model, spec.base)
    backend = open_backend(spec, form)
    await backend.start()
    most, over = memory(os.getpid()), threading.Event()
    alone = most["engine"]

    def watch() -> None:
        while not over.wait(2.0):
            for kind, value in memory(os.getpid()).items():
                most[kind] = max(most[kind], value)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, before = time.perf_counter(), os.times()
    trajectories = await run(spec, form, backend, folder / "many")
    wall, after = time.perf_counter() - began, os.times()
    over.set()
    watcher.join()
    failed = sum(each.outcome.failure is not None for each in trajectories)
    print(
        "| programs | failures | turns | wall s | engine CPU s | engine MB, before and most | guards MB | programs MB |\n|---|---|---|---|---|---|---|---|"
    )
    turns = sum(len(each.turns) for each in trajectories)
    cpu = after.user + after.system - before.user - before.system
    print(
        f"| {len(trajectories)} | {failed} | {turns} | {wall:.1f} | {cpu:.1f} | {alone:.0f}, {most['engine']:.0f} | {most['guards']:.0f} | {most['programs']:.0f} |"
    )
    assert failed == 0


def main() -> None:
    """Measure and print two tables."""
    turns, programs = (int(sys.argv[at]) if len(sys.argv) > at else value for at, value in ((1, 500), (2, 256)))
    tokenizer = sys.argv[3] if len(sys.argv) > 3 else "tiny-qwen2"
    with tempfile.TemporaryDirectory() as name:
        if turns:
            asyncio.run(time_turns(Path(name), tokenizer, turns))
        if programs:
            asyncio.run(many(Path(name), tokenizer, programs))


if __name__ == "__main__":
    main()
