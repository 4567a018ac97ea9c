"""An agent program that opens many connections to the endpoint, without a key and with its own: the other episodes go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_kit import write_spec
from stopping import Resumed

from engine.backends.registry import open_backend
from engine.runner.runner import Runner
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore

FLOOD = """
import pathlib, resource, socket
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
def wait(*names):
    while not all(pathlib.Path(SHARED, name).exists() for name in names):
        time.sleep(0.02)
if TASK["id"] == "a":
    held = []
    for _ in range(1500):
        held.append(socket.create_connection((host, int(port)), timeout=30))
        held[-1].sendall(HEAD.replace("KEY", os.environ["OPENAI_API_KEY"]).encode())
    pathlib.Path(SHARED, "flooded").touch()
    wait("b", "c", "d")
else:
    wait("flooded")
    one = chat(ASK)
    chat(ASK, one, {"role": "user", "content": "Sure?"})
    pathlib.Path(SHARED, TASK["id"]).touch()
if TASK["id"] == "a":
    chat(ASK)
reward(1.0)
"""
HEADS = {
    "silent": "",
    "half a head": "GET /v1/models HTTP/1.1\r\nHost: a\r\nX: ",
    "with its key": "GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer KEY\r\n\r\n",
    "half a body": "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer KEY\r\nContent-Length: 9\r\n\r\n{",
    "half a refused body": "POST /v1/messages HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer KEY\r\nContent-Length: 9\r\n\r\n{",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", HEADS)
async def test_a_program_with_1500_connections_stops_no_other_episode(
    what: str, tmp_path: Path, tiny_tokenizer_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = f"SHARED, HEAD = {str(tmp_path)!r}, {HEADS[what]!r}\n{FLOOD}"
    rows = [{"id": name, "question": "What is 17 plus 25?"} for name in "abcd"]
    spec = Resumed(write_spec(tmp_path, tiny_tokenizer_dir, program, ["It is 42.", "Yes."], tasks={"rows": rows}))
    backend = open_backend(spec.loaded, spec.template)
    await backend.start()
    store = RunStore.create(tmp_path / "runs", RunHeader.of(spec.loaded))
    try:
        await Runner(spec.loaded, load_tasks(spec.loaded), spec.template, backend, store).run()
        episodes = {each.task_id: each for each in store.trajectories()}
    finally:
        await backend.close()
        store.close()
    assert {name: each.outcome.failure for name, each in episodes.items()} == dict.fromkeys("abcd")
    assert {name: len(each.turns) for name, each in episodes.items()} == {"a": 1, "b": 2, "c": 2, "d": 2}
    assert "Traceback" not in "".join(capfd.readouterr())
