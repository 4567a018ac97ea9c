"""Servers that a run starts: ready, logs, restarts after a death, and no process left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import process_runs, until, wait_until

from engine.errors import BackendError
from engine.plugins.launch.commands import sglang_servers
from engine.plugins.launch.servers import LaunchedServer, ServerProcesses
from engine.plugins.lora.spec import LoraSpec
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.schemas.backend import LaunchSpec
from engine.schemas.train import TrainSpec

SERVER = """
import http.server, os, subprocess, sys, threading
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", os.getpid(), helper.pid, os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
        if self.path == "/die":
            os._exit(7)
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(code: str = SERVER, gpus: tuple[int, ...] = ()) -> LaunchedServer:
    return LaunchedServer(lambda port: [sys.executable, "-c", code, str(port)], {}, gpus)


def servers(*commands: LaunchedServer, ready_timeout: float = 60, restarts: int = 3) -> ServerProcesses:
    return ServerProcesses(commands or [command()], ready_timeout=ready_timeout, restarts=restarts)


def pids(folder: Path, number: int = 0) -> list[tuple[int, int]]:
    lines = (folder / f"server-{number}.log").read_text().splitlines(keepends=True)
    return [
        (int(line.split()[1]), int(line.split()[2]))
        for line in lines
        if line.startswith("pids") and line.endswith("\n")
    ]


def ask(url: str) -> int:
    return subprocess.run(
        [sys.executable, "-S", "-c", f"import urllib.request; urllib.request.urlopen({url!r})"],
        stderr=subprocess.DEVNULL,
        check=False,
    ).returncode


async def test_servers_answer_after_start_and_leave_no_process_after_close(tmp_path: Path) -> None:
    launched = servers(command(), command())
    await launched.start(tmp_path)
    try:
        assert len(set(launched.urls)) == 2
        assert [ask(f"{url}/health") for url in launched.urls] == [0, 0]
        found = [pid for number in (0, 1) for pid in pids(tmp_path, number)[0]]
        assert all(map(process_runs, found))
        assert [row["alive"] for row in launched.stats()] == [True, True]
    finally:
        await launched.close()
    await until(lambda: not any(map(process_runs, found)))
    assert [row["alive"] for row in launched.stats()] == [False, False]


async def test_a_server_that_ends_while_it_starts_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    launched = servers(command(), command("print('CUDA driver is too old'); raise SystemExit(3)"))
    with pytest.raises(
        BackendError, match=r"status 3 while it started; the end of .*server-1.log:\n(.*\n)*CUDA driver is too old"
    ):
        await launched.start(tmp_path)
    await until(lambda: not pids(tmp_path) or not any(map(process_runs, pids(tmp_path)[0])))


async def test_a_server_that_never_answers_is_an_error_that_names_the_limit(tmp_path: Path) -> None:
    launched = servers(command("import time; time.sleep(600)"), ready_timeout=0.5)
    with pytest.raises(BackendError, match=r"within `launch.ready_timeout` \(0.5 s\)"):
        await launched.start(tmp_path)


async def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    launched = servers(
        command(SERVER.replace("http.server.HTTPServer", "import time; time.sleep(600)\nhttp.server.HTTPServer"))
    )
    starting = asyncio.create_task(launched.start(tmp_path))
    await until(lambda: (tmp_path / "server-0.log").exists() and pids(tmp_path))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: not any(map(process_runs, pids(tmp_path)[0])))


async def test_an_interpreter_that_is_missing_is_an_error(tmp_path: Path) -> None:
    launched = servers(LaunchedServer(lambda port: ["/no/such/python", "-m", "x"], {}, ()))
    with pytest.raises(BackendError, match=r"(?s)status 1 while it started.*/no/such/python"):
        await launched.start(tmp_path)


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("exit", marks=pytest.mark.slow)])
async def test_a_server_that_dies_is_started_again_at_the_same_url(tmp_path: Path, how: str) -> None:
    launched = servers()
    await launched.start(tmp_path)
    try:
        [(pid, helper)] = pids(tmp_path)
        if how == "exit":
            ask(f"{launched.urls[0]}/die")
        else:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: len(pids(tmp_path)) == 2)
        await until(lambda: not process_runs(helper))
        await until(lambda: ask(f"{launched.urls[0]}/health") == 0)
        assert launched.stats()[0]["restarts"] == 1
    finally:
        await launched.close()
    await until(lambda: all(not process_runs(pid) for pair in pids(tmp_path) for pid in pair))


async def test_a_server_that_dies_more_often_than_restarts_stays_out(tmp_path: Path) -> None:
    launched = servers(restarts=0)
    await launched.start(tmp_path)
    try:
        os.kill(pids(tmp_path)[0][0], signal.SIGKILL)
        await until(lambda: launched._watches[0].done())
        assert len(pids(tmp_path)) == 1
        assert not launched.stats()[0]["alive"]
    finally:
        await launched.close()


def test_servers_end_when_the_engine_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
sys.path[:] = {[str(Path(__file__).parent), *sys.path]!r}
from pathlib import Path
from test_launch import servers
async def main():
    await servers().start(Path({str(tmp_path)!r}))
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    engine = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    assert "ready\n" in iter(engine.stdout.readline, "")
    [(pid, helper)] = pids(tmp_path)
    engine.kill()
    engine.wait()
    wait_until(lambda: not process_runs(pid) and not process_runs(helper))


async def test_each_server_sees_its_own_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    launched = servers(command(gpus=(0, 1)), command(gpus=(2, 3)))
    await launched.start(tmp_path)
    try:
        other = servers(command(gpus=(3,)))
        with pytest.raises(BackendError, match=r"GPU 3 of `backend.launch` is used by servers of another backend"):
            await other.start(tmp_path / "other")
    finally:
        await launched.close()
    seen = [(tmp_path / f"server-{number}.log").read_text().splitlines()[-1].split()[-1] for number in (0, 1)]
    assert seen == ["4,5", "6,7"]
    with pytest.raises(BackendError, match=r"names GPU 4, and this process sees 4 \(CUDA_VISIBLE_DEVICES=4,5,6,7\)"):
        await servers(command(gpus=(4,))).start(tmp_path)


def commands(spec: LaunchSpec, train: TrainSpec | None = None) -> list[list[str]]:
    launched = sglang_servers(spec, Path("/model"), train)
    return [list(server.argv(30000)) for server in launched._servers]


def test_commands_name_model_port_and_gpus() -> None:
    spec = LaunchSpec(gpus=[0, 1, 4, 5], tp=2, args=["--mem-fraction-static", "0.8"], python="/sglang/bin/python")
    base = "/sglang/bin/python -m sglang.launch_server --model-path /model --host 127.0.0.1 --port 30000"
    assert commands(spec) == [[*base.split(), "--tp-size", "2", "--mem-fraction-static", "0.8"]] * 2
    gpus = [server.gpus for server in sglang_servers(spec, Path("/model"), None)._servers]
    assert gpus == [(0, 1), (4, 5)]


def test_a_training_with_an_adapter_starts_servers_that_take_it() -> None:
    [argv] = commands(
        LaunchSpec(gpus=1), TrainSpec().with_sections({LoraSpec: LoraSpec(rank=8, target_modules=["q_proj", "v_proj"])})
    )
    assert argv[-6:] == ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "v_proj"]
    [argv] = commands(
        LaunchSpec(gpus=1, args=["--enable-lora", "--max-lora-rank", "64"]),
        TrainSpec().with_sections({LoraSpec: LoraSpec()}),
    )
    assert argv.count("--enable-lora") == 1
    assert argv[-1] == "64"
    [argv] = commands(LaunchSpec(gpus=1), TrainSpec(colocate=True))
    assert argv[-1] == "--enable-memory-saver"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "give `urls`, the servers that run already, or `launch"),
        ({"urls": ["http://a"], "launch": {"gpus": 1}}, "not both"),
        ({"launch": {"gpus": 3, "tp": 2}}, "3 GPUs cannot be divided among servers of `tp: 2`"),
        ({"launch": {"gpus": 0, "tp": 2}}, "`tp: 2` needs GPUs"),
        ({"launch": {"gpus": -1}}, "not -1"),
        ({"launch": {"gpus": [0, 0]}}, "lists each GPU once"),
        ({"launch": {"gpus": 1, "args": ["--port=1"]}}, "the engine itself gives `--port`"),
        ({"launch": {"gpus": 1}, "router": True}, "`router` has no effect on launched servers"),
        ({"launch": {"gpus": 1}, "api_key_env": "KEY"}, "`api_key_env` has no effect on launched servers"),
    ],
)
def test_a_launch_that_cannot_work_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SGLangBackendSpec.model_validate(keys)
