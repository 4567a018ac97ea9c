"""verl's V1 trainer on episodes of the engine: real configuration, TransferQueue on a local Ray, and trainer; only the servers are replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from verl_python import config_of, run_verl
from written_specs import TALKS_ON_WHEN_CUT, save_spec

from engine.errors import BackendError, TrainError
from engine.plugins.local.spec import LocalBackendSpec
from engine.plugins.trainers.backend import unsupported
from engine.plugins.trainers.verl.backend import VerlBackend, context_of, sampling_params, versions_of
from engine.plugins.trainers.verl.manager import EngineManager, write_tasks
from engine.plugins.trainers.verl.rows import IMAGES, TAGS, check_rows, refuse_foreign
from engine.plugins.trainers.verl.settings import SHARED, WITHOUT_EFFECT, refuse_loop_settings, refuse_settings
from engine.schemas.generation import GenerateRequest, SamplingParams
from engine.spec.load import load_spec
from engine.store import RunStore
from engine.store.rows.export import export_rows
from engine.tokens.vision_families import QwenFamily, TiledFamily

ROOT = Path(__file__).parents[3]


def verl_step(*words: str) -> Any:
    """What tests/kit/verl_training.py prints."""
    return run_verl(ROOT / "tests" / "kit" / "verl_training.py", *words)


@pytest.fixture
def make(tmp_path: Path, tiny_model_dir: Path) -> Callable[..., str]:
    """Write a spec of two tasks, three samples and two turns, with what the test changes."""

    def write(**changes: Any) -> str:
        spec: dict[str, Any] = {
            "spec": "episode/v1",
            "name": "verl",
            "model": {"path": str(tiny_model_dir)},
            "backend": {"kind": "local"},
            "tasks": {"source": "inline", "rows": [{"id": "t0", "say": "a"}, {"id": "t1", "say": "b"}], "id": "id"},
            "prompt": [{"role": "user", "content": "Say {{say}}."}],
            "user": {"use": "code_for_training:Listener"},
            "machine": TALKS_ON_WHEN_CUT,
            "limits": {"turn_tokens": 6, "assistant_turns": 2, "episode_tokens": 64},
            "rewards": {"credit": {"method": "turn_return", "gamma": 0.5}},
            "rollout": {"samples_per_task": 3, "seed": 3},
            "train": {"tasks_per_step": 2, "rollout_correction": {"kind": "none"}, "dynamic_sampling": False},
        }
        path = save_spec(tmp_path / "spec.yaml", spec | changes)
        return str(path)

    return write


def request(**changes: Any) -> GenerateRequest:
    given: dict[str, Any] = {
        "episode_id": "t/0",
        "turn": 0,
        "input_ids": np.arange(5, dtype=np.int32),
        "sampling": SamplingParams(temperature=0.5, top_p=0.9, stop=["x"]),
        "max_new_tokens": 3,
        "stop_token_ids": [9, 2],
        "seed": 1,
    }
    return GenerateRequest(**given | changes)


class Client:
    """Gives one prepared reply."""

    def __init__(self, **changes: Any) -> None:
        extra = {"global_steps": 7, "min_global_steps": 5, "max_global_steps": 7}
        self.reply = SimpleNamespace(
            **{"token_ids": [4, 2], "log_probs": [-1.0, -0.5], "stop_reason": "completed", "extra_fields": extra}
            | {"routed_experts": None}
            | changes
        )

    async def generate(self, request_id: str, **_: Any) -> Any:
        return self.reply


def backend_of(**changes: Any) -> VerlBackend:
    return VerlBackend(Client(**changes), LocalBackendSpec, context=100)


def test_a_request_has_the_names_that_both_servers_take() -> None:
    assert sampling_params(request()) == {
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["x"],
        "max_new_tokens": 3,
        "stop_token_ids": [2, 9],
        "logprobs": True,
    }
    assert unsupported(SamplingParams(top_k=3, regex="a"), SHARED) == ["regex"]
    assert "regex" not in SHARED


async def test_a_reply_keeps_ids_and_logprobs_and_its_oldest_version() -> None:
    backend = backend_of()
    found = await backend.generate(request())
    assert (found.output_ids.tolist(), found.logprobs.tolist()) == ([4, 2], [-1.0, -0.5])
    assert [(span.version, span.start, span.end) for span in found.versions] == [(5, 0, 2)]
    assert (found.finish.type, found.finish.matched) == ("stop", 2)
    assert backend.stats() == {"requests": 1, "tokens": 2, "collapsed_versions": 1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"log_probs": None}, "gave 2 tokens, no log-probs and 2 weight versions"),
        ({"log_probs": [-1.0]}, "gave 2 tokens, 1 log-probs and 2 weight versions"),
        ({"stop_reason": "aborted"}, "aborted the request"),
        ({"extra_fields": {}}, "gave no weight version"),
    ],
)
async def test_replies_that_are_not_exact_are_errors(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BackendError, match=said):
        await backend_of(**changes).generate(request())


async def test_a_prompt_as_long_as_the_context_is_an_overflow() -> None:
    with pytest.raises(BackendError, match="the prompt has 100 tokens; verl's sampler takes 100"):
        await backend_of().generate(request(input_ids=np.zeros(100, np.int32)))


async def test_what_verl_is_not_asked_for_is_an_error() -> None:
    with pytest.raises(
        BackendError, match="does not send to verl's sampler: a LoRA adapter or the base model, the experts that"
    ):
        await backend_of().generate(request(base_model=True, experts_from=0))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"token_ids": [4, 5], "stop_reason": "completed"}, "stop"),
        ({"token_ids": [4, 5], "stop_reason": "length"}, "length"),
        ({"token_ids": [4, 5, 6], "log_probs": [-1.0] * 3, "stop_reason": "completed"}, "length"),
    ],
)
async def test_a_reply_that_was_cut_is_known_also_where_the_server_does_not_say_it(changes: Any, kind: str) -> None:
    found = await backend_of(**changes).generate(request())
    assert (found.finish.type, found.finish.matched, found.cached_tokens) == (kind, None, 0)


async def test_the_servers_cache_is_counted() -> None:
    extra = {"global_steps": 1, "num_cached_tokens": 4}
    assert (await backend_of(extra_fields=extra).generate(request())).cached_tokens == 4


def test_a_backend_of_verl_is_not_opened_by_a_spec() -> None:
    with pytest.raises(BackendError, match="is made inside a trainer") as caught:
        VerlBackend.open(None, None, None)
    assert caught.value.kind == "wrong_backend"


@pytest.mark.parametrize(("own", "servers", "both"), [(80, 100, 80), (120, 100, 99), (None, 100, 99), (80, None, 80)])
def test_the_shortest_context_counts(own: int | None, servers: int | None, both: int) -> None:
    assert context_of(config_of(actor_rollout_ref__rollout__max_model_len=servers), own) == both


def test_rows_of_another_manager_are_named() -> None:
    refuse_foreign(["a_0_0"], [sums(9, 3, 2.0)])
    with pytest.raises(TrainError, match="1 rows of verl's batch were not written by EngineManager, for example a_1_0"):
        refuse_foreign(["a_0_0", "a_1_0"], [sums(9, 3, 2.0), {"status": "success"}])


def test_one_version_is_smallest_and_largest() -> None:
    assert versions_of({"global_steps": 3}) == (3, 3)


def sums(tokens: int, trained: int, advantage: float, images: int = 0) -> dict[str, Any]:
    return dict(zip(TAGS, (tokens, trained, advantage), strict=True)) | {IMAGES: images}


def test_padding_of_verl_is_not_compared_and_a_lost_row_is_found() -> None:
    keys = ["a_0_0", "a_1_0", "pad_0_0"]
    tags = [sums(9, 3, 2.0), sums(9, 3, 2.0), {**sums(9, 3, 2.0), "is_padding": True}]
    masks = [torch.tensor([1, 1]), torch.tensor([1, 0]), torch.tensor([0])]
    advantages = [torch.tensor([0.5, 0.5]), torch.tensor([-1.0, 0.0]), torch.tensor([0.0])]
    check_rows(keys, tags, [5, 4, 2], masks, advantages, [0, 0, 0])
    with pytest.raises(TrainError, match="Tokens: 9 handed over, 5 in the batch; trained tokens: 3, 2") as caught:
        check_rows(keys[:1], tags[:1], [5], masks[:1], advantages[:1], [0])
    assert caught.value.kind == "handover"


def test_images_that_were_exchanged_between_rows_are_found() -> None:
    """Also where the sum over all rows is the same."""
    keys, tags = ["a_0_0", "a_1_0"], [sums(4, 2, 0.0, 11), sums(4, 2, 0.0, 22)]
    masks, advantages = [torch.tensor([1])] * 2, [torch.tensor([0.0])] * 2
    check_rows(keys, tags, [2, 2], masks, advantages, [11, 22])
    for images in ([22, 11], [11, 0], [11, 11]):
        with pytest.raises(TrainError, match="images: lost, changed, or in another order or row"):
            check_rows(keys, tags, [2, 2], masks, advantages, images)


def test_the_data_file_names_the_tasks(make: Any, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    assert write_tasks(make(), tmp_path / "tasks.parquet") == 2
    rows = pq.read_table(tmp_path / "tasks.parquet").to_pylist()
    assert [row["extra_info"] for row in rows] == [{"index": 0, "task": "t0"}, {"index": 1, "task": "t1"}]


MODE = {"trainer__v1__trainer_mode": "engine"}


def test_settings_that_fit_are_only_logged(make: Any) -> None:
    with capture_logs() as logs:
        refuse_settings(config_of(**MODE), load_spec(make()), None)
    assert [each["setting"] for each in logs] == [*WITHOUT_EFFECT, "`backend: {kind: local}`: verl's servers sample"]


ROLLOUT, ACTOR = "actor_rollout_ref__rollout__", "actor_rollout_ref__actor__"
R3 = {"router_replay": {"mode": "R3"}}
QWEN, TILES = (SimpleNamespace(family=family) for family in (QwenFamily("qwen2_5_vl"), TiledFamily("smolvlm", {})))
EXPERTS: dict[str, Any] = {"backend": {"kind": "sglang", "urls": ["http://127.0.0.1:1"], "routed_experts": True}}
SPEC_TRAIN: dict[str, Any] = {"tasks_per_step": 2, "rollout_correction": {"kind": "none"}, "dynamic_sampling": False}


@pytest.mark.parametrize(
    ("keys", "changes", "vision", "said"),
    [
        ({}, {"actor_rollout_ref__rollout__multi_turn__interaction_config_path": "x"}, None, "interaction_config_path=x: the spec's `user`"),
        ({"sampling": {"stop": ["x"]}}, {}, None, "skip_tokenizer_init=null: `sampling.stop` needs the server's tokenizer"),
        ({"sampling": {"regex": "a"}}, {}, None, "parameters that verl's servers do not both take: regex"),
        ({"train": SPEC_TRAIN | {"advantage_norm": "batch"}}, {}, None, "`train.advantage_norm: batch`: groups are handed over"),
        ({}, {"trainer__use_v1": False}, None, "trainer.use_v1=false: the manager writes the rows of verl's V1 trainer"),
        ({}, {ROLLOUT + "name": "trtllm"}, QWEN, "rollout.name=trtllm: images are sent to vllm or sglang"),
        ({}, {}, TILES, "images: verl's trainer takes those of Qwen-VL models"),
        (EXPERTS, {ACTOR + "strategy": "megatron", ACTOR + "megatron": R3}, None, "enable_rollout_routing_replay=null: `backend.routed_experts` is true"),
        (EXPERTS, {ROLLOUT + "enable_rollout_routing_replay": True, ACTOR + "strategy": "fsdp"}, None, "actor.strategy=fsdp: only megatron and veomni with router_replay.mode=R3 read `routed_experts`"),
        ({}, {ROLLOUT + "enable_rollout_routing_replay": True}, None, "enable_rollout_routing_replay: `backend.routed_experts` is false"),
    ],
)  # fmt: skip
def test_what_the_adapter_cannot_hand_over_is_refused(
    make: Any, keys: dict[str, Any], changes: dict[str, Any], vision: Any, said: str
) -> None:
    with pytest.raises(TrainError) as caught:
        refuse_settings(config_of(**MODE, **changes), load_spec(make(**keys)), vision)
    assert str(caught.value).partition("with verl, change these: ")[2].startswith(("actor", "`", "images", "trainer"))
    assert said in str(caught.value)
    assert ";" not in str(caught.value)  # nothing else is wrong


def test_an_agent_loop_hands_images_over_in_the_v1_trainer_only(make: Any) -> None:
    spec = load_spec(make(rewards={"credit": {"method": "outcome", "baseline": "mean", "scale": "std"}}))
    refuse_loop_settings(config_of(), spec, QWEN)
    refuse_loop_settings(config_of(trainer__use_v1=False), spec, None)
    with pytest.raises(TrainError, match=r"trainer\.use_v1=false: its trainer would process images again") as caught:
        refuse_loop_settings(config_of(trainer__use_v1=False), spec, QWEN)
    assert caught.value.kind == "train_setup"


def test_a_configuration_without_a_spec_says_what_to_add(make: Any) -> None:
    for engine in ({}, {"spec": make()}, {"folder": "out"}):
        with pytest.raises(TrainError, match=r"add `\+engine.spec=SPEC \+engine.folder=FOLDER`"):
            EngineManager(config_of(engine=engine), Client())


# --- with verl -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.trainers
def test_the_advantages_of_verl_are_those_of_the_stored_rows(make: Any, tmp_path: Path) -> None:
    """Six episodes of two turns through TransferQueue. verl's trainer also pads the batch; padding has no advantage."""
    found = verl_step("step", make(), str(tmp_path / "out"), str(tmp_path / "tasks.parquet"))
    assert set(found["statuses"].values()) == {"finished"}
    store = RunStore.open(tmp_path / "out" / "rollouts", readonly=True)
    rows = {(row["task_id"], row["sample_index"]): row for row in export_rows(store)}
    assert len(rows) == len(found["rows"]) == 6
    different = set()
    for made in found["rows"]:
        uid, sample, index = made["key"].split("_")
        row = rows[(f"t{uid[-1]}", int(sample))]
        start = int(row["loss_mask"].argmax())
        trained = row["loss_mask"][start:] == 1
        assert index == "0"
        assert made["input_ids"] == row["input_ids"].tolist()
        assert made["response_mask"] == row["loss_mask"][start:].tolist()
        wanted = np.where(trained, row["advantages"][start:], 0.0)
        assert np.abs(np.array(made["advantages"]) - wanted).max() < 1e-6
        assert made["returns"] == made["advantages"]
        assert np.array(made["rollout_log_probs"])[trained].tolist() == row["logprobs"][start:][trained].tolist()
        different |= set(made["advantages"])
        assert (made["tag"]["min_global_steps"], made["tag"]["global_steps"]) == (3, 4)
    assert len(different) > 6  # by turn, not by row
    assert all(not any(each) for each in found["padding"])
    assert "verl's batch is not what the engine handed over" in found["errors"]["row"]
    assert found["stats"]["requests"] == len(found["calls"]) == 12
    assert found["stats"]["collapsed_versions"] > 0


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.exhaustive
def test_prompts_that_the_manager_does_not_run(make: Any, tmp_path: Path) -> None:
    said = verl_step("prompts", make(), str(tmp_path / "out"))
    assert {name: text.partition(";")[0].partition(" of /")[0] for name, text in said.items()} == {
        "validation": "this manager runs no validation",
        "uid": "the prompt's uid 'a_b' holds `_`, which verl's keys of rows split at",
        "task": "`extra_info.task` of a prompt is 't9', which is not a task",
        "no task": "`extra_info.task` of a prompt is None, which is not a task",
    }


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.exhaustive
def test_groups_that_cannot_be_trained_on_are_failures(make: Any, tmp_path: Path) -> None:
    """One group ends with the error of the first episodes, the other without a row."""
    path = make(user={"use": "code_for_training:Broken"})
    found = verl_step("step", path, str(tmp_path / "out"), str(tmp_path / "tasks.parquet"))
    assert found == {"statuses": {"uid-0": "failure", "uid-1": "failure"}, "rows": []}


@pytest.mark.slow
@pytest.mark.trainers
def test_settings_of_verls_own_configuration_are_refused(make: Any, tmp_path: Path) -> None:
    """All in one message; the names are those of verl's configuration, so hydra would refuse others."""
    expected = {
        "actor_rollout_ref.rollout.n=4": "rollout.n=4: `rollout.samples_per_task` is 3",
        "actor_rollout_ref.rollout.temperature=0.5": "temperature=0.5: `sampling.temperature` is 1",
        "actor_rollout_ref.rollout.calculate_log_probs=false": "calculate_log_probs=false",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=x": "multi_turn.tool_config_path=x: the spec's `tools`",
        "actor_rollout_ref.rollout.multi_turn.function_tool_path=x": "multi_turn.function_tool_path=x: the spec's",
        "trainer.v1.trainer_mode=sync": "trainer_mode=sync: must be `engine`",
        "trainer.v1.sampler.sync_refill_failed_groups=false": "sync_refill_failed_groups=false",
        "trainer.val_before_train=true": "trainer.val_before_train: ",
        "trainer.test_freq=5": "trainer.test_freq=5",
        "algorithm.adv_estimator=rloo": "adv_estimator=rloo: has no effect",
        "algorithm.use_kl_in_reward=true": "use_kl_in_reward: ",
        "algorithm.filter_groups.enable=true": "filter_groups.enable: ",
        "reward.reward_model.enable=true": "reward.reward_model.enable: ",
        "distillation.enabled=true": "distillation.enabled: ",
    }
    message = verl_step("refusal", make(), str(tmp_path / "out"), *expected)["message"]
    assert [said for said in expected.values() if said not in message] == []
    assert message.count(";") == len(expected) - 1 + 1  # one of them has a semicolon of its own
