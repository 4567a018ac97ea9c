"""A training on written episodes: the cross-entropy of their sampled tokens, on exactly the rows that were chosen."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from ended_runs import run_to_end
from nets_for_tests import plain
from slow_cases import slow_but
from trainings import begin_training, policy_weights
from transformers import AutoModelForCausalLM, AutoTokenizer
from written_specs import TALKS_ON_WHEN_CUT, save_spec

from engine.errors import StoreError, TrainError
from engine.plugins.sft.demonstrations import demonstrations
from engine.spec.load import load_spec
from engine.store import training as folders
from engine.store.header import RunHeader
from engine.store.loader import read_rows
from engine.store.lock import RunLock
from engine.store.rows.export import export_rows, write_jsonl
from engine.tokens.loading import load_format
from engine.train import trainer as trainer_module
from engine.train.batch_log import BatchLog
from engine.train.metrics import MetricsLog, read_metrics
from engine.train.trainer import Trainer
from engine.validate import check_spec


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """The rows of 24 episodes of two turns, of a tiny model with random weights, as `engine export` writes them."""
    folder = tmp_path_factory.mktemp("exported")
    spec = yaml_spec(tiny_model_dir)
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    loaded = load_spec(folder / "spec.yaml")
    ran = asyncio.run(run_to_end(loaded, folder, header=RunHeader.of(loaded, run_id="run")))
    with ran.store as store:
        write_jsonl(export_rows(store), folder / "rows.jsonl")
    return folder / "rows.jsonl"


def yaml_spec(model: Path, **changes: Any) -> dict[str, Any]:
    return {
        "spec": "episode/v1",
        "name": "sft",
        "model": {"path": str(model)},
        "backend": {"kind": "local", "dtype": "float32", "max_batch": 16},
        "sampling": {"temperature": 1.3},
        "tasks": {"source": "inline", "rows": [{"say": f"word {number}"} for number in range(6)]},
        "prompt": [{"role": "user", "content": "Say {{say}}."}],
        "user": {"use": "code_for_training:Listener"},
        "machine": TALKS_ON_WHEN_CUT,
        "limits": {"turn_tokens": 6, "assistant_turns": 2, "episode_tokens": 64},
        "rollout": {"samples_per_task": 4, "seed": 3},
    } | changes


@pytest.fixture
def sft_spec(tmp_path: Path, tiny_model_dir: Path, exported: Path) -> Any:
    def make(train: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **changes: Any) -> Path:
        section = {"kind": "sft", "data": {"path": str(exported), "episodes_per_step": 5} | (data or {}), "steps": 3}
        section |= {"optimizer": {"lr": 0.003}, "checkpoints": {"every": 2}} | (train or {})
        return save_spec(tmp_path / "sft.yaml", yaml_spec(tiny_model_dir, train=section, **changes))

    return make


def begin(spec: Path, out: Path) -> Trainer:
    loaded = load_spec(spec)
    return Trainer(loaded, folders.begin(out, RunHeader.of(loaded)))


def resumed(trainer: Trainer) -> Trainer:
    return Trainer(folders.read_header(trainer.folder).loaded_spec(), trainer.folder)


def losses(trainer: Trainer) -> list[tuple[int, float]]:
    return [(int(line["step"]), line["loss"]) for line in read_metrics(trainer.folder)]


@pytest.mark.parametrize("tokens", slow_but([8192, 40], 40))
async def test_the_loss_is_the_cross_entropy_of_the_trained_tokens(
    tokens: int, sft_spec: Any, exported: Path, tmp_path: Path, tiny_model_dir: Path
) -> None:
    """At temperature 1, whatever the sampler's, over whole steps and for any size of micro-batches."""
    spec = sft_spec(train={"memory": {"max_tokens_per_microbatch": tokens}, "optimizer": {"lr": 1e-9}})
    trainer = begin(spec, tmp_path)
    await trainer.run()
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    data = demonstrations(trainer.loaded)
    vocab = load_format(trainer.loaded.spec.model, trainer.loaded.base).vocab_size
    expected = []
    for step in range(3):
        rows = data.rows(data.batch(step, None))
        assert len({row.episode.episode_id for row in rows}) == 5
        with torch.no_grad():
            expected.append((step + 1, -float(plain(model, rows, vocab=vocab)[0].mean())))
    for (step, loss), (wanted_step, wanted) in zip(losses(trainer), expected, strict=True):
        assert step == wanted_step
        assert loss == pytest.approx(wanted, abs=1e-6)
    counts = [(line["sft/episodes"], line["sft/epoch"]) for line in read_metrics(trainer.folder)]
    assert counts == [(5.0, 5 / 24), (5.0, 10 / 24), (5.0, 15 / 24)]
    assert not any(
        name.startswith(("sampler", "staleness", "reward")) for line in read_metrics(trainer.folder) for name in line
    )


def test_an_epoch_has_each_sampled_token_of_the_good_episodes_once(sft_spec: Any, exported: Path) -> None:
    rows = list(read_rows(exported))
    middle = sorted(row["outcome"]["reward"] for row in rows)[len(rows) // 2]
    loaded = load_spec(sft_spec(data={"min_reward": middle}))
    data = demonstrations(loaded)
    good = [row for row in rows if row["outcome"]["reward"] >= middle]
    assert 0 < len(data) < 24
    for epoch in range(2):
        found = data.rows(range(epoch * len(data), (epoch + 1) * len(data)))
        wanted = sorted((row["episode_id"], row["branch"], row["input_ids"].tolist()) for row in good)
        identities = [(row.episode.episode_id, row.branch.index, row.branch.input_ids.tolist()) for row in found]
        assert sorted(identities) == wanted
        assert sum(len(row.places) for row in found) == data.tokens
    assert data.left_out == {f"reward below {middle:g}": len(rows) - len(good)}
    assert data.batch(0, None) == [0, 1, 2, 3, 4]
    assert [row.episode.episode_id for row in data.rows(range(len(data)))] != [
        row.episode.episode_id for row in data.rows(range(len(data), 2 * len(data)))
    ]


def test_a_reward_by_name_and_rows_that_are_not_trained_on(sft_spec: Any, exported: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in exported.read_text().splitlines()]
    lines[0]["trainable"] = False
    lines[1]["outcome"]["rewards"] = []
    changed = tmp_path / "more"
    changed.mkdir()
    (changed / "a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (changed / "b.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    data = demonstrations(load_spec(sft_spec(data={"path": str(changed), "min_reward": -9.0, "reward": "vowels"})))
    assert data.left_out == {
        "not trainable": 2,
        "no reward `vowels`": 2,
        "copies of other rows": len(lines) - 2,
    }
    assert data.row_count == len(lines) - 2


async def test_epochs_end_exactly(sft_spec: Any, tmp_path: Path) -> None:
    spec = sft_spec(train={"epochs": 1.5}, data={"episodes_per_step": 10})
    trainer = begin(spec, tmp_path)
    result = await trainer.run()
    assert result.steps == 4  # 36 episodes
    assert [line["sft/episodes"] for line in read_metrics(trainer.folder)] == [10, 10, 10, 6]
    assert read_metrics(trainer.folder)[-1]["sft/epoch"] == 1.5


class Killed(BaseException):
    """Ends a training as a kill does."""


KILLS = [
    (BatchLog, "append", 3, False),
    (BatchLog, "append", 3, True),
    (trainer_module, "write_checkpoint", 1, True),
    (MetricsLog, "write", 3, True),
]


@pytest.mark.parametrize("kill", slow_but(KILLS, KILLS[1]))
async def test_a_killed_training_that_is_resumed_is_the_one_that_was_not_killed(
    kill: tuple[Any, str, int, bool], sft_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, call, after = kill
    spec = sft_spec(train={"steps": 5, "optimizer": {"lr": 0.003, "schedule": "cosine"}})
    whole = begin(spec, tmp_path / "whole")
    await whole.run()
    killed, true, calls = begin(spec, tmp_path / "killed"), getattr(owner, name), []

    def method(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call and not after:
            raise Killed
        told = true(*args, **kwargs)
        if len(calls) == call:
            raise Killed
        return told

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, method)
        with pytest.raises(Killed):
            await killed.run()
    result = await resumed(killed).run()
    assert result.steps == 5
    assert losses(killed) == losses(whole)
    assert all(
        torch.equal(a, b)
        for a, b in zip(policy_weights(whole.folder).values(), policy_weights(killed.folder).values(), strict=True)
    )


async def test_a_stop_is_saved_and_a_second_writer_refused(sft_spec: Any, tmp_path: Path) -> None:
    trainer, stop = begin(sft_spec(), tmp_path), asyncio.Event()
    trainer._on_step = lambda step, _: stop.set() if step == 1 else None
    result = await trainer.run(stop=stop)
    assert (result.interrupted, result.steps) in {(True, 1), (True, 2)}
    lock = RunLock(trainer.folder)
    with pytest.raises(StoreError, match="is being written by process"):
        await resumed(trainer).run()
    lock.release()
    assert (await resumed(trainer).run()).steps == 3
    assert [step for step, _ in losses(trainer)] == [1, 2, 3]


def test_changed_rows_are_refused_at_a_resume(sft_spec: Any, exported: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_bytes(exported.read_bytes())
    trainer = begin(sft_spec(data={"path": str(file)}), tmp_path)
    asyncio.run(trainer.run())
    file.write_text("".join(exported.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(
        TrainError, match="have changed since this training began: 24 episodes and 24 rows then, 23 and 23"
    ):
        asyncio.run(resumed(trainer).run())


@pytest.mark.slow
async def test_an_rl_training_begins_with_the_model(sft_spec: Any, train_spec: Any, tmp_path: Path) -> None:
    """Also with LoRA: its merged model is in the training's folder."""
    trainer = begin(sft_spec(train={"steps": 1, "lora": {"rank": 2}, "eval": {"limit": 2}}), tmp_path)
    result = await trainer.run()
    assert result.model == trainer.folder / "model"
    assert [line["step"] for line in read_metrics(trainer.folder) if "eval/reward" in line] == [0, 1]
    trainer = begin(sft_spec(train={"steps": 1}), tmp_path / "full")
    full = (await trainer.run()).checkpoint
    assert full is not None
    for model in (result.model, full / "model"):
        loaded = load_spec(train_spec(name=f"rl-{model.parent.name}", train={"steps": 1}, model={"path": str(model)}))
        ended = await begin_training(loaded, tmp_path).run()
        assert ended.last["sampler/diff_max"] < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("loss_mask"), "row 1 is not a row of `engine export`: it has no `loss_mask`"),
        (lambda row: row["loss_mask"].append(1), "have different lengths"),
        (lambda row: row["loss_mask"].__setitem__(0, 1), "its first token is trained, and nothing predicts it"),
        (lambda row: row["input_ids"].__setitem__(0, 999_999), "the rows have ids up to 999999"),
        (lambda row: row.update(input_ids=[7] * len(row["input_ids"])), "do not contain the user's message"),
        (lambda row: row.update(trainable=False), "has no row to train on: 0 episodes.*1 rows left out: not trainable"),
    ],
)
def test_a_bad_row_is_refused_before_the_first_step(
    change: Any, message: str, sft_spec: Any, exported: Path, tmp_path: Path
) -> None:
    row = json.loads(exported.read_text().splitlines()[0])
    change(row)
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(TrainError, match=message):
        asyncio.run(begin(sft_spec(data={"path": str(file)}), tmp_path).run())


def rules(spec: Path) -> list[str]:
    return [str(item).partition(": ")[2] for item in check_spec(load_spec(spec)) if item.rule.startswith("train.")]


def test_what_has_no_effect_is_refused_by_name(sft_spec: Any, tmp_path: Path) -> None:
    spec = sft_spec(train={"tasks_per_step": 2, "loss": {"kind": "grpo"}, "weight_sync": {"method": "disk"}})
    found = [item.message for item in check_spec(load_spec(spec)) if item.rule == "train.sft"]
    assert [each.partition(" with")[0] for each in found] == [
        "`train.loss` has no effect",
        "`train.tasks_per_step` has no effect",
        "`train.weight_sync` has no effect",
    ]
    (tmp_path / "child.yaml").write_text(
        f"extends: {spec.name}\nspec: episode/v1\nname: child\ntrain: {{kind: sft, seed: 4}}\n"
    )
    child = load_spec(tmp_path / "child.yaml")
    assert [item.message for item in check_spec(child) if item.rule == "train.sft"] == []
    assert child.spec.train is not None
    assert child.spec.train.effective().tasks_per_step == 8


@pytest.mark.parametrize(
    ("train", "words"),
    [({"kind": "sft"}, "`kind: sft` needs `data`"), ({"data": {"path": "x"}}, "`data` belongs to `kind: sft`")],
)
def test_kind_and_data_belong_together(train: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(yaml_spec(tmp_path, train=train)))
    found = [item for item in check_spec(load_spec(tmp_path / "s.yaml")) if item.rule == "train.sft"]
    assert [(item.message, item.severity) for item in found] == [(words, "error")]


def test_rows_are_read_from_their_files(sft_spec: Any) -> None:
    data = demonstrations(load_spec(sft_spec()))
    first = data.rows([0])[0]
    assert first.advantages.tolist() == [1.0] * int(first.branch.loss_mask.sum())
    assert first.branch.logprobs.tolist() == [0.0] * len(first.branch.input_ids)
    assert first.branch.input_ids.dtype == np.int32


@pytest.fixture(scope="session")
def sft_rows_file(exported: Path) -> Path:
    """The same episodes as `engine export --format sft` writes them, without the first turns' loss."""
    from typer.testing import CliRunner

    from engine.cli.main import app

    out = exported.with_name("sft.jsonl")
    words = ["export", "run", "--runs", str(exported.parent), "--format", "sft", "--out", str(out)]
    result = CliRunner().invoke(app, [*words, "--turns", "turn.index == 1", "--filter", "outcome.reward > -1000.0"])
    assert result.exit_code == 0, result.output
    return out


async def test_rows_for_fine_tuning_are_trained_on_with_their_masks(
    sft_spec: Any, sft_rows_file: Path, tmp_path: Path
) -> None:
    trainer = begin(sft_spec(data={"path": str(sft_rows_file)}, train={"steps": 1}), tmp_path)
    await trainer.run()
    data = demonstrations(trainer.loaded)
    rows = data.rows(data.batch(0, None))
    assert data.left_out == {}
    assert {int(turn) for row in rows for turn in row.branch.turn_ids[row.places]} == {1}
    assert len(losses(trainer)) == 1


@pytest.mark.slow  # importing trl takes seconds
def test_rows_for_fine_tuning_load_in_trl(sft_rows_file: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    """TRL's own preparation of the file gives the ids and the labels of every row."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    written = [json.loads(line) for line in sft_rows_file.read_text().splitlines()]
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32),
        args=trl.SFTConfig(output_dir=str(tmp_path), max_length=None, report_to="none", use_cpu=True, bf16=False),
        train_dataset=datasets.load_dataset(
            "json", data_files=str(sft_rows_file), split="train", cache_dir=str(tmp_path / "cache")
        ),
        processing_class=AutoTokenizer.from_pretrained(tiny_model_dir),
    )
    found = [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]
    assert found == [
        (
            row["input_ids"],
            [id_ if mask else -100 for id_, mask in zip(row["input_ids"], row["loss_mask"], strict=True)],
        )
        for row in written
    ]
    assert any(label != -100 for _, labels in found for label in labels)


@pytest.mark.slow  # importing trl takes seconds
async def test_loss_and_update_are_those_of_trl(sft_spec: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rate = 0.01
    spec = sft_spec(train={"steps": 2, "shuffle": False, "optimizer": {"lr": rate}}, data={"episodes_per_step": 12})
    ours = begin(spec, tmp_path)
    await ours.run()
    rows = demonstrations(ours.loaded).rows(range(24))
    examples = [
        {
            "input_ids": row.branch.input_ids.tolist(),
            "labels": np.where(row.loss_mask() == 1, row.branch.input_ids, -100).tolist(),
        }
        for row in rows
    ]
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_train_epochs": 1}
    settings |= {"learning_rate": rate, "lr_scheduler_type": "constant", "max_grad_norm": 1.0, "weight_decay": 0.0}
    settings |= {"logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False}
    config = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"), dataset_kwargs={"skip_prepare_dataset": True}, max_length=None,
        gradient_checkpointing=False, optim="adamw_torch", **settings,
    )  # fmt: skip
    theirs = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32),
        args=config,
        train_dataset=datasets.Dataset.from_list(examples),
        processing_class=load_format(ours.loaded.spec.model, ours.loaded.base).tokenizer,
    )
    theirs.get_train_dataloader = lambda: torch.utils.data.DataLoader(
        theirs.train_dataset, batch_size=4, collate_fn=theirs.data_collator
    )
    theirs.train()
    found = [line["loss"] for line in theirs.state.log_history if "loss" in line]
    assert [loss for _, loss in losses(ours)] == pytest.approx(found, abs=2e-6)
    weights = dict(theirs.model.named_parameters())
    for name, tensor in policy_weights(ours.folder).items():
        # AdamW's step has the size of the rate also where a gradient is rounding noise around 0.
        assert (tensor - weights[name]).abs().mean() < 1e-3 * rate, name
