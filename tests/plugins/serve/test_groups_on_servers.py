"""Groups over HTTP on a fake SGLang server: sampling overrides on the wire, versions in the middle of a stream, stale groups that run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from serve_kit import TOKEN, ask, read, serving
from sglang_cluster import FakeSGLang
from written_specs import save_spec

from engine.plugins.serve.groups import GroupService
from engine.plugins.serve.http import RouteCall
from engine.schemas.model import ModelSpec
from engine.tokens.loading import load_format

SPEC: dict[str, Any] = {
    "spec": "episode/v1",
    "name": "on-servers",
    "sampling": {"temperature": 1.0, "max_new_tokens": 8},
    "tasks": {"source": "inline", "rows": [{"id": name} for name in "abcd"], "id": "id"},
    "prompt": [{"role": "user", "content": "What is 17 plus 25, {{id}}?"}],
    "machine": "single_turn",
    "rollout": {"samples_per_task": 2, "concurrency": 4},
}


@asynccontextmanager
async def served(folder: Path, tokenizer: Path, **options: Any) -> AsyncIterator[tuple[FakeSGLang, GroupService, str]]:
    """A service over a fake server, whose requests are kept."""
    form = load_format(ModelSpec(path=str(tokenizer)), tokenizer)
    fake = FakeSGLang(output=[5, 6, 7, form.stop_token_ids[0]])
    fake.tokenize, fake.weight_version, fake.model_path = form.encode, "0", tokenizer.name
    url = await fake.start()
    backend = {"kind": "sglang", "urls": [url]}
    path = save_spec(folder / "spec.yaml", {**SPEC, "model": {"path": str(tokenizer)}, "backend": backend})
    try:
        async with serving(path, form, **options) as (service, address):
            fake.keep = True
            yield fake, service, address
    finally:
        await fake.stop()


async def test_an_override_of_the_sampling_reaches_the_server_and_the_rows(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    async with served(tmp_path, tiny_tokenizer_dir) as (fake, _, address):
        lengths = {}
        for name, sampling in (("own", None), ("other", {"temperature": 0.5, "top_k": 7, "max_new_tokens": 2})):
            fake.calls.clear()
            (group,) = await read(address, name, sampling=sampling)
            lengths[name] = group.sums.trained
            sent = [json.loads(body) for body in fake.calls if not json.loads(body)["rid"].startswith("trial")]
            found = {
                tuple(body["sampling_params"].get(key) for key in ("temperature", "top_k", "max_new_tokens"))
                for body in sent
            }
            assert len(sent) == 2
            assert found == {(1.0, None, 8) if sampling is None else (0.5, 7, 2)}
        assert lengths == {"own": 2 * 4, "other": 2 * 2}


async def test_an_override_that_a_server_refuses_is_refused_before_anything_runs(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    async with served(tmp_path, tiny_tokenizer_dir) as (fake, service, address):
        fake.seeded = True  # a server that a request with min_p would end
        status, error = await ask(address, "/groups", {"id": "one", "sampling": {"min_p": 0.1}})
        assert (status, error["code"]) == (400, "bad_sampling")
        assert "ends the whole server" in error["message"]
        assert (service._log.requests, service._open, fake.calls) == ({}, {}, [])


async def test_a_version_that_is_told_in_the_middle_of_a_stream_is_that_of_the_next_group(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    async with served(tmp_path, tiny_tokenizer_dir, ahead=1) as (fake, service, address):
        asked = {"id": "one", "tasks": "next", "count": 3, "version": 0, "sampling": {"temperature": 0.5}}
        stream: Any = await service._post(RouteCall(asked, TOKEN, ""))
        parts = [await anext(stream.parts)]
        fake.weight_version = "1"  # the trainer has pushed its weights
        assert (await ask(address, "/weights", {"version": 1}))[0] == 200
        parts += [part async for part in stream.parts]
        lines = [json.loads(line) for part in parts for line in part.splitlines()]
        groups = [line["group"] for line in lines if "group" in line]
        assert [group["left_out"] for group in groups] == [None] * 3
        assert [group["version"] for group in groups] == [0, 1, 1]
        sampled = {
            row["task_id"]: {
                version for version, mask in zip(row["weight_versions"], row["loss_mask"], strict=True) if mask
            }
            for row in (line["row"] for line in lines if "row" in line)
        }
        assert sampled == {"a": {0}, "b": {1}, "c": {1}}
        assert {json.loads(body)["sampling_params"]["temperature"] for body in fake.calls} == {0.5}


async def test_a_group_that_becomes_stale_while_it_runs_is_cancelled_on_the_server(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    async with served(tmp_path, tiny_tokenizer_dir) as (fake, service, address):
        fake.latency = 3600.0
        work = asyncio.create_task(ask(address, "/groups", {"id": "one", "tasks": ["a"]}))
        while len(fake.running) < 2:  # noqa: ASYNC110  (both episodes sample)
            await asyncio.sleep(0.01)
        running = set(fake.running)
        assert (await ask(address, "/weights", {"version": 1}))[0] == 200
        _, (line, end) = await work
        assert (line["group"]["left_out"], line["group"]["rows"], end) == (
            "stale",
            0,
            {"end": {"groups": 1, "sent": 1}},
        )
        assert (service._runs.running(), service.busy) == (0, False)
        while set(fake.aborted) != running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        fake.latency = 0.0
        fake.weight_version = "1"
        (group,) = await read(address, "two", tasks=["a"], version=1)
        assert (group.task_id, group.version, group.sums.trained) == ("a~1", 1, 8)
