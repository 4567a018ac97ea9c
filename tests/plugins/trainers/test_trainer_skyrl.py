"""SkyRL's generator without SkyRL: the requests to its client, and what is refused."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripted_sampler import ScriptedSampler
from trainer_kit import FORGETFUL, write_spec

from engine.errors import BackendError, TrainError
from engine.plugins.local.spec import LocalBackendSpec
from engine.plugins.trainers import skyrl
from engine.plugins.trainers.handover import HandedRow
from engine.plugins.trainers.rollouts import TrainerRollouts
from engine.plugins.trainers.skyrl.backend import SkyRLBackend
from engine.plugins.trainers.skyrl.experiment import EngineEpisodes, EngineExperiment, TaskPrompts
from engine.schemas.generation import GenerateRequest, SamplingParams
from engine.tokens.experts import ExpertLayout


class Client(ScriptedSampler):
    """The client's part of the contract."""

    def __init__(self, format: Any) -> None:
        super().__init__(format)
        self.asked: list[tuple[dict[str, Any], str | None]] = []

    async def generate(self, input_batch: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        self.asked.append((input_batch, model))
        params = input_batch["sampling_params"]
        ids, logprobs = self.reply(
            input_batch["session_ids"][0], input_batch["prompt_token_ids"][0], params["max_tokens"]
        )
        return {"response_ids": [ids], "stop_reasons": ["stop"], "response_logprobs": [logprobs]}

    async def finish_session(self, session_id: str) -> None:
        pass


def batch(tasks: list[str | None], phase: str = "train", step: int = 1) -> dict[str, Any]:
    """A GeneratorInput."""
    return {
        "prompts": [[]] * len(tasks),
        "env_extras": [{} if task is None else {"task": task} for task in tasks],
        "batch_metadata": SimpleNamespace(training_phase=phase, global_step=step),
    }


def run(
    spec: Path, folder: Path, given: dict[str, Any], **options: Any
) -> tuple[EngineEpisodes, dict[str, Any], Client]:
    """One call of the generator."""
    rollouts = TrainerRollouts(spec, folder, "skyrl")
    client = Client(rollouts.format)
    generator = EngineEpisodes(rollouts, client, model="policy", **options)

    async def once() -> dict[str, Any]:
        try:
            return await generator.generate(given)
        finally:
            await generator.close()

    return generator, asyncio.run(once()), client


@pytest.mark.slow
@pytest.mark.trainers
def test_requests_and_rows(tmp_path: Path, tiny_model_dir: Path) -> None:
    spec = write_spec(
        tmp_path, tiny_model_dir, sampling={"temperature": 0.5, "top_p": 0.9, "stop": ["#"], "min_new_tokens": 1}
    )
    generator, output, client = run(spec, tmp_path / "out", batch(["t1"] * 4 + ["t0"] * 4))
    asked, model = client.asked[0]
    params = asked["sampling_params"]
    assert model == "policy"
    assert {name: params[name] for name in ("temperature", "top_p", "stop", "min_tokens", "max_tokens", "logprobs")} == {
        "temperature": 0.5, "top_p": 0.9, "stop": ["#"], "min_tokens": 1, "max_tokens": 24, "logprobs": 1,
    }  # fmt: skip
    assert len({asked["sampling_params"]["seed"] for asked, _ in client.asked}) == len(client.asked)
    lengths = [
        len(output[name]) for name in ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs")
    ]
    assert lengths == [8] * 5
    assert output["rewards"] == [row.advantages.tolist() for row in generator.handed]
    assert output["rollout_metrics"]["engine/episodes/count"] == 8
    assert generator.backend.stats()["tokens"] == sum(len(ids) for _, ids, _ in client.sampled)


@pytest.mark.slow
@pytest.mark.trainers
def test_several_rows_are_refused_or_left_out(tmp_path: Path, tiny_model_dir: Path) -> None:
    template = tmp_path / "forgetful.jinja"
    template.write_text(FORGETFUL)
    spec = write_spec(tmp_path, tiny_model_dir, template=template)
    given = batch(["t0"] * 4)
    with pytest.raises(TrainError, match=r"has 2 rows, and SkyRL takes one .*EnginePPOExp\(…, several_rows="):
        run(spec, tmp_path / "refused", given)
    generator, output, _ = run(spec, tmp_path / "left", given, several_rows="leave_out")
    assert generator.metrics["skyrl/empty_rows"] == 4
    assert generator.metrics["skyrl/left_out_tokens"] == generator.metrics["tokens/trained"] > 0
    assert [sum(mask) for mask in output["loss_masks"]] == [0] * 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (batch(["t0"] * 4, phase="eval"), "runs no evaluation"),
        (batch([None] * 4), "a prompt has no task"),
        (batch(["t0"] * 3 + ["t1"]), "not made of groups of 4: .*n_samples_per_prompt"),
        (batch(["t0"] * 3), "not made of groups of 4"),
    ],
)
def test_batches_that_are_no_groups_are_refused(
    tmp_path: Path, tiny_model_dir: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(TrainError, match=said):
        run(write_spec(tmp_path, tiny_model_dir), tmp_path / "out", given)


def test_sums_that_differ_stop_the_training(tmp_path: Path, tiny_model_dir: Path) -> None:
    torch = pytest.importorskip("torch")
    rollouts = TrainerRollouts(write_spec(tmp_path, tiny_model_dir), tmp_path / "out", "skyrl")
    generator = EngineEpisodes(rollouts, None)
    row = HandedRow.empty(1)
    generator.handed = [row]

    class Made(dict[str, Any]):
        metadata: dict[str, int] = {}

    ones = torch.ones(1, 2)
    theirs = Made(sequences=ones, loss_mask=ones * 0, attention_mask=ones, advantages=ones)
    generator.check(theirs)
    theirs["attention_mask"] = torch.ones(1, 1)
    with pytest.raises(TrainError, match="SkyRL's batch is not what the engine handed over"):
        generator.check(theirs)


def test_the_data_set_is_that_of_the_tasks() -> None:
    prompts = TaskPrompts(["a", "b"])
    assert len(prompts) == 2
    assert prompts.collate_fn([prompts[1]]) == [
        {"prompt": [{"role": "user", "content": "b"}], "env_class": None, "env_extras": {"task": "b"}, "uid": "1"}
    ]


def test_the_experts_of_a_reply_begin_where_the_engine_asks() -> None:
    """SkyRL's client gives those of the whole sequence, as lists; a reply without them is an error."""
    experts = [[[token, token + 1]] for token in range(4)]

    class Routing:
        def __init__(self, experts: Any) -> None:
            self.found = {"response_ids": [[4, 9]], "stop_reasons": ["stop"], "response_logprobs": [[-1.0, -1.0]]}
            self.found["rollout_expert_indices"] = experts

        async def generate(self, batch: dict[str, Any], model: str | None = None) -> dict[str, Any]:
            return self.found

    def ask(client: Routing) -> Any:
        backend = SkyRLBackend(client, LocalBackendSpec, context=None, model=None)
        backend.layout = ExpertLayout(layers=1, top_k=2, experts=8, sparse=(0,))
        request = GenerateRequest(
            episode_id="a/0", turn=1, input_ids=np.array([1, 2, 3], np.int32), sampling=SamplingParams(), max_new_tokens=3,
            stop_token_ids=[9], seed=1, experts_from=1,
        )  # fmt: skip
        return asyncio.run(backend.generate(request))

    found = ask(Routing([experts]))
    assert found.routed_experts.tolist() == experts[1:]
    with pytest.raises(BackendError, match="SkyRL's sampler gave no experts where 4 are needed"):
        ask(Routing(None))


def test_an_episode_that_ended_frees_its_session() -> None:
    class Router:
        ended: list[str] = []

        async def finish_session(self, session_id: str) -> None:
            await asyncio.sleep(0)
            self.ended.append(session_id)

    async def main() -> None:
        backend = SkyRLBackend(Router(), LocalBackendSpec, context=None, model=None)
        backend.release("a/0")
        await backend.close()

    asyncio.run(main())
    assert Router.ended == ["a/0"]


@pytest.mark.parametrize("name", ["EnginePPOExp", "EngineGenerator"])
def test_a_missing_skyrl_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "skyrl", None)
    with pytest.raises(TrainError, match=r"SkyRL cannot be imported .*pip install 'episode-engine\[skyrl\]'"):
        getattr(skyrl, name)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = skyrl.Nothing


def test_fewer_tasks_than_a_batch_are_refused(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.plugins.trainers.skyrl.experiment.register_estimator", lambda: None)
    monkeypatch.setattr("engine.plugins.trainers.skyrl.experiment.refuse_settings", lambda cfg, loaded: None)
    cfg = SimpleNamespace(trainer=SimpleNamespace(train_batch_size=6))
    with pytest.raises(TrainError, match=r"train_batch_size is 6, and .* has 5 tasks"):
        EngineExperiment(cfg, write_spec(tmp_path, tiny_model_dir), tmp_path / "out")
