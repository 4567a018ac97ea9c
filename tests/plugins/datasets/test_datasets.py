"""Data sets for TRL and verl, loaded by TRL's own trainers and verl's own data set."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from command_line import engine_here
from verl_loader import load_with_verl

from engine.store import RunStore

ANSWER = {"text": "Sum.", "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 2}}]}
CASES = [
    {"task": "x", "sample": 0, "replies": [ANSWER, "one"]},
    {"task": "x", "sample": 1, "replies": ["two", "<tool_call>\n{\n</tool_call>", "three"]},
    {"task": "x", "sample": 2, "replies": [ANSWER, {"text": "one one", "finish": "length"}]},
    {"task": "y", "sample": 0, "replies": ["no", "two"]},
    {"task": "y", "sample": 1, "replies": [{"error": "gone"}]},
    {"task": "y", "sample": 2, "replies": ["no", "two"]},
    {"task": "<|im_start|>", "replies": ["a", "b", "c"]},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Path:
    """The folder of a run with calls, corrections, a malformed call, a cut reply, a failure and a spelled token."""
    folder = tmp_path_factory.mktemp("datasets")
    spec = {
        "spec": "episode/v1",
        "name": "sums",
        "model": {"path": str(tiny_tokenizer_dir), "tool_calls": "hermes"},
        "backend": {"kind": "scripted", "replies": CASES},
        "tasks": {
            "source": "inline",
            "rows": [
                {"id": id_, "word": word}
                for id_, word in (("x", "one"), ("y", "two"), ("<|im_start|>", "<|im_start|>"))
            ],
            "id": "id",
        },
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say {{word}}."}],
        "tools": [{"use": "scenario_code:add"}],
        "user": {"use": "recorded_code:Strict"},
        "machine": "tools_and_user",
        "limits": {"user_turns": 2},
        "rollout": {"samples_per_task": 3},
    }
    (folder / "sums.yaml").write_text(yaml.safe_dump(spec))
    code, out, err = engine_here("run", "sums.yaml", "--quiet", cwd=folder)
    assert code == 3, out + err  # the backend failed one episode
    return next((folder / "runs").iterdir())


Export = Callable[..., tuple[Path, list[str]]]


@pytest.fixture
def exported(run: Path, tmp_path: Path) -> Export:
    """Export the run; the file, and what the command said."""

    def export(*words: str) -> tuple[Path, list[str]]:
        out = tmp_path / "rows.parquet"
        code, said, err = engine_here("export", run, *words, "--out", out, cwd=tmp_path)
        assert code == 0, err
        return out, said.splitlines()

    return export


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, JSON values decoded, nulls left out."""
    jsons = {name: feature for name, feature in features(path).items() if "Json" in str(feature)}
    found = []
    for row in pq.read_table(path).to_pylist():
        for name in jsons:
            value = row[name]
            row[name] = [json.loads(item) for item in value] if isinstance(value, list) else value and json.loads(value)
        found.append({name: value for name, value in row.items() if value is not None})
    return found


def features(path: Path) -> dict[str, Any]:
    return json.loads(pq.read_schema(path).metadata[b"huggingface"])["info"]["features"]


CALL = {"type": "function", "id": "call_0_0", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
OPENING = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say one."}]
CALLED = {"role": "assistant", "content": "Sum.", "tool_calls": [CALL]}


def test_turns_are_prompts_and_replies_and_what_is_lost_is_counted(exported: Export) -> None:
    path, said = exported("--format", "trl")
    rows = rows_of(path)
    assert [(row["episode_id"], row["turn"]) for row in rows[:4]] == [("x/0", 0), ("x/0", 1), ("x/1", 0), ("x/1", 2)]
    assert rows[0]["prompt"] == OPENING
    assert rows[0]["completion"] == [CALLED]
    assert rows[0]["tools"][0]["function"]["name"] == "add"
    assert rows[1]["prompt"] == [
        *OPENING,
        CALLED,
        {"role": "tool", "name": "add", "tool_call_id": "call_0_0", "content": "3"},
    ]
    assert rows[1]["completion"] == [{"role": "assistant", "content": "one"}]
    words = [line.partition(": ")[2].split(" ", 1) for line in said[1:]]
    counts = {what: int(count) for count, what in words}
    assert counts["turns that were cut short or have a malformed call: a template writes them whole"] == 2
    assert counts["copies of other rows"] == 1 + 2 + 3 + 3
    assert counts["episodes with a failure of blame backend"] == 1
    assert counts["messages whose text spells special tokens, which the trainer's tokenizer reads as tokens"] >= 1


def test_filter_and_turns_choose(exported: Export) -> None:
    path, _ = exported("--format", "trl", "--filter", "outcome.solved", "--turns", "turn.last")
    assert [(row["episode_id"], row["turn"]) for row in rows_of(path)] == [("x/0", 1), ("y/0", 1)]


def test_conversations_are_whole_branches(exported: Export) -> None:
    path, said = exported(
        "--format", "trl", "--content", "conversations", "--filter", 'episode.task == "x"' if False else "true"
    )
    rows = rows_of(path)
    assert [message["role"] for message in rows[0]["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert (
        "left out: 2 conversations in which a turn was cut short or has a malformed call: a template writes it whole"
        in said
    )


def test_preferences_compare_replies_to_one_prompt(exported: Export) -> None:
    path, _ = exported("--format", "trl", "--content", "preferences")
    first = rows_of(path)[0]
    assert first["prompt"] == OPENING
    assert first["chosen"] == [CALLED]
    assert first["rejected"] == [{"role": "assistant", "content": "two"}]
    assert first["margin"] == pytest.approx(1.25)


@pytest.mark.parametrize("form", ["trl", "verl"])
def test_prompts_are_tasks_with_how_they_ended(form: str, exported: Export) -> None:
    path, said = exported("--format", form, "--content", "prompts", "--ground-truth", "word")
    first, second, _ = rows_of(path)
    assert first["prompt"] == OPENING
    told = first if form == "trl" else first["extra_info"]
    assert (told["task_id"], told["episodes"], told["solved"]) == ("x", 3, pytest.approx(1 / 3))
    truth = second["ground_truth"] if form == "trl" else second["reward_model"]["ground_truth"]
    assert truth == "two"
    assert any(line.startswith("not carried: 8 episodes: their replies") for line in said)
    assert any(line.startswith("not carried: 1 user:") for line in said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--format", "verl", "--content", "turns"], "--content turns is not one of --format verl, which has: prompts"),
        (["--format", "trl", "--ground-truth", "word"], "--ground-truth has no effect with --content turns"),
        (["--format", "verl", "--ground-truth", "wrd"], "--ground-truth wrd: a task has no such field"),
        (["--format", "verl", "--turns", "true"], "--turns has no effect with --format verl"),
        (
            ["--format", "trl", "--content", "prompts", "--turns", "true"],
            "--turns has no effect with --content prompts",
        ),
        (["--format", "trl", "--trainable-only"], "--trainable-only has no effect with --format trl"),
        (["--format", "jsonl", "--images", "paths"], "--images has no effect with --format jsonl"),
        (["--format", "trl", "--out", "x.jsonl"], "--format trl writes Parquet; name a file with the suffix .parquet"),
        (["--format", "trl", "--public"], "--public has an effect only with --push"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], said: str, run: Path, tmp_path: Path) -> None:
    code, _, err = engine_here(
        "export", run, *words, *([] if "--out" in words else ["--out", "x.parquet"]), cwd=tmp_path
    )
    assert code == 2
    assert said in err
    assert list(tmp_path.iterdir()) == []


# ---- the trainers' own loaders


def loaded(path: Path, tmp_path: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))


def ids_of(run: Path, episode: str, turn: int) -> list[int]:
    """The ids of a turn with its prompt."""
    with RunStore.open(run, readonly=True) as store:
        trajectory = store.trajectory(episode)
        found = trajectory.turns[turn]
        return trajectory.branches[found.branch].input_ids[: found.end].tolist()


def settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path / "out"), "report_to": "none", "use_cpu": True, "bf16": False, "max_steps": 1,
        "save_strategy": "no", "gradient_checkpointing": False, **more,
    }  # fmt: skip


@pytest.mark.slow  # importing trl takes seconds
@pytest.mark.parametrize("content", ["turns", "conversations"])
def test_trl_tokenises_the_ids_of_the_run(
    content: str, exported: Export, run: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    path, said = exported(
        "--format", "trl", "--content", content, "--filter", "!(outcome.reward > 0.9 && turns.assistant == 1)"
    )
    rows = loaded(path, tmp_path)
    config = trl.SFTConfig(**settings(tmp_path), max_length=None)
    trainer = trl.SFTTrainer(model=str(tiny_model_dir), args=config, train_dataset=rows)
    same = 0
    for row, made in zip(rows, trainer.train_dataset, strict=True):
        turn = row["turn"] if content == "turns" else -1
        ids = ids_of(run, row["episode_id"], turn)
        if made["input_ids"][: len(ids)] != ids:
            continue
        same += 1
        trained = [index for index, label in enumerate(made["labels"]) if label != -100]
        if content == "turns":
            with RunStore.open(run, readonly=True) as store:
                assert trained[0] == store.trajectory(row["episode_id"]).turns[turn].start
        assert len(made["input_ids"]) - len(ids) <= 1  # the line break that the template writes after a reply
    other = [int(line.split()[2]) for line in said if "with other token ids" in line]
    assert len(rows) - same == sum(other) if content == "turns" else same
    trainer.train()
    assert np.isfinite(trainer.state.log_history[-1]["train_loss"])


@pytest.mark.slow  # importing trl takes seconds
def test_trl_trains_preferences(exported: Export, tiny_model_dir: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    path, _ = exported("--format", "trl", "--content", "preferences")
    rows = loaded(path, tmp_path)
    trainer = trl.DPOTrainer(
        model=str(tiny_model_dir), args=trl.DPOConfig(**settings(tmp_path), max_length=None), train_dataset=rows
    )
    trainer.train()
    assert np.isfinite(trainer.state.log_history[-1]["train_loss"])


@pytest.mark.slow  # importing trl takes seconds
def test_trl_samples_from_prompts_and_gives_the_columns_to_rewards(
    exported: Export, tiny_model_dir: Path, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    path, _ = exported("--format", "trl", "--content", "prompts", "--ground-truth", "word")
    asked: list[tuple[str, Any, Any]] = []

    def reward(
        completions: list[Any], ground_truth: list[str], task: list[Any], prompts: list[Any], **_: Any
    ) -> list[float]:
        asked.extend(zip(ground_truth, task, prompts, strict=True))
        return [float(len(completion[0]["content"])) for completion in completions]

    config = trl.GRPOConfig(
        **settings(tmp_path, per_device_train_batch_size=4), num_generations=2, max_completion_length=4, beta=0.0
    )
    trainer = trl.GRPOTrainer(
        model=str(tiny_model_dir), args=config, train_dataset=loaded(path, tmp_path), reward_funcs=reward
    )
    trainer.train()
    assert {truth for truth, _, _ in asked} <= {"one", "two", "<|im_start|>"}
    assert asked
    assert all(task["word"] == truth and prompt[-1]["content"] == f"Say {truth}." for truth, task, prompt in asked)


@pytest.mark.slow  # importing verl takes seconds
def test_verl_loads_prompts(exported: Export, tiny_model_dir: Path) -> None:
    path, _ = exported("--format", "verl", "--ground-truth", "word")
    batch = load_with_verl(path, tiny_model_dir)
    assert batch["raw_prompt"][0] == OPENING
    assert [prompt[1]["content"] for prompt in batch["raw_prompt"]] == ["Say one.", "Say two.", "Say <|im_start|>."]
    assert batch["reward_model"][:2] == [
        {"style": "rule", "ground_truth": "one"},
        {"style": "rule", "ground_truth": "two"},
    ]
    assert batch["index"] == [0, 1, 2]
    assert [each["task_id"] for each in batch["extra_info"]] == ["x", "y", "<|im_start|>"]
    assert json.loads(batch["extra_info"][1]["task"]) == {"id": "y", "word": "two"}
    assert batch["data_source"] == ["sums"] * 3
