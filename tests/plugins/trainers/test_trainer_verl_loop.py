"""The engine's agent loop under verl's own agent loop managers: real workers on a local Ray, real TransferQueue; only the servers are replaced."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from trainer_kit import FORGETFUL
from verl_python import config_of, run_verl
from written_specs import TALKS_ON_WHEN_CUT, save_spec

from engine.errors import TrainError
from engine.plugins.trainers.verl.agent_loop import _OPEN, EngineAgentLoop, LoopEpisodes
from engine.plugins.trainers.verl.manager import write_tasks
from engine.store import RunStore
from engine.store.rows.export import export_rows

SCRIPT = Path(__file__).parents[2] / "kit" / "verl_agent_loop.py"


class Servers:
    """verl's client in this process: each reply is as long as it may be."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        count = sampling_params["max_new_tokens"]
        start = sum(map(ord, request_id)) + len(prompt_ids)
        return SimpleNamespace(
            token_ids=[40 + (start * 7 + place * 3) % 50 for place in range(count)],
            log_probs=[-0.5] * count,
            stop_reason="length",
            extra_fields={"global_steps": 3},
            routed_experts=None,
        )


@pytest.fixture
def write(tmp_path: Path, tiny_model_dir: Path) -> Callable[..., Path]:
    """Write a spec of two tasks, three samples and two turns into a folder of its own, with its model."""

    def write(name: str, *, template: str | None = None, **keys: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny_model_dir, folder / "model")
        if template is not None:
            (folder / "model" / "chat_template.jinja").write_text(template)
        spec: dict[str, Any] = {
            "spec": "episode/v1",
            "name": name,
            "model": {"path": str(folder / "model")},
            "backend": {"kind": "local"},
            "tasks": {"source": "inline", "rows": [{"id": "t0", "say": "a"}, {"id": "t1", "say": "b"}], "id": "id"},
            "prompt": [{"role": "user", "content": "Say {{say}}."}],
            "user": {"use": "code_for_training:Listener"},
            "machine": TALKS_ON_WHEN_CUT,
            "limits": {"turn_tokens": 6, "assistant_turns": 2, "episode_tokens": 64},
            "rewards": {"credit": {"method": "outcome", "baseline": "mean", "scale": "std"}},
            "rollout": {"samples_per_task": 3, "seed": 3},
            "train": {"rollout_correction": {"kind": "none"}, "dynamic_sampling": False},
        }
        return save_spec(folder / "spec.yaml", spec | keys)

    return write


async def run_once(path: Path, *, sampling: Any = None, session: int | None = 0, **changes: Any) -> Any:
    """One run of the loop, with the columns of the first task; the episodes of the folder are closed afterwards."""
    asked = {"temperature": 1.0} if sampling is None else sampling
    columns = {"uid": "u", "extra_info": {"task": "t0"}} | changes.pop("columns", {})
    columns |= {} if session is None else {"session_id": session}
    loop = EngineAgentLoop(
        name="engine",
        spec=str(path),
        folder=str(path.parent / "out"),
        trainer_config=SimpleNamespace(config=config_of(**changes)),
        server_manager=Servers(),
    )
    try:
        return await loop.run(asked, **columns)
    finally:
        for each in list(_OPEN.values()):
            await asyncio.to_thread(each.stop)


ESTIMATOR = "algorithm__adv_estimator"
RLOO = {"rewards": {"credit": {"method": "outcome"}}}


@pytest.mark.parametrize(
    ("keys", "changes", "said"),
    [
        (
            {},
            {ESTIMATOR: "gae"},
            "algorithm.adv_estimator=gae (norm_adv_by_std_in_grpo=True): another formula than `rewards.credit: {method",
        ),
        (
            {},
            {"algorithm__norm_adv_by_std_in_grpo": False},
            "adv_estimator=grpo (norm_adv_by_std_in_grpo=False): another",
        ),
        (RLOO, {}, "another formula than `rewards.credit: {method: outcome, baseline: leave_one_out, scale: none}`"),
        (
            {"rollout": {"samples_per_task": 1}},
            {"actor_rollout_ref__rollout__n": 1},
            "verl subtracts no baseline in a group of one",
        ),
        (
            {},
            {"trainer__v1__trainer_mode": "engine"},
            "trainer_mode=engine: it reads advantages that an agent loop cannot give",
        ),
        (
            {"train": {"dynamic_sampling": False, "overlong": "mask"}},
            {},
            "`train.overlong`: needs the engine's advantages",
        ),
        (
            {},
            {"algorithm__use_kl_in_reward": True},
            "use_kl_in_reward: the advantages would not be those of the spec",
        ),
        ({"train": {}}, {}, "not carried: groups that are left out and replaced; the loop runs single episodes"),
        (
            {"rewards": {"credit": {"method": "turn_return"}}},
            {},
            "not carried: an advantage for each turn; an agent loop returns one reward",
        ),
        ({}, {"sampling": {"temperature": 0.0}}, "verl asks for temperature 0, and"),
        (
            {},
            {"columns": {"extra_info": {}}},
            "no `uid` or no `extra_info.task`; make the data file with `write_tasks`",
        ),
        ({}, {"columns": {"extra_info": {"task": "t9"}}}, "'t9' is not a task of"),
    ],
)
async def test_what_verl_would_lose_or_change_is_refused(write: Any, keys: Any, changes: Any, said: str) -> None:
    with pytest.raises(TrainError, match=re.escape(said)) as caught:
        await run_once(write("refused", **keys), **changes)
    assert caught.value.kind == "train_setup"


@pytest.mark.parametrize(
    ("keys", "changes", "said"),
    [
        (
            {"template": FORGETFUL},
            {"session": None},
            "t0/0 has 2 rows, and verl takes several rows of an episode only in its V1 trainer",
        ),
        (
            {"template": FORGETFUL} | RLOO,
            {ESTIMATOR: "rloo"},
            "t0/0 has 2 rows, and verl takes several rows of an episode only",
        ),
        ({}, {"session": None, "actor_rollout_ref__rollout__response_length": 8}, "t0/0 has a response of "),
        ({}, {"session": None, "actor_rollout_ref__rollout__prompt_length": 2}, "t0/0 has a prompt of "),
    ],
)
async def test_rows_that_verl_does_not_carry_are_errors(write: Any, keys: Any, changes: Any, said: str) -> None:
    with pytest.raises(TrainError, match=said) as caught:
        await run_once(write("rows", **keys), **changes)
    assert caught.value.kind == "handover"


async def test_an_episode_that_a_user_broke_is_not_a_reward_of_zero(write: Any) -> None:
    said = r"t0/2 cannot be trained on \(user_error: .*the simulator is down"
    with pytest.raises(TrainError, match=said) as caught:
        await run_once(write("broken", user={"use": "code_for_training:Broken"}), session=2)
    assert caught.value.kind == "untrainable"


async def test_an_episode_whose_group_failed_is_not_handed_over_alone(write: Any) -> None:
    """verl trains on what a failed prompt has, and gives an episode without others its raw reward. t1 keeps two of three episodes."""
    path = write("fading", user={"use": "code_for_training:Fading"})
    episodes = await asyncio.to_thread(LoopEpisodes, path, path.parent / "out", config_of(), Servers())
    ended = {}
    try:
        for task in ("t0", "t1"):
            columns = {"uid": task, "extra_info": {"task": task}}
            begun = [episodes.submit(columns | {"session_id": at}, lambda *_: None) for at in range(3)]
            ended[task] = await asyncio.gather(*map(asyncio.wrap_future, begun), return_exceptions=True)
    finally:
        await asyncio.to_thread(episodes.stop)
    alone, failed, _ = map(str, ended["t0"])
    assert alone == "t0/0 is not trained on: its group has fewer trainable episodes than `train.min_group`"
    assert failed.startswith("t0/1 cannot be trained on (user_error: ")
    assert [each if isinstance(each, Exception) else len(each[1]) for each in ended["t1"]][:2] == [1, 1]
    assert isinstance(ended["t1"][2], TrainError)


async def test_a_group_whose_rows_verl_does_not_carry_leaves_none_alone(write: Any) -> None:
    path = write("refused")
    episodes = await asyncio.to_thread(LoopEpisodes, path, path.parent / "out", config_of(), Servers())

    def refuse(rows: Any, episode: str) -> None:
        if episode != "t0/1":
            raise TrainError(f"{episode} has 2 rows", kind="handover")

    try:
        columns = {"uid": "u", "extra_info": {"task": "t0"}}
        begun = [episodes.submit(columns | {"session_id": at}, refuse) for at in range(3)]
        ended = await asyncio.gather(*map(asyncio.wrap_future, begun), return_exceptions=True)
    finally:
        await asyncio.to_thread(episodes.stop)
    assert [getattr(error, "kind", error) for error in ended] == ["handover", "untrainable", "handover"]


async def test_episodes_of_one_process_have_one_client(write: Any) -> None:
    path = write("clients")
    episodes = await asyncio.to_thread(LoopEpisodes.of, path, path.parent / "out", config_of(), Servers())
    try:
        with pytest.raises(TrainError, match="sample with another client of verl in this process"):
            LoopEpisodes.of(path, path.parent / "out", config_of(), Servers())
    finally:
        await asyncio.to_thread(episodes.stop)


async def test_groups_of_two_processes_have_other_ids_and_go_on_after_a_restart(write: Any) -> None:
    """A prompt's episodes are one group, by its uid. The second folder stands for a second process."""
    path = write("numbers")
    config = config_of(actor_rollout_ref__rollout__agent={"num_workers": 2})
    found = []
    for _ in range(2):
        both = [await asyncio.to_thread(LoopEpisodes, path, path.parent / "out", config, Servers()) for _ in range(2)]
        for episodes in both:
            columns = [{"uid": uid, "extra_info": {"task": "t0"}} for uid in ("u", "u", "v", "u", "v", "v", "w")]
            ended = [await asyncio.wrap_future(episodes.submit(each, lambda *_: None)) for each in columns]
            found.append([trajectory.episode_id for trajectory, *_ in ended])
        for episodes in both:
            await asyncio.to_thread(episodes.stop)
    assert found == [
        ["t0/0", "t0/1", "t0~1000/0", "t0/2", "t0~1000/1", "t0~1000/2", "t0~2000/0"],
        ["t0~1/0", "t0~1/1", "t0~1001/0", "t0~1/2", "t0~1001/1", "t0~1001/2", "t0~2001/0"],
        ["t0~3000/0", "t0~3000/1", "t0~4000/0", "t0~3000/2", "t0~4000/1", "t0~4000/2", "t0~5000/0"],
        ["t0~3001/0", "t0~3001/1", "t0~4001/0", "t0~3001/2", "t0~4001/1", "t0~4001/2", "t0~5001/0"],
    ]


# --- with verl -----------------------------------------------------------------------------------------------


def case(path: Path, manager: str, workers: int, *changes: str) -> dict[str, Any]:
    """verl's files of a spec, and what `verl_agent_loop.py` is to do with them."""
    folder = path.parent
    loop = {
        "name": "engine",
        "_target_": "engine.plugins.trainers.verl.agent_loop.EngineAgentLoop",
        "spec": str(path),
        "folder": str(folder / "out"),
    }
    (folder / "loop.yaml").write_text(yaml.safe_dump([loop]))
    write_tasks(path, folder / "tasks.parquet")
    rows = pq.read_table(folder / "tasks.parquet").to_pylist()
    return {
        "manager": manager,
        "workers": workers,
        "loop": str(folder / "loop.yaml"),
        "rows": [row | {"raw_prompt": row.pop("prompt"), "index": row["extra_info"]["index"]} for row in rows],
        "model": str(folder / "model"),
        "changes": list(changes),
    }


def stored(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of each episode, of the run stores of all processes."""
    found: dict[str, list[dict[str, Any]]] = {}
    for store in sorted(folder.glob("process-*/rollouts")):
        for row in export_rows(RunStore.open(store, readonly=True)):
            found.setdefault(row["episode_id"], []).append(row)
    return found


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.exhaustive
def test_verls_workers_run_the_episodes_and_its_trainer_gives_their_credit(write: Any, tmp_path: Path) -> None:
    """AgentLoopManagerTQ with two rows for each episode, and with an estimator of its own; a group whose user fails; AgentLoopManager (DataProto)."""
    lengths = [f"actor_rollout_ref.rollout.{part}_length={most}" for part, most in (("prompt", 48), ("response", 40))]
    cases = [
        case(write("several", template=FORGETFUL), "v1", 2),
        case(write("rloo", **RLOO), "v1", 1, "algorithm.adv_estimator=rloo"),
        case(write("broken", user={"use": "code_for_training:Broken"}), "v1", 1),
        case(write("older"), "v0", 2, *lengths),
    ]
    several, rloo, broken, older = run_verl(SCRIPT, json.dumps(cases))
    for name, told, branches in (("several", several, 2), ("rloo", rloo, 1)):
        assert told["statuses"] == ["finished", "finished"]
        episodes = stored(tmp_path / name / "out")
        assert len(told["rows"]) == 6 * branches
        different = set()
        for made in told["rows"]:
            row = episodes[made["extra"]["episode_id"]][int(made["key"].rsplit("_")[-1])]
            start = int(row["loss_mask"].argmax())
            trained = row["loss_mask"][start:] == 1
            assert made["input_ids"] == row["input_ids"].tolist()
            assert made["response_mask"] == row["loss_mask"][start:].tolist()
            assert np.array_equal(np.float32(made["rollout_log_probs"])[trained], row["logprobs"][start:][trained])
            wanted = np.where(trained, row["advantages"][start:], 0.0)
            assert np.abs(np.array(made["advantages"]) - wanted).max() < 1e-6
            assert np.float32(made["rm_scores"][-1]) == np.float32(row["outcome"]["reward"])
            assert made["extra"]["turn_scores"] == row["turn_rewards"].tolist()
            assert made["extra"]["reward_extra_info"] == {"vowels": pytest.approx(row["outcome"]["reward"])}
            versions = row["weight_versions"][row["loss_mask"] == 1]
            told_versions = tuple(made["tag"][key] for key in ("min_global_steps", "max_global_steps", "global_steps"))
            assert told_versions == (versions.min(), versions.max(), 4)
            different |= set(np.array(made["advantages"])[trained].tolist())
        assert len(different) > 2
    assert broken == {"statuses": ["failure", "failure"], "rows": []}
    episodes = stored(tmp_path / "older" / "out")
    assert len(older["episode_id"]) == len(set(older["episode_id"])) == len(episodes) == 6
    tensors = older["tensors"]
    for place, name in enumerate(older["episode_id"]):
        (row,) = episodes[name]
        start = int(row["loss_mask"].argmax())
        ids, mask = row["input_ids"].tolist(), row["loss_mask"][start:].tolist()
        assert tensors["prompts"][place][48 - start :] == ids[:start]
        assert tensors["responses"][place][: len(mask)] == ids[start:]
        assert tensors["response_mask"][place] == mask + [0] * (40 - len(mask))
        wanted = np.where(row["loss_mask"] == 1, row["logprobs"], 0.0)[start:]
        assert np.array_equal(np.float32(tensors["rollout_log_probs"][place][: len(mask)]), np.float32(wanted))
        assert np.float32(tensors["rm_scores"][place][len(mask) - 1]) == np.float32(row["outcome"]["reward"])
        assert older["turn_scores"][place] == row["turn_rewards"].tolist()
        assert older["min_global_steps"][place] == older["max_global_steps"][place] == 3
