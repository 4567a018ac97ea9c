"""A Ray cluster that the engine starts is of this machine and of this process: nobody else can run code on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import EngineError
from engine.plugins.drivers.cluster import ADDRESS, TOKEN, cluster
from engine.plugins.drivers.session import Setup, prepare_process

HERE = """
import json, os, sys
if {imported}:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray
from engine.plugins.drivers.cluster import _token, cluster

def children(of):
    found = [of]
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = open(f"/proc/{{number}}/stat").read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == of:
            found += children(int(number))
    return found

def listening(processes):
    sockets = set()
    for process in processes:
        try:
            files = os.listdir(f"/proc/{{process}}/fd")
        except OSError:
            continue
        for file in files:
            try:
                sockets.add(os.readlink(f"/proc/{{process}}/fd/{{file}}"))
            except OSError:
                pass
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{{name}}").readlines()[1:]]
    return [words[1].partition(":")[0] for words in lines if words[3] == "0A" and f"socket:[{{words[9]}}]" in sockets]

with cluster(1) as ray:
    @ray.remote
    class Worker:
        def pid(self):
            return os.getpid()
    worker = Worker.remote()
    ray.get(worker.pid.remote())
    found = {{"gcs": ray.get_runtime_context().gcs_address, "addresses": listening(children(os.getpid()))}}
    found |= {{"token": _token(), "here": os.environ.get("RAY_AUTH_TOKEN")}}
    print(json.dumps(found), flush=True)
    sys.stdin.read()
"""
"""Prints what a cluster listens on, and keeps it until its standard input ends."""

CLIENT = """
import sys
import ray
address, path = sys.argv[1:]
ray.init(address=address, logging_level="error", log_to_driver=False)

@ray.remote(num_cpus=0)
def write():
    with open(path, "w") as file:
        file.write("code of a client")

ray.get(write.remote())
"""
ASK = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_put(b"key", b"value", True, b"space")
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, the same in IPv6, and ::1, as /proc/net writes them."""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.parametrize("imported", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_others_cannot_run_code_on_a_cluster_that_the_engine_starts(imported: bool, tmp_path: Path) -> None:
    """Also where Ray was imported before, with authentication turned off. With the token, the same client runs code."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'episode-engine[ray]'")
    root = str(Path(__file__).parents[3])
    outside = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # a client that turns 127.0.0.1 into the address of a network would not reach the cluster at all
    outside |= {"PYTHONPATH": root, "HOME": str(tmp_path), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    command = [sys.executable, "-c", HERE.format(imported=imported)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    clients = []
    with subprocess.Popen(command, env=outside, **pipes) as own:
        assert own.stdout is not None
        try:
            found = json.loads(own.stdout.readline())
            assert set(found["addresses"]) <= LOOPBACK
            assert len(found["addresses"]) >= 4
            assert found["here"] is None
            token = {"RAY_AUTH_MODE": "token", TOKEN: found["token"]}
            for number, keys in enumerate([{}, {"RAY_AUTH_MODE": "disabled"}, token | {TOKEN: "0" * 64}]):
                asked = subprocess.run(
                    [sys.executable, "-c", ASK, found["gcs"]], env=outside | keys, capture_output=True, text=True
                )
                assert asked.returncode != 0
                assert "InvalidAuthToken" in asked.stderr
                words = [sys.executable, "-c", CLIENT, found["gcs"], str(tmp_path / f"stranger-{number}")]
                clients.append(subprocess.Popen(words, env=outside | keys, stderr=subprocess.DEVNULL))
            words = [sys.executable, "-c", CLIENT, found["gcs"], str(tmp_path / "friend")]
            subprocess.run(words, env=outside | token, check=True)
            assert (tmp_path / "friend").read_text() == "code of a client"
            assert list(tmp_path.glob("stranger-*")) == []
        finally:
            for client in clients:
                client.kill()
                client.wait()
            assert own.stdin is not None
            own.stdin.close()


def test_a_ray_that_runs_the_code_of_every_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.50.0 has no tokens: a client without one ran code as the user of the cluster."""
    old = SimpleNamespace(__version__="2.50.0", is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", old)  # type: ignore[arg-type]
    monkeypatch.delenv(ADDRESS, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with (
        pytest.raises(EngineError, match=r"Ray 2.50.0 runs the code of every client.* \(Ray 2.52 or newer\)"),
        cluster(2),
    ):
        pass
    assert (os.environ.get(TOKEN), os.environ["RAY_AUTH_MODE"]) == (None, "disabled")


def test_programs_that_a_driver_starts_do_not_get_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    monkeypatch.chdir(tmp_path)
    given: Any = SimpleNamespace(cwd=str(tmp_path), path=[], environ={})
    setup: Setup = given
    prepare_process(setup)
    assert TOKEN not in os.environ
