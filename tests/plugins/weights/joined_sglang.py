"""A stand-in for SGLang's server that joins the trainer's process group and receives broadcasts with torch's gloo, as
`init_custom_process_group` and `receive_weights_from_distributed` of SGLang 0.5.23 do. Its checks of the order of calls are those of SGLang's
source: a wrong one is answered `success: false`, as there, and noted in `wrong`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from fake_sglang import FakeSGLang
from sglang_cluster import OUTPUT

dist: Any = distributed


class JoinedSGLang(FakeSGLang):
    """A server of `ranks` tensor-parallel processes, which are threads here."""

    def __init__(self, ranks: int = 1, **facts: Any) -> None:
        super().__init__(output=OUTPUT)
        self.facts = {"tp_size": ranks, "device": "cpu"} | facts
        self.groups: dict[str, list[Any]] = {}
        self.session = False
        self.weights: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
        """What each process was sent since the session began."""
        self.wrong: list[str] = []
        self.paths: list[str] = []
        """Calls of pushes, in order."""
        self.hang_at: int | None = None
        """Number of the broadcast that is not received: the server hangs from there on."""
        self.hang_after: int | None = None
        """Number of the broadcast that is received, and not answered: the server hangs while it loads."""
        self.refuse: str | None = None
        """Path that is refused, every time."""
        self.broadcasts = 0

    async def handle(self, connection: Any, path: str, body: bytes) -> None:
        known = {
            "/init_weights_update_group": self._init,
            "/destroy_weights_update_group": self._destroy,
            "/update_weights_from_distributed": self._receive,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
        }.get(path)
        if self.hung:
            return
        if known is None:
            await super().handle(connection, path, body)
            return
        self.paths.append(path)
        told = json.loads(body)
        message = "refused" if self.refuse == path else await known(told)
        if self.hung:
            return
        if (
            message is not None
            and self.refuse is None
            and path not in ("/end_weight_update", "/destroy_weights_update_group")
        ):
            self.wrong.append(f"{path}: {message}")
        data = json.dumps({"success": message is None, "message": message or "ok"}).encode()
        connection.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (400 if message else 200, len(data), data))

    def _other(self, path: str, body: bytes) -> tuple[int, Any]:
        status, reply = super()._other(path, body)
        return (status, reply | self.facts) if path == "/server_info" else (status, reply)

    async def _init(self, told: dict[str, Any]) -> str | None:
        name = told["group_name"]
        if name in self.groups:
            return f"the group {name!r} exists"  # torch refuses a name twice
        world = told["world_size"]

        def join(rank: int) -> Any:
            store = dist.TCPStore(told["master_address"], told["master_port"], world, False, timedelta(seconds=20))
            for prefix in (name, f"{name}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            return dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=20))

        ranks = [told["rank_offset"] + number for number in range(self.facts["tp_size"])]
        try:
            self.groups[name] = await asyncio.gather(*(asyncio.to_thread(join, rank) for rank in ranks))
        except RuntimeError as error:
            return f"Failed to initialize custom process group: {error}."
        return None

    async def _destroy(self, told: dict[str, Any]) -> str | None:
        if self.groups.pop(told["group_name"], None) is None:
            return "The group to be destroyed does not exist."
        return None

    async def _begin(self, told: dict[str, Any]) -> str | None:
        if self.session:
            return "a weight-update session is already open; call end_weight_update() first"
        self.session = True
        self.weights = [{} for _ in self.weights]
        return None

    async def _end(self, told: dict[str, Any]) -> str | None:
        if not self.session:
            return "no weight-update session is open; call begin_weight_update() first"
        self.session = False
        return None

    async def _receive(self, told: dict[str, Any]) -> str | None:
        self.broadcasts += 1
        if self.broadcasts == self.hang_at:
            self.hung = True
            return None
        if not self.session:
            return "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
        if told["group_name"] not in self.groups:
            return f"Failed to receive weights: Group {told['group_name']} not in {list(self.groups)}."
        if not self.paused:
            self.wrong.append("weights while it samples")

        def receive(group: Any) -> dict[str, torch.Tensor]:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            found, works = {}, []
            for name, dtype, shape in zip(told["names"], told["dtypes"], told["shapes"], strict=True):
                found[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                works.append(group.broadcast([found[name]], options))
            for work in works:
                work.wait()
            return found

        try:
            parts = await asyncio.gather(
                *(asyncio.to_thread(receive, each) for each in self.groups[told["group_name"]])
            )
        except RuntimeError as error:
            return f"Failed to receive weights: {error}"
        if self.broadcasts == self.hang_after:
            self.hung = True
            return None
        for weights, part in zip(self.weights, parts, strict=True):
            weights |= part
        self.weight_version = told.get("weight_version", self.weight_version)
        return None

    async def revive(self) -> None:
        """Go on after `hang_at` or `hang_after`, as a process that was stopped and continues."""
        self.hung, self.hang_at, self.hang_after = False, None, None

    async def stop(self) -> None:
        with suppress(RuntimeError):
            self.groups.clear()
        await super().stop()
