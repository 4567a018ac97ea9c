"""Routed experts of SGLang servers: what is asked for, refused, and kept through branches, resumes and files."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generate_requests import generate_request as request
from sglang_cluster import OUTPUT, Cluster, FakeSGLang, changed, cluster
from written_specs import save_spec

from engine.backends.registry import open_backend
from engine.errors import BackendError
from engine.runner.replay import Replayer
from engine.runner.runner import Runner
from engine.schemas.generation import Generation
from engine.schemas.model import ModelSpec
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore
from engine.store.loader import collate, read_rows
from engine.store.rows.export import export_rows, write_jsonl, write_parquet
from engine.tokens.experts import ExpertLayout, expert_layout
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate

LAYOUT = ExpertLayout(layers=3, top_k=2, experts=8, sparse=(1, 2))
Change = Callable[[np.ndarray], np.ndarray]


def experts(ids: list[int], start: int, layout: ExpertLayout = LAYOUT) -> np.ndarray:
    """Choices that name the token and its position; zeros in layer 0, which is dense."""
    places = np.arange(start, start + len(ids))
    first = (np.array(ids, np.int64) * 5 + places * 3)[:, None] + np.arange(layout.layers)
    chosen = np.stack([(first + place) % layout.experts for place in range(layout.top_k)], -1)
    chosen[:, [layer for layer in range(layout.layers) if layer not in layout.sparse]] = 0
    return chosen


@asynccontextmanager
async def routed(format: ChatTemplate, **spec: Any) -> AsyncIterator[Cluster]:
    async with cluster(format, start=False, layout=LAYOUT, **{"routed_experts": True, **spec}) as it:
        it.fake.experts = experts
        it.fake.keep = True
        await it.backend.start()
        it.fake.calls.clear()
        yield it


def wrong(change: Change) -> Any:
    """A fault: the choices are changed before they are sent."""

    async def fault(call: Any) -> None:
        right = call.server.experts
        call.server.experts = lambda ids, start: change(right(ids, start))
        try:
            call.answer(call.reply())
        finally:
            call.server.experts = right

    return fault


@pytest.fixture(scope="module")
def moe_files(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Path:
    """A tokenizer and the configuration of a model with experts: nothing computes with it here. The template rewrites the first reply."""
    folder = tmp_path_factory.mktemp("moe") / "fake"
    shutil.copytree(tiny_tokenizer_dir, folder)
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": 1000,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
    }
    shown = "{{ message.content | upper if message.role == 'assistant' and loop.index0 == 1 else message.content }}"
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n" + shown + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (folder / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [0], "max_position_embeddings": 4090}))
    return folder


@pytest.fixture(scope="module")
def chat_format(moe_files: Path) -> ChatTemplate:
    return load_format(ModelSpec(path=str(moe_files)), moe_files)


async def test_only_tokens_without_known_experts_are_asked_for(chat_format: ChatTemplate) -> None:
    async with routed(chat_format) as it:
        first = await it.backend.generate(request([1, 22, 333], experts_from=0))
        second = await it.backend.generate(request([1, 22, 333, *OUTPUT, 44], experts_from=7))
        plain = await it.backend.generate(request([1, 22, 333]))
        starts = [json.loads(body).get("routed_experts_start_len") for body in it.fake.calls]
    assert starts == [0, 7, None]
    assert first.routed_experts is not None
    assert first.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(first.routed_experts, experts([1, 22, 333, *OUTPUT[:-1]], 0))
    np.testing.assert_array_equal(second.routed_experts, experts([OUTPUT[-1], 44, *OUTPUT[:-1]], 7))
    assert plain.routed_experts is None


async def test_an_interrupted_reply_has_the_experts_of_each_token_once(chat_format: ChatTemplate) -> None:
    half = {"finish_reason": {"type": "abort", "message": "Aborted"}, "output_ids": [5, 6], "completion_tokens": 2}
    half["output_token_logprobs"] = [[-0.25, 5, None], [-0.5, 6, None]]
    half["weight_versions"] = [{"version": "3", "start": 0, "end": 2}]
    async with routed(chat_format) as it:
        it.fake.faults.append(changed(**half))
        generation = await it.backend.generate(request([1, 22, 333], experts_from=1))
        starts = [json.loads(body)["routed_experts_start_len"] for body in it.fake.calls]
    assert starts == [1, 4]
    assert generation.output_ids.tolist() == [5, 6, *OUTPUT]
    np.testing.assert_array_equal(generation.routed_experts, experts([22, 333, 5, 6, *OUTPUT[:-1]], 1))


async def test_exact_experts_need_cached_prefixes_of_their_own(chat_format: ChatTemplate) -> None:
    """No other episode, and no earlier run, has the same name of prefixes; the turns of an episode have."""
    keys = []
    for _run in range(2):
        async with routed(chat_format, routed_experts="exact") as it:
            for episode in ("a", "b", "a"):
                await it.backend.generate(request([1, 22, 333], episode=episode, experts_from=0))
            keys.append([json.loads(body)["extra_key"] for body in it.fake.calls])
    for first, other, again in keys:
        assert first == again != other
    assert not set(keys[0]) & set(keys[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found[1:], "36 routed experts where 7 tokens × 3 layers × 2"),
        (lambda found: np.zeros_like(found), "one expert twice in one layer"),
        (lambda found: found + 8, r"outside \[0, 8\)"),
        (lambda found: found - 1, r"outside \[0, 8\)"),
    ],
    ids=["too few", "not recorded", "too large", "negative"],
)
async def test_other_experts_than_those_of_the_request_are_refused(
    chat_format: ChatTemplate, change: Change, message: str
) -> None:
    async with routed(chat_format, retries=0) as it:
        it.fake.faults.append(wrong(change))
        with pytest.raises(BackendError, match=message) as caught:
            await it.backend.generate(request([1, 22, 333], experts_from=0))
    assert caught.value.kind == "bad_reply"


async def test_a_server_without_the_flag_is_refused_at_the_start(chat_format: ChatTemplate) -> None:
    async with cluster(chat_format, start=False, routed_experts=True, layout=LAYOUT) as it:
        with pytest.raises(BackendError, match="--enable-return-routed-experts") as caught:
            await it.backend.start()
    assert caught.value.kind == "wrong_server"


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 3}, ExpertLayout(layers=3, top_k=8, experts=128, sparse=(0, 1, 2))),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2},
            ExpertLayout(layers=4, top_k=2, experts=8, sparse=(1,)),
        ),
        ({"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2}, ExpertLayout(layers=2, top_k=2, experts=8, sparse=(0, 1))),
        (
            {"n_routed_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 4, "first_k_dense_replace": 3},
            ExpertLayout(layers=4, top_k=8, experts=256, sparse=(3,)),
        ),
        ({"text_config": {"num_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 1}}, ExpertLayout(layers=1, top_k=1, experts=4, sparse=(0,))),
        ({"num_hidden_layers": 2}, None),
        ({"num_experts": 1, "num_experts_per_tok": 1, "num_hidden_layers": 2}, None),
    ],
)  # fmt: skip
def test_experts_of_a_configuration(config: dict[str, Any], layout: ExpertLayout | None) -> None:
    assert expert_layout(config) == layout


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_go_through_json_unchanged(dtype: Any) -> None:
    found = np.arange(24, dtype=dtype).reshape(4, 3, 2)
    generation = Generation.read(
        {"output_ids": [1], "logprobs": [-1.0], "finish": {"type": "stop"}, "routed_experts": found}
    )
    again = Generation.read_json(generation.json())
    assert again.routed_experts is not None
    assert again.routed_experts.dtype == dtype
    np.testing.assert_array_equal(again.routed_experts, found)


def spec_of(folder: Path, model: Path, url: str) -> Path:
    """Three turns of two tasks; the second turn begins a branch, and the third continues it."""
    spec = {
        "spec": "episode/v1", "name": "routed", "model": {"path": str(model)},
        "backend": {"kind": "sglang", "urls": [url], "routed_experts": True},
        "tasks": {"source": "inline", "rows": [{"id": "a", "answer": "1"}, {"id": "b", "answer": "2"}], "id": "id"},
        "prompt": [{"role": "user", "content": "Say {{id}}."}],
        "user": {"use": "engine.environments.users.attempts:Attempts", "with": {"until": "counted", "attempts": 4, "wrong": "Again.", "grade": "exact"}},
        "machine": {"preset": "retry_with_feedback", "transitions": [
            {"trigger": "truncated", "source": "GENERATING", "dest": "AWAITING_USER_FEEDBACK"}]},
        "limits": {"assistant_turns": 3, "turn_tokens": 24},
    }  # fmt: skip
    return save_spec(folder / "routed.yaml", spec)


async def test_rows_have_the_experts_of_their_tokens_from_the_server_to_the_files(
    moe_files: Path, chat_format: ChatTemplate, tmp_path: Path
) -> None:
    """Through prefix continuation, branches, storage, a resume in the middle, replay and both file formats."""
    form = chat_format
    fake = FakeSGLang(output=[*form.encode("Yes."), 2])
    fake.tokenize, fake.experts = form.encode, experts
    loaded = load_spec(spec_of(tmp_path, moe_files, await fake.start()))
    store = RunStore.create(tmp_path, RunHeader.of(loaded))

    async def answers(call: Any) -> None:
        call.answer(call.reply())

    async def is_killed(call: Any) -> None:
        run.cancel()

    for launch in ("killed", "resumed"):
        backend = open_backend(loaded, form)
        await backend.start()
        fake.faults = [answers, answers, is_killed] if launch == "killed" else []
        run = asyncio.create_task(Runner(loaded, load_tasks(loaded), form, backend, store).run())
        await asyncio.wait([run])
        await backend.close()
        store.close()
        store = RunStore.open(store.folder)
        assert (store.statuses() == {"a/0": "done", "b/0": "done"}) == (launch == "resumed")
    assert sum(entry.record.kind == "generation" for entry in store.journal("a/0")) == 3
    await fake.stop()
    store.close()
    found = RunStore.open(store.folder, readonly=True)
    rows = list(export_rows(found))
    assert [(row["episode_id"], row["branch"]) for row in rows] == [
        (name, at) for name in ("a/0", "b/0") for at in range(2)
    ]
    for row in rows:
        last = int(np.flatnonzero(row["loss_mask"])[-1])
        np.testing.assert_array_equal(row["routed_experts"], experts(row["input_ids"][:last].tolist(), 0))
    replayer = Replayer(loaded, form, found)
    for trajectory in found.trajectories():
        assert (await replayer.check(trajectory, found.task(trajectory.task_id))).difference is None
    replayer.close()
    write_jsonl(iter(rows), tmp_path / "rows.jsonl")
    write_parquet(iter(rows), tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        for row, read in zip(rows, read_rows(tmp_path / name), strict=True):
            assert read["routed_experts"].dtype == np.uint8
            np.testing.assert_array_equal(read["routed_experts"], row["routed_experts"])
    batch = collate(rows)
    assert batch["routed_experts"].shape == (*batch["input_ids"].shape, 3, 2)
    for place, row in zip(batch["routed_experts"].numpy(), rows, strict=True):
        known = len(row["routed_experts"])
        np.testing.assert_array_equal(place[:known], row["routed_experts"])
        assert (place[known:] == -1).all()
