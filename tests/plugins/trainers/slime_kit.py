"""slime's hooks over a fake router: arguments, a data source and the user of the episodes. Also a plugin of slime's own contract tests.

`pytest -p slime_kit` in slime's folder loads it, with SLIME_KIT_SPEC; it loads transformers before slime's tests put a stand-in there.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from PIL import Image
from sglang_cluster import OUTPUT, Call, FakeSGLang

from engine.plugins.trainers.slime import advantages, convert, generate, generate_rollout
from engine.plugins.trainers.slime.rows import origin_of
from engine.schemas.environment import EpisodeView, UserTurn
from engine.schemas.model import ModelSpec
from engine.schemas.reward import RewardEvent
from engine.store import RunStore
from engine.store.rows.export import export_rows
from engine.tokens.loading import load_format

__all__ = ["advantages", "convert", "generate", "generate_rollout"]
PACKAGE = "engine.plugins.trainers.slime"


class Rising:
    """Pays 1 for the first reply and 2 for the second, and half as much in every second episode."""

    def respond(self, view: EpisodeView) -> UserTurn:
        value = float(view.turn + 1) / (1 + view.seed % 2)
        return UserTurn(content="More.", satisfied=view.turn > 0, rewards=[RewardEvent(value=value, turn="last")])


class FakeRouter(FakeSGLang):
    """A fake server that also answers as the router in front of it."""

    url = ""

    def _other(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/workers":
            return 200, {"workers": [{"url": self.url}]}
        return super()._other(path, body)


class FakeVisionRouter(FakeRouter):
    """A fake router whose server expands the images of a prompt with the model's own processor, as SGLang does."""

    def __init__(self, model: Path, output: list[int]) -> None:
        super().__init__(output=output)
        self._processor = transformers.AutoImageProcessor.from_pretrained(model)
        self._image = int(json.loads((model / "config.json").read_text())["image_token_id"])

    async def _generate(self, call: Call) -> None:
        body = json.loads(call.body)
        if "image_data" not in body:
            await super()._generate(call)
            return
        self.calls.append(call.body)
        sizes = [self._tokens(uri) for uri in body["image_data"]]
        ids = [
            each
            for token in body["input_ids"]
            for each in ([token] * sizes.pop(0) if token == self._image else [token])
        ]
        rows = [[-1.0, token, None] for token in ids]
        said = self.said(ids)
        changes = {"output_ids": said, "output_token_logprobs": [[-0.5, token, None] for token in said]}
        changes |= {"completion_tokens": len(said), "finish_reason": {"type": "stop", "matched": said[-1]}}
        changes |= {"weight_versions": [{"version": self.weight_version, "start": 0, "end": len(said)}]}
        call.answer(call.reply(prompt_token_ids=ids, prompt_tokens=len(ids), input_token_logprobs=rows, **changes))

    def said(self, prompt: list[int]) -> list[int]:
        """The ids of the reply to a prompt, the stop token last."""
        return self.output

    def _tokens(self, uri: str) -> int:
        picture = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB")
        grid = self._processor(images=[picture], return_tensors="np")["image_grid_thw"][0]
        return int(grid.prod()) // self._processor.merge_size**2


def start_router(model: Path, *, vision: bool = False) -> tuple[FakeRouter, Any]:
    """Start a router in a thread of its own; the second value stops it."""
    fake = FakeVisionRouter(model, OUTPUT) if vision else FakeRouter(output=OUTPUT)
    return fake, run_router(fake, model)


def run_router(fake: FakeRouter, model: Path) -> Callable[[], None]:
    """Run a router in a thread of its own, until what is returned is called."""
    fake.tokenize = load_format(ModelSpec(path=str(model)), model).encode
    fake.weight_version, fake.keep = "7", True
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    fake.url = asyncio.run_coroutine_threadsafe(fake.start(), loop).result()

    def stop() -> None:
        asyncio.run_coroutine_threadsafe(fake.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    return stop


def document(model: Path, **changes: Any) -> dict[str, Any]:
    """A spec of two turns, with the tasks of slime's contract tests."""
    return {
        "spec": "episode/v1",
        "name": "slime",
        "model": {"path": str(model)},
        "backend": {"kind": "sglang", "urls": ["http://slime.invalid:1"], "timeout": 20},
        "sampling": {"temperature": 0.3},
        "tasks": {
            "source": "inline",
            "rows": [{"id": name, "say": name} for name in ("prompt", "prompt-0", "prompt-1", "prompt-2")],
            "id": "id",
        },
        "prompt": [{"role": "user", "content": "Say {{say}}."}],
        "user": {"use": "slime_kit:Rising"},
        "machine": "tools_and_user",
        "limits": {"turn_tokens": 6, "assistant_turns": 2, "episode_tokens": 96},
        "rewards": {"credit": {"method": "turn_return", "gamma": 0.5, "baseline": "none"}},
        "rollout": {"samples_per_task": 2, "seed": 3},
        "train": {"tasks_per_step": 2, "dynamic_sampling": False, "rollout_correction": {"kind": "none"}},
    } | changes


def slime_args(url: str, spec: Path, **changes: Any) -> SimpleNamespace:
    """The arguments of slime that the hooks read."""
    host, _, port = url.removeprefix("http://").partition(":")
    given = {
        "engine_spec": str(spec),
        "engine_folder": str(spec.parent / "out"),
        "sglang_router_ip": host,
        "sglang_router_port": port,
        "rollout_function_path": f"{PACKAGE}.generate_rollout",
        "custom_convert_samples_to_train_data_path": f"{PACKAGE}.convert",
        "custom_advantage_function_path": f"{PACKAGE}.advantages",
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "global_batch_size": 4,
        "rollout_temperature": 0.3,
        "eval_datasets": [],
    }
    return SimpleNamespace(**given | changes)


class Status(Enum):
    """As slime's `Sample.Status`."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    FAILED = "failed"


@dataclass
class Sample:
    """The fields of slime's `Sample` that the hooks read and write."""

    prompt: Any = ""
    index: int | None = None
    group_index: int | None = None
    rollout_id: int | None = None
    tokens: list[int] = field(default_factory=list)
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)


Sample.Status = Status  # type: ignore[attr-defined]


# --- what tests compare ----


WHITELIST = [
    *("tokens", "multimodal_train_inputs", "response_lengths", "rewards", "truncated", "loss_masks", "round_number"),
    *("sample_indices", "rollout_ids", "rollout_mask_sums", "rollout_log_probs", "rollout_top_p_token_ids"),
    *(
        "rollout_top_p_token_offsets",
        "rollout_routed_experts",
        "source_names",
        "prompt",
        "teacher_log_probs",
        "raw_reward",
    ),
]
"""The columns that slime's `_split_train_data_by_dp` forwards (624b824a8, slime/ray/rollout.py)."""


def sampled(args: Any, groups: int = 2, size: int = 2) -> list[Any]:
    """Samples of one rollout by the generate function, flat as slime gives them to the converter."""
    given = [Sample(f"prompt-{at}", at * size + each, at) for at in range(groups) for each in range(size)]

    async def run() -> list[Any]:
        return await asyncio.gather(*(generate(args, each, {"temperature": 0.3}) for each in given))

    made: list[Any] = asyncio.run(run())
    return [sample for each in made for sample in (each if isinstance(each, list) else [each])]


def stored(args: Any) -> dict[tuple[int, ...], dict[str, Any]]:
    store = RunStore.open(Path(args.engine_folder) / "rollouts", readonly=True)
    return {(row["task_id"], row["sample_index"], row["branch"]): row for row in export_rows(store)}


def row_of(sample: Any, rows: dict[Any, Any]) -> dict[str, Any]:
    origin = origin_of(sample)
    assert origin is not None
    ended = origin.trajectory
    assert ended is not None
    found: dict[str, Any] = rows[ended.task_id, ended.sample_index, origin.branch]
    return found


def assert_same(samples: list[Any], data: dict[str, Any], rows: dict[Any, Any]) -> None:
    """Samples and converted columns are the stored rows: ids, masks, log-probs, advantages."""
    assert set(data) <= set(WHITELIST)
    assert {len(column) for column in data.values()} == {len(samples)}
    for at, sample in enumerate(samples):
        row = row_of(sample, rows)
        start = len(sample.tokens) - sample.response_length
        assert data["tokens"][at] == row["input_ids"].tolist()
        assert int((row["loss_mask"] == 1).argmax()) == start
        assert data["loss_masks"][at] == row["loss_mask"][start:].tolist()
        assert np.array_equal(np.float32(data["rollout_log_probs"][at]), row["logprobs"][start:])
        assert data["rewards"][at].dtype == torch.float32
        assert np.array_equal(data["rewards"][at].numpy(), row["advantages"][start:])


def arrived(data: dict[str, Any]) -> dict[str, Any]:
    """The columns as a process of the training has them."""
    made = dict(data)
    made["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
    made["tokens"] = [torch.tensor(tokens) for tokens in data["tokens"]]
    made["loss_masks"] = [torch.tensor(mask, dtype=torch.int) for mask in data["loss_masks"]]
    made["rewards"] = [values.clone() for values in data["rewards"]]
    return made


# --- slime's own contract tests: their arguments are stand-ins without slime's values, which are added here --------


class _OneTask:
    """Their data source, with the prompt of a group's first sample on all of them, as slime's has."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def get_samples(self, count: int) -> list[list[Any]]:
        from slime.utils.types import Sample as Theirs

        groups = self._inner.get_samples(count)
        return [
            [Theirs(index=each.index, group_index=at, prompt=f"prompt-{at}") for each in group]
            for at, group in enumerate(groups)
        ]


_STARTED: list[Any] = []


def _completed(args: Any, **changes: Any) -> Any:
    spec = Path(os.environ["SLIME_KIT_SPEC"])
    if not _STARTED:
        _STARTED.append(start_router(Path(yaml.safe_load(spec.read_text())["model"]["path"]))[0])
    made = slime_args(_STARTED[0].url, spec, **changes)
    for name, value in vars(made).items():
        if args is not None and not hasattr(args, name):
            setattr(args, name, value)
    return made if args is None else args


async def contract_generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """`generate` with the arguments that their stand-in lacks."""
    return await generate(_completed(args, rollout_function_path="theirs"), sample, sampling_params)


def contract_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """`generate_rollout` with arguments; their tests give none."""
    spec = Path(os.environ["SLIME_KIT_SPEC"])
    data = spec.parent / "eval.jsonl"
    data.write_text("".join(json.dumps({"task": name}) + "\n" for name in ("prompt-1", "prompt-2")))
    dataset = SimpleNamespace(name="ours", path=str(data), input_key="task", n_samples_per_eval_prompt=1)
    args = _completed(args, eval_datasets=[dataset])
    return generate_rollout(args, rollout_id, None if evaluation else _OneTask(data_source), evaluation)


def contract_convert(args: Any, samples: list[Any]) -> Any:
    """`convert` on samples of the engine: theirs, which no episode made, are refused."""
    from slime.utils.types import Sample as Theirs

    completed = _completed(args, global_batch_size=len(samples))
    made = [Theirs(index=each.index, group_index=900, prompt="prompt-0") for each in samples]

    async def run() -> list[Any]:
        return [await generate(completed, each, {}) for each in made]

    return convert(completed, asyncio.run(run()))
