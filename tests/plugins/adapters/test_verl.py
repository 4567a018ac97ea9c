"""verl's interactions run unchanged: the classes, the YAML, the rows, the limits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import trajectories_of
from typer.testing import CliRunner
from written_specs import save_spec

from engine.cli.main import app
from engine.errors import AdapterError
from engine.plugins.adapters.verl.config import as_yaml, spec_of
from engine.plugins.adapters.verl.interactions import Interactions, Prompt, interaction_class, name_of
from engine.schemas.environment import Environment, Task, User
from engine.schemas.trajectory import Trajectory
from engine.spec.load import load_spec
from engine.store.store import find_run
from engine.validate import check_spec

HERE = Path(__file__).parent
PAIR = [
    {"name": "gsm8k", "class_name": "interactions_for_tests.Gsm8kInteraction", "config": {}},
    {"name": "bare", "class_name": "interactions_for_tests.Bare", "config": {"word": "Seen"}},
]


@pytest.fixture(autouse=True)
def log() -> Iterator[list[tuple[Any, ...]]]:
    interaction_class("interactions_for_tests.Bare")  # as a run imports it: with verl's base in its place
    found: list[tuple[Any, ...]] = sys.modules["interactions_for_tests"].LOG
    found.clear()
    yield found
    found.clear()


@pytest.fixture
def run(tmp_path: Path, tiny_tokenizer_dir: Path) -> Callable[..., dict[str, Trajectory]]:
    """Run verl's rows against verl's interactions; the episodes by id."""

    def go(
        replies: Any, rows: list[dict[str, Any]], interactions: Any = None, exits: int = 0, **changes: Any
    ) -> dict[str, Trajectory]:
        (tmp_path / "interactions.yaml").write_text(yaml.safe_dump({"interaction": interactions or PAIR}))
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = {
            "spec": "episode/v1",
            "name": "verl",
            "model": {"path": str(tiny_tokenizer_dir)},
            "backend": {"kind": "scripted", "replies": replies},
            "tasks": {"source": "jsonl", "path": "rows.jsonl", "id": "id"},
            "environment": {"use": "engine.plugins.adapters.verl.interactions:Prompt", "effects": "pure"},
            "user": {"use": "engine.plugins.adapters.verl.interactions:Interactions", "effects": "replayable", "with": {"config": "interactions.yaml"}},
            "machine": "retry_with_feedback",
            **changes,
        }  # fmt: skip
        path = save_spec(tmp_path / "verl.yaml", spec)
        result = CliRunner().invoke(app, ["run", str(path), "--quiet", "--keep-going", "--out", str(tmp_path / "runs")])
        assert result.exit_code == exits, result.output
        run = find_run("latest", tmp_path / "runs")
        return {trajectory.episode_id: trajectory for trajectory in trajectories_of(run)}

    return go


def row(id: str, **kwargs: Any) -> dict[str, Any]:
    """A row as verl's data preparation writes it."""
    return {
        "id": id,
        "prompt": [{"role": "system", "content": "You are good at sums."}, {"role": "user", "content": "17 + 25?"}],
        "extra_info": {"index": 0, "interaction_kwargs": kwargs},
    }


def test_they_fit_their_protocols() -> None:
    assert isinstance(Interactions(interaction=PAIR), User)
    assert isinstance(Prompt(), Environment)


def test_the_gsm8k_example_runs_unchanged(run, log) -> None:
    kwargs = {"name": "gsm8k", "query": "17 + 25?", "ground_truth": "42"}
    (episode,) = run(["It is 41.", "It is 42."], [row("a", **kwargs)]).values()
    assert [(message.role, message.text) for message in episode.messages] == [
        ("system", "You are good at sums."),
        ("user", "17 + 25?"),
        ("assistant", "It is 41."),
        ("user", "Your response is incorrect! You need to reflect on your answer and try again."),
        ("assistant", "It is 42."),
        ("user", "Your response is correct!"),
    ]
    assert [turn.rewards for turn in episode.turns] == [{"interaction": 0.0}, {"interaction": 1.0}]
    assert [(posting.turn, posting.cause) for posting in episode.postings] == [
        (0, "Gsm8kInteraction"),
        (1, "Gsm8kInteraction at the end"),
    ]
    assert (episode.outcome.solved, episode.outcome.event) == (True, "satisfied")
    assert log == [
        ("made", {"name": "gsm8k"}),
        ("start", "a/0", "42", {"name": "gsm8k", "query": "17 + 25?"}),
        ("respond", "a/0", ["system", "user", "assistant"]),
        ("respond", "a/0", ["system", "user", "assistant", "user", "assistant"]),
        ("finalize", "a/0"),
    ]


def test_one_object_serves_a_run_and_rows_choose_among_several(run, log) -> None:
    rows = [row("a", name="gsm8k", ground_truth="1"), row("b", name="bare"), row("c", name="gsm8k", ground_truth="1")]
    episodes = run(["It is 1."] * 3, rows, limits={"assistant_turns": 2, "user_turns": 2})
    assert [entry for entry in log if entry[0] == "made"] == [("made", {"name": "gsm8k"})]
    assert {entry[1] for entry in log if entry[0] == "finalize"} == {"a/0", "c/0"}
    assert [message.text for message in episodes["b/0"].messages if message.role == "user"] == ["17 + 25?", "Seen 3", "Seen 5"]  # fmt: skip
    assert [turn.rewards for turn in episodes["b/0"].turns] == [{"interaction": 0.0}, {"interaction": 0.0}]
    assert episodes["b/0"].facts == {"seen": 5}


@pytest.mark.parametrize(
    ("limits", "turns", "limit"),
    [({"assistant_turns": 3, "user_turns": None}, 3, "assistant_turns"), ({"assistant_turns": None, "user_turns": 1}, 2, None)],
)  # fmt: skip
def test_it_is_finalized_when_a_limit_ends_the_episode(run, log, limits, turns, limit) -> None:
    (episode,) = run(["No."] * 9, [row("a", name="gsm8k", ground_truth="42")], limits=limits).values()
    assert (len(episode.turns), episode.outcome.limit) == (turns, limit)
    assert log[-1] == ("finalize", "a/0")


@pytest.mark.parametrize(
    ("at", "words"), [("start", "no such customer"), ("respond", "lost the thread"), ("", "must return")]
)
def test_what_an_interaction_does_wrong_is_blamed_on_it(run, log, at, words) -> None:
    broken = [{"class_name": "interactions_for_tests:Broken"}]
    (episode,) = run(["It is 42."], [row("a", at=at)], broken, exits=1).values()
    failure = episode.outcome.failure
    assert failure is not None
    assert (failure.blame, failure.kind, episode.outcome.trainable) == ("user", "user_error", False)
    assert words in failure.message
    assert log == [("start", "a/0"), ("finalize", "a/0")]


def test_it_is_finalized_when_the_backend_fails(run, log) -> None:
    (episode,) = run(["No.", {"error": "gone"}], [row("a", name="gsm8k", ground_truth="42")], exits=3).values()
    assert episode.outcome.failure is not None
    assert episode.outcome.failure.blame == "backend"
    assert log[-1] == ("finalize", "a/0")


def test_a_row_that_names_no_interaction_of_the_file(run) -> None:
    (episode,) = run(["No."], [row("a", name="gms8k")], exits=1).values()
    assert episode.outcome.failure is not None
    assert "names the interaction 'gms8k' (`interaction_kwargs.name`); the YAML has gsm8k, bare" in episode.outcome.failure.message  # fmt: skip


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ({"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction"}, "gsm8k"),
        ({"class_name": "shop:Customer"}, "customer"),
        ({"class_name": "a.B", "name": "mine"}, "mine"),
    ],
)
def test_names_are_made_as_verl_makes_them(item: dict[str, str], name: str) -> None:
    assert name_of(item) == name


def test_verl_stands_in_only_while_an_interaction_is_imported() -> None:
    assert "verl" not in sys.modules
    assert issubclass(interaction_class("interactions_for_tests.Bare"), object)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "not both"),
        ({"config": "a.yaml", "interaction": PAIR}, "not both"),
        ({"interaction": []}, "there is no interaction"),
        ({"interaction": [PAIR[0], PAIR[0]]}, "the same name"),
        ({"interaction": [{"name": "a"}]}, "needs `class_name`"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Interactions(**arguments)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"`nowhere\.yaml` is neither beside the spec nor in"):
        Interactions(config="nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("interaction: [", "`bad.yaml` is no YAML: "),
        ("interaction: []", "`bad.yaml`: write `interaction: [{class_name: …"),
        ("tools: [{class_name: a.B}]", "`bad.yaml`: write `interaction: [{class_name: …"),
    ],
)
def test_a_file_without_interactions_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(AdapterError) as refused:
        Interactions(config=str(tmp_path / "bad.yaml"))
    assert str(refused.value).startswith(words)


def test_rows_need_messages() -> None:
    with pytest.raises(ValueError, match="must be a list of messages"):
        Prompt().reset(Task(id="a", index=0, fields={"prompt": "hello"}), 0)


CONFIG = {
    "data": {"train_files": "rows.jsonl", "max_prompt_length": 1024, "max_response_length": 256},
    "actor_rollout_ref": {
        "model": {"path": "some/model"},
        "rollout": {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": -1,
            "n": 4,
            "multi_turn": {
                "enable": True,
                "max_assistant_turns": 5,
                "max_user_turns": None,
                "interaction_config_path": "interactions.yaml",
                "function_tool_path": "functions.py",
            },
        },
    },
    "algorithm": {"adv_estimator": "rloo"},
}


def test_a_configuration_becomes_a_spec() -> None:
    spec, notes = spec_of(CONFIG, name="mine", interactions=None)
    assert spec == {
        "spec": "episode/v1",
        "name": "mine",
        "model": {"path": "some/model"},
        "sampling": {"temperature": 0.7, "top_p": 0.9},
        "tasks": {"source": "jsonl", "path": "rows.jsonl"},
        "environment": {
            "use": "engine.plugins.adapters.verl.interactions:Prompt",
            "effects": "pure",
            "with": {"field": "prompt"},
        },
        "user": {
            "use": "engine.plugins.adapters.verl.interactions:Interactions",
            "effects": "replayable",
            "with": {"config": "interactions.yaml"},
        },
        "machine": "retry_with_feedback",
        "limits": {"assistant_turns": 5, "user_turns": None, "turn_tokens": 256, "episode_tokens": 1280},
        "rewards": {"credit": {"method": "outcome", "baseline": "leave_one_out", "scale": "none"}},
        "rollout": {"samples_per_task": 4},
    }
    assert notes == ["verl's function tools (functions.py) are not taken over: name them under `tools`"]


@pytest.mark.parametrize(("interactions", "machine"), [("interactions.yaml", "tools_and_user"), (None, "tools")])
def test_a_configuration_with_tools_becomes_a_spec(interactions: str | None, machine: str) -> None:
    config = json.loads(json.dumps(CONFIG))
    turns = {"tool_config_path": "tools.yaml", "interaction_config_path": interactions, "max_tool_response_length": 512}
    config["actor_rollout_ref"]["rollout"]["multi_turn"] = turns
    spec, notes = spec_of(config, name="mine", interactions=None)
    assert spec["environment"] == {"adapter": "verl", "use": "tools.yaml"}
    assert spec["tasks"] == {
        "source": "jsonl",
        "path": "rows.jsonl",
        "preset": {"name": "verl", "prompt_key": "prompt"},
    }
    assert (spec["machine"], "user" in spec) == (machine, interactions is not None)
    assert notes == [
        "verl executes 1 call of a reply and cuts results at 512 characters; here all calls are executed, and "
        "`limits.tool_result_tokens` cuts"
    ]


PUBLISHED: dict[str, Any] = {
    "hydra": {"searchpath": ["file://verl/trainer/config"]},
    "defaults": ["ppo_trainer", "_self_"],
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {
        "train_files": "train.parquet",
        "val_files": "test.parquet",
        "train_batch_size": 256,
        "max_prompt_length": 1024,
        "max_response_length": 1024,
        "filter_overlong_prompts": True,
        "truncation": "error",
        "return_raw_chat": True,
    },
    "actor_rollout_ref": {
        "hybrid_engine": True,
        "model": {"path": "some/model", "use_remove_padding": True, "enable_gradient_checkpointing": True},
        "actor": {
            "optim": {"lr": "1e-6"},
            "ppo_mini_batch_size": 256,
            "ppo_micro_batch_size_per_gpu": 40,
            "use_kl_loss": True,
            "kl_loss_coef": 0.001,
            "kl_loss_type": "low_var_kl",
            "entropy_coeff": 0,
            "fsdp_config": {"param_offload": False, "optimizer_offload": False},
        },
        "ref": {"log_prob_micro_batch_size_per_gpu": 40, "fsdp_config": {"param_offload": True}},
        "rollout": {
            "name": "sglang_async",
            "log_prob_micro_batch_size_per_gpu": 40,
            "tensor_model_parallel_size": 2,
            "gpu_memory_utilization": 0.5,
            "n": 16,
            "multi_turn": {"enable": True, "max_assistant_turns": 5, "tool_config_path": "tools.yaml"},
        },
    },
    "trainer": {
        "critic_warmup": 0,
        "logger": ["console", "wandb"],
        "project_name": "gsm8k_async_rl",
        "experiment_name": "verify-n16",
        "n_gpus_per_node": 8,
        "nnodes": 1,
        "save_freq": -1,
        "test_freq": 20,
        "total_epochs": 15,
    },
}
"""The settings of examples/sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn.sh, as YAML."""


def test_the_published_example_becomes_a_training() -> None:
    spec, notes = spec_of(PUBLISHED, name="mine", interactions=None)
    assert spec["backend"] == {
        "kind": "sglang",
        "launch": {"gpus": 8, "tp": 2, "args": ["--mem-fraction-static", "0.5"]},
    }
    rows = {"source": "parquet", "path": "train.parquet", "preset": {"name": "verl", "prompt_key": "prompt"}}
    assert spec["tasks"] == rows | {"overlong": "drop"}
    assert spec["limits"] == {"assistant_turns": 5, "user_turns": None, "turn_tokens": 1024, "episode_tokens": 2048}
    assert spec["train"] == {
        "epochs": 15,
        "tasks_per_step": 256,
        "shuffle": True,
        "update_epochs": 1,
        "minibatches": 1,
        "loss": {"kind": "bnpo", "clip_low": 0.2, "clip_high": 0.2, "delta": 3.0},
        "entropy_coefficient": 0.0,
        "rollout_correction": {"kind": "none"},
        "dynamic_sampling": False,
        "optimizer": {
            "lr": 1e-6,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
            "warmup_steps": 0,
        },
        "memory": {"gradient_checkpointing": True},
        "kl": {"coefficient": 0.001, "estimator": "k3"},
        "colocate": True,
        "report_to": ["wandb"],
        "tracking": {"project": "gsm8k_async_rl", "name": "verify-n16"},
        "eval": {
            "every": 20,
            "tasks": rows | {"path": "test.parquet"},
            "samples": 1,
            "sampling": {"temperature": 0.0},
        },
    }
    assert "*id" not in as_yaml(spec, notes, "published.yaml"), "an alias of YAML"
    assert notes[1:] == [
        'not taken over: defaults: ["ppo_trainer", "_self_"]',
        "not taken over of `actor_rollout_ref.actor`: ppo_micro_batch_size_per_gpu: 40",
        "not taken over of `actor_rollout_ref.ref`: log_prob_micro_batch_size_per_gpu: 40",
        "not taken over of `actor_rollout_ref.ref.fsdp_config`: param_offload: true",
        "not taken over of `actor_rollout_ref.rollout`: log_prob_micro_batch_size_per_gpu: 40",
    ]


def test_no_key_of_a_configuration_is_dropped_without_a_note() -> None:
    """Another value of any key changes the spec or the notes, and so does a key that nobody knows."""
    without_effect = {"data.truncation", "data.return_raw_chat", "actor_rollout_ref.model.use_remove_padding"}
    told = spec_of(PUBLISHED, name="mine", interactions=None)
    silent = []
    for path in [*paths_of(PUBLISHED), "trainer.unknown", "critic.optim.lr", "reward_model.enable"]:
        config = json.loads(json.dumps(PUBLISHED))
        *above, key = path.split(".")
        section = config
        for name in above:
            section = section.setdefault(name, {})
        section[key] = {"bool": not section.get(key), "int": 7, "float": 0.7, "list": ["other"]}.get(
            type(section.get(key)).__name__, "0.5"
        )
        if spec_of(config, name="mine", interactions=None) == told:
            silent.append(path)
    assert set(silent) == without_effect


def test_of_several_files_of_rows_the_spec_names_the_one_that_is_given() -> None:
    config = json.loads(json.dumps(PUBLISHED))
    config["data"] |= {"train_files": ["a.parquet", "b.parquet"], "val_files": ["c.parquet", "d.parquet"]}
    with pytest.raises(ValueError, match=r"names no rows in one file \(`data\.train_files`\); give --tasks"):
        spec_of(config, name="mine", interactions=None)
    spec, notes = spec_of(config, name="mine", interactions=None, tasks="both.parquet")
    assert spec["tasks"]["path"] == "both.parquet"
    assert "eval" not in spec["train"]
    files = 'train_files: ["a.parquet", "b.parquet"], val_files: ["c.parquet", "d.parquet"]'
    assert f"not taken over of `data`: {files}" in notes
    assert "not taken over of `trainer`: test_freq: 20" in notes


def paths_of(section: dict[str, Any], above: str = "") -> Iterator[str]:
    for key, value in section.items():
        if key == "hydra":
            continue
        if isinstance(value, dict):
            yield from paths_of(value, f"{above}{key}.")
        else:
            yield above + key


def test_the_published_example_is_a_valid_spec(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = json.loads(json.dumps(PUBLISHED))
    config["actor_rollout_ref"]["model"]["path"] = str(tiny_model_dir)
    config["actor_rollout_ref"]["rollout"]["multi_turn"]["interaction_config_path"] = "interactions.yaml"
    del config["actor_rollout_ref"]["rollout"]["multi_turn"]["tool_config_path"]
    config["data"] |= {"train_files": "rows.jsonl", "val_files": "test.jsonl"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "interactions.yaml").write_text(yaml.safe_dump({"interaction": PAIR}))
    for name in ("rows", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row(name, name="gsm8k")) + "\n")
    result = CliRunner().invoke(app, ["import", "verl", str(tmp_path / "config.yaml")])
    assert result.exit_code == 0, result.output
    assert "note: not taken over of `actor_rollout_ref.actor`: ppo_micro_batch_size_per_gpu: 40" in result.output
    loaded = load_spec(tmp_path / "config.spec.yaml")
    assert [item for item in check_spec(loaded) if item.severity == "error"] == []


def test_the_imported_spec_is_valid_and_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "interactions.yaml").write_text(yaml.safe_dump({"interaction": PAIR}))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row("a", name="gsm8k")) + "\n")
    runner = CliRunner()
    result = runner.invoke(app, ["import", "verl", str(tmp_path / "config.yaml")])
    assert result.exit_code == 0, result.output
    loaded = load_spec(tmp_path / "config.spec.yaml")
    assert [item for item in check_spec(loaded) if item.severity == "error"] == []
    assert loaded.spec.limits.user_turns is None
    again = runner.invoke(app, ["import", "verl", str(tmp_path / "config.yaml")])
    assert again.exit_code == 1
    assert "exists already" in again.output


@pytest.mark.parametrize("missing", ["model", "rows", "interactions"])
def test_what_the_configuration_does_not_name_is_asked_for(missing: str) -> None:
    config = json.loads(json.dumps(CONFIG))
    if missing == "model":
        del config["actor_rollout_ref"]["model"]
    elif missing == "rows":
        del config["data"]["train_files"]
    else:
        del config["actor_rollout_ref"]["rollout"]["multi_turn"]["interaction_config_path"]
    with pytest.raises(ValueError, match=missing):
        spec_of(config, name="a", interactions=None)
