"""Rows with images as data sets publish them: bytes in Parquet, paths beside the data, URLs and data: URIs."""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from vision_code import FIRST, SECOND

from engine.runner.replay import Replayer
from engine.storable import stored_fields
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format

ROW = {"prompt": {"field": "messages"}, "machine": "single_turn"}
URI = f"data:image/png;base64,{b64encode(SECOND).decode()}"


class _Handler(BaseHTTPRequestHandler):
    seen: list[str] = []

    def do_GET(self) -> None:
        type(self).seen.append(self.path)
        known = self.path in ("/a.png", "/late.png")
        status = 503 if self.path == "/late.png" and self.seen.count(self.path) == 1 else 200 if known else 404
        self.send_response(status)
        self.end_headers()
        self.wfile.write(FIRST if status == 200 else b"no")

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    _Handler.seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def row(*images: Any) -> dict[str, Any]:
    marks = " and ".join("<image>" for _ in images)
    return {"id": "a", "messages": [{"role": "user", "content": f"What colour is {marks}?"}], "images": list(images)}


async def test_images_of_a_parquet_file(make_spec: Any, run_spec: Any, tmp_path: Path) -> None:
    """Before, such a row ended the run: `cannot be written down: invalid utf-8`."""
    rows = [row({"bytes": FIRST, "path": "1.png"}, {"bytes": SECOND, "path": None})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    tasks = {"source": "parquet", "path": "rows.parquet", "id": "id"}
    ran = await run_spec(make_spec("qwen3_vl", ["red and blue"], tasks=tasks, **ROW))
    trajectory = ran.only
    assert trajectory.outcome.failure is None
    assert [image.image for image in trajectory.branches[0].images] == [digest_of(FIRST), digest_of(SECOND)]
    assert ran.store.image(digest_of(SECOND)).data == SECOND
    assert ran.store.task("a").fields["images"] == [digest_of(FIRST), digest_of(SECOND)]  # not the bytes once more
    replayer = Replayer(ran.loaded, load_format(ran.loaded.spec.model, ran.loaded.base), ran.store)
    found = await replayer.check(trajectory, ran.store.task("a"))
    replayer.close()
    assert found.difference is None


async def test_paths_urls_and_data_uris(make_spec: Any, run_spec: Any, tmp_path: Path, url: str) -> None:
    """A path is relative to the file of rows. A server that fails once is asked again."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "1.png").write_bytes(SECOND)
    images = ["1.png", f"{url}/a.png", f"{url}/late.png", URI, (data / "1.png").as_uri()]
    (data / "rows.jsonl").write_text(json.dumps(row(*images)))
    tasks = {"source": "jsonl", "path": "data/rows.jsonl", "id": "id"}
    ran = await run_spec(make_spec("qwen3_vl", ["blue"], tasks=tasks, **ROW))
    assert ran.only.outcome.failure is None
    shown = [image.image for message in ran.only.messages for image in message.images]
    first, second = digest_of(FIRST), digest_of(SECOND)
    assert shown == [second, first, first, second, second]
    assert _Handler.seen == ["/a.png", "/late.png", "/late.png"]


async def test_an_image_that_is_not_there_fails_its_episode(make_spec: Any, run_spec: Any, url: str) -> None:
    rows = [row(f"{url}/none.png") | {"id": "a"}, row("none.png") | {"id": "b"}, row(URI) | {"id": "c"}]
    tasks = {"source": "inline", "rows": rows, "id": "id"}
    ran = await run_spec(make_spec("qwen3_vl", ["blue", "blue", "blue"], tasks=tasks, **ROW))
    failures = {key: trajectory.outcome.failure for key, trajectory in ran.trajectories.items()}
    assert failures["c/0"] is None
    assert [(failures[key].kind, failures[key].blame) for key in ("a/0", "b/0")] == [("image_unreadable", "spec")] * 2
    assert failures["a/0"].message.endswith("none.png cannot be read: the server replies 404 Not Found")
    assert _Handler.seen == ["/none.png"]


async def test_urls_in_answers_are_never_requested(make_spec: Any, run_spec: Any, url: str) -> None:
    """A tool may repeat the policy's words: its URL would let the policy send requests."""
    call = {"tool_calls": [{"name": "show", "arguments": {"url": f"{url}/a.png"}}]}
    changes = {
        "tools": [{"use": "url_tool:show"}],
        "machine": "tools",
        "prompt": [{"role": "user", "content": "Look."}],
    }
    path = make_spec("qwen3_vl", [call, "red"], limits={"turn_tokens": 128}, **changes)
    (path.parent / "url_tool.py").write_text(
        "from engine.schemas.environment import ToolReply\nfrom engine.schemas.message import image_part\n\n"
        "def show(url: str) -> ToolReply:\n    return ToolReply(content=[image_part(url)])\n"
    )
    ran = await run_spec(path)
    assert ran.only.outcome.failure.blame == "tool"
    assert _Handler.seen == []


def test_stored_fields_name_images_by_digest() -> None:
    fields = {"images": [URI, "1.png"], "deep": {"image": URI}, "text": "data:image/png;base64,???", "n": 1}
    second = digest_of(SECOND)
    assert stored_fields(fields) == {**fields, "images": [second, "1.png"], "deep": {"image": second}}
