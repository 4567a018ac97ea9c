"""A local stand-in of the Hugging Face hub's API: data sets, uploads by LFS and commits, with faults on demand."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_standInTokenOfTheTests"


@dataclass
class DataSet:
    """A data set of the stand-in."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return hashlib.sha1(json.dumps(self.commits).encode()).hexdigest()


@dataclass
class Hub:
    """The state of the stand-in."""

    url: str = ""
    sets: dict[str, DataSet] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    """Status by the part of the path at which it is answered: `commit`, `create`, `whoami`, `upload`, `delete`."""
    stored: dict[str, bytes] = field(default_factory=dict)
    """Uploaded objects by their SHA-256."""
    seen: list[str] = field(default_factory=list)
    """The requests, method and path."""


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self, status: int, value: Any = None, **headers: str) -> None:
            data = b"" if value is None else json.dumps(value).encode()
            self.send_response(status)
            for name, text in headers.items():
                self.send_header(name.replace("_", "-"), text)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _handle(self) -> None:
            path, body = self.path.partition("?")[0], self._body()
            hub.seen.append(f"{self.command} {path}")
            for part, status in hub.faults.items():
                if part in path or (part == "delete" and self.command == "DELETE"):
                    return self._answer(status, {"error": f"no {part}"})
            if path.startswith("/upload/"):  # a signed address: no token
                hub.stored[path.rpartition("/")[2]] = body
                return self._answer(200)
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._answer(401, {"error": "Invalid credentials in Authorization header"})
            if path == "/api/whoami-v2":
                return self._answer(200, {"name": "team", "type": "user", "orgs": []})
            if path == "/api/validate-yaml":
                return self._answer(200, {"errors": [], "warnings": []})
            if path == "/api/repos/create":
                return self._create(json.loads(body))
            if path == "/api/repos/delete":
                asked = json.loads(body)
                owner = asked.get("organization") or "team"
                hub.sets.pop(f"{owner}/{asked['name']}", None)
                return self._answer(200, {})
            if path.endswith(".git/info/lfs/objects/batch"):
                return self._batch(json.loads(body))
            parts = path.removeprefix("/api/datasets/").split("/")
            name = "/".join(parts[:2])
            if name not in hub.sets:
                return self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            if len(parts) == 2:
                known = hub.sets[name]
                siblings = [{"rfilename": file} for file in known.files]
                return self._answer(200, {"id": name, "private": known.private, "sha": known.sha, "siblings": siblings})
            if parts[2] == "preupload":
                files = [{**file, "uploadMode": "lfs" if file["path"].endswith(".parquet") else "regular", "shouldIgnore": False}
                         for file in json.loads(body)["files"]]  # fmt: skip
                return self._answer(200, {"files": files})
            if parts[2] == "commit":
                return self._commit(name, body)
            return self._answer(404, {"error": path})

        def _create(self, asked: dict[str, Any]) -> None:
            name = f"{asked.get('organization') or 'team'}/{asked['name']}"
            if name in hub.sets:
                return self._answer(
                    409, {"error": "You already created this dataset repo", "url": f"{hub.url}/datasets/{name}"}
                )
            hub.sets[name] = DataSet(private=asked.get("private", asked.get("visibility") == "private"))
            return self._answer(200, {"url": f"{hub.url}/datasets/{name}", "name": name, "id": name})

        def _batch(self, asked: dict[str, Any]) -> None:
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.url}/upload/{one['oid']}", "header": {}}}}
                for one in asked["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})

        def _commit(self, name: str, body: bytes) -> None:
            known = hub.sets[name]
            lines = [json.loads(line) for line in body.splitlines()]
            head = next(line["value"] for line in lines if line["key"] == "header")
            if head.get("parentCommit") not in (None, known.sha):
                return self._answer(412, {"error": "A commit has happened since"})
            for line in lines:
                value = line["value"]
                if line["key"] == "lfsFile":
                    known.files[value["path"]] = hub.stored[value["oid"]]
                elif line["key"] == "file":
                    known.files[value["path"]] = base64.b64decode(value["content"])
            known.commits.append(head["summary"])
            return self._answer(
                200,
                {"success": True, "commitOid": known.sha, "commitUrl": f"{hub.url}/datasets/{name}/commit/{known.sha}"},
            )

        do_GET = do_POST = do_PUT = do_DELETE = _handle

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def hub_stand_in() -> Iterator[Hub]:
    """A running stand-in on the loopback address."""
    hub = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub)) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
