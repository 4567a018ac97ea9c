"""Episodes on the real vLLM server: ids in both directions, log-probs that the trainer recomputes, seeds, refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command_line import engine_apart
from generate_requests import generate_request
from written_specs import TALKS_ON_WHEN_CUT, save_spec

from engine.errors import BackendError
from engine.plugins.local.spec import LocalBackendSpec
from engine.plugins.vllm.client import VLLMBackend
from engine.plugins.vllm.spec import VLLMBackendSpec
from engine.schemas.generation import SamplingParams
from engine.schemas.model import ModelSpec
from engine.schemas.train import TrainSpec
from engine.store import RunStore
from engine.store.rows.export import training_rows
from engine.store.rows.row import TrainingRow
from engine.tokens.loading import load_format
from engine.train.policy import Policy
from engine.train.verify import recompute

TRAIN = Path(__file__).parents[3] / "core" / "train"
TEMPERATURE = 0.7


def write_spec(folder: Path, model: Path, backend: dict[str, Any], **changes: Any) -> Path:
    spec: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "served",
        "model": {"path": str(model)},
        "backend": backend,
        "sampling": {"temperature": TEMPERATURE},
        "tasks": {"source": "inline", "rows": [{"id": "a", "n": 17}, {"id": "b", "n": 25}], "id": "id"},
        "prompt": [{"role": "user", "content": "What is {{n}} plus 25?"}],
        "user": {"use": "code_for_training:Listener"},
        "machine": TALKS_ON_WHEN_CUT,
        "limits": {"turn_tokens": 24, "assistant_turns": 3},
        "rollout": {"seed": 3, "samples_per_task": 3},
    }  # fmt: skip
    return save_spec(folder / "spec.yaml", spec | changes)


def run(spec: Path, out: Path) -> tuple[Path, str]:
    """Run a spec by the command. Returns the run's folder and what the command printed."""
    done = engine_apart("run", spec, "--out", out, modules=[TRAIN])
    (folder,) = out.iterdir()
    return folder, " ".join((done.stdout + done.stderr).split())


def rows_of(folder: Path) -> list[TrainingRow]:
    with RunStore.open(folder, readonly=True) as store:
        return list(training_rows(store))


def test_episodes_of_several_turns_are_exact(vllm_url: str, served_model: Path, tmp_path: Path) -> None:
    """Each prompt equals the one that the server used, and the trainer computes the log-probs of each sampled token again."""
    spec = write_spec(tmp_path, served_model, {"kind": "vllm", "urls": [vllm_url]})
    folder, said = run(spec, tmp_path / "first")
    with RunStore.open(folder, readonly=True) as store:
        turns = sum(len(trajectory.turns) for trajectory in store.trajectories())
    assert turns > 6
    assert f"Certificate: {turns} prompts compared with the prompt that the server used, 0 differ, 0 could not" in said
    rows = rows_of(folder)
    assert len(rows) == 6
    format = load_format(ModelSpec(path=str(served_model)), served_model)
    policy = Policy.load(
        served_model, TrainSpec(device="cpu"), temperature=TEMPERATURE, vocab=format.vocab_size, vision=None
    )
    found = recompute(policy, rows)
    assert found.tokens == sum(len(row.places) for row in rows) > 100
    assert found.largest < 1e-4
    again = rows_of(run(spec, tmp_path / "second")[0])  # the same seeds
    for row, other in zip(rows, again, strict=True):
        np.testing.assert_array_equal(row.branch.input_ids, other.branch.input_ids)


async def test_greedy_tokens_are_those_of_transformers(vllm_url: str, served_model: Path) -> None:
    from engine.plugins.local.backend import LocalBackend

    greedy, model = SamplingParams(temperature=0.0), ModelSpec(path=str(served_model))
    format = load_format(model, served_model)
    loaded: Any = SimpleNamespace(
        spec=SimpleNamespace(sampling=greedy, model=model), base=served_model, path=served_model
    )
    local = LocalBackend.open(LocalBackendSpec(device="cpu", dtype="float32"), format, loaded)
    remote = VLLMBackend(VLLMBackendSpec(urls=[vllm_url]), format, sampling=greedy, model=str(served_model))
    await local.start()
    await remote.start()
    try:
        ids = format.encode("<|im_start|>user\nWhat is 17 plus 25?<|im_end|>\n<|im_start|>assistant\n")
        request = generate_request(ids, greedy, max_new_tokens=48)
        here, there = await asyncio.gather(local.generate(request), remote.generate(request))
    finally:
        await local.close()
        await remote.close()
    assert here.output_ids.tolist() == there.output_ids.tolist()
    np.testing.assert_allclose(here.logprobs, there.logprobs, atol=1e-4)


async def test_sampling_that_its_log_probs_do_not_fit_is_refused_at_the_start(
    vllm_url: str, served_model: Path
) -> None:
    """A server that reports log-probs after top-p is found out at the start."""
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    format = load_format(ModelSpec(path=str(served_model)), served_model)
    backend = VLLMBackend(VLLMBackendSpec(urls=[vllm_url]), format, sampling=sampling, model=str(served_model))
    with pytest.raises(BackendError, match="start it without --logprobs-mode processed_logprobs"):
        await backend.start()
    await backend.close()
