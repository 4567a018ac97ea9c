"""TRL's GRPOTrainer on episodes of the engine: the rows arrive as they are, or the training stops."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vision_kit
import yaml
from training_rows import row_of
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from vision_code import MACHINE
from written_specs import TALKS_ON_WHEN_CUT, save_spec

from engine.errors import TrainError
from engine.plugins.trainers.handover import BatchSums, HandedRow
from engine.plugins.trainers.trl import EngineRollouts, grpo_arguments
from engine.plugins.trainers.trl.grpo import check_batches
from engine.spec.load import load_spec
from engine.store import RunStore
from engine.store.loader import collate, forward_inputs
from engine.store.rows.export import export_rows

SPEC: dict[str, Any] = {
    "spec": "episode/v1",
    "name": "trl",
    "backend": {"kind": "local", "max_batch": 16},
    "tasks": {
        "source": "inline",
        "rows": [{"id": f"t{number}", "say": f"word {number}"} for number in range(4)],
        "id": "id",
    },
    "prompt": [{"role": "user", "content": "Say {{say}}."}],
    "user": {"use": "code_for_training:Listener"},
    "machine": TALKS_ON_WHEN_CUT,
    "limits": {"turn_tokens": 6, "assistant_turns": 2, "episode_tokens": 64},
    "rewards": {"credit": {"method": "turn_return", "gamma": 0.5}},
    "rollout": {"samples_per_task": 4, "seed": 3},
    "train": {
        "steps": 2,
        "tasks_per_step": 2,
        "device": "cpu",
        "optimizer": {"lr": 0.003},
        "dynamic_sampling": False,
        "rollout_correction": {"kind": "none"},
    },
}
IMAGES: dict[str, Any] = {
    "tasks": {"source": "inline", "rows": [{"id": "a"}, {"id": "b"}], "id": "id"},
    "prompt": None,
    "user": None,
    "environment": {"use": "trl_code:PaidGallery"},
    "machine": MACHINE,
    "limits": {"turn_tokens": 5, "assistant_turns": 3, "episode_tokens": 256},
}


@pytest.fixture
def make(tmp_path: Path, tiny_model_dir: Path) -> Callable[..., Path]:
    """Write the spec, with what the test changes; keys of `train` are merged."""

    def write(train: dict[str, Any] | None = None, **changes: Any) -> Path:
        spec = {"model": {"path": str(tiny_model_dir)}} | SPEC | changes
        spec["train"] = SPEC["train"] | (train or {})
        return save_spec(tmp_path / "spec.yaml", {key: value for key, value in spec.items() if value is not None})

    return write


def configured(rollouts: EngineRollouts, **changes: Any) -> Any:
    from trl import GRPOConfig

    arguments = grpo_arguments(rollouts.loaded) | {"save_strategy": "no", "disable_tqdm": True} | changes
    return GRPOConfig(output_dir=str(rollouts.folder / "model"), **arguments)


def trainer_of(rollouts: EngineRollouts, **changes: Any) -> Any:
    pytest.importorskip("trl")
    from engine.plugins.trainers.trl import EngineGRPOTrainer

    return EngineGRPOTrainer(rollouts, configured(rollouts, **changes))


class Seen:
    """What the loss of each slice read and returned."""

    def __init__(self, trainer: Any) -> None:
        self.slices: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.logprobs: list[torch.Tensor] = []
        inner = trainer._compute_loss

        def watched(model: Any, inputs: dict[str, Any]) -> Any:
            loss = inner(model, inputs)
            self.slices.append(inputs)
            self.losses.append(float(loss.detach()))
            self.logprobs.append(trainer._newest)
            return loss

        trainer._compute_loss = watched


def plain_logprobs(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Log-probs of the completions, one row at a time without padding. float64 [rows, completion]."""
    found = torch.zeros(batch["completion_ids"].shape, dtype=torch.float64)
    for place in range(len(found)):
        prompt = batch["prompt_ids"][place][batch["prompt_mask"][place] == 1]
        completion = batch["completion_ids"][place][batch["completion_mask"][place] == 1]
        ids = torch.cat([prompt, completion])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].double()
        chosen = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        found[place, : len(completion)] = chosen[len(prompt) - 1 :]
    return found


# --- the hand-over, without TRL ------------------------------------------------------------------------------


def handed(seed: int) -> HandedRow:
    draw = np.random.default_rng(seed)
    columns = {
        "input_ids": draw.integers(0, 100, 9, dtype=np.int32),
        "loss_mask": [0, 0, 0, 1, 1, 0, 0, 1, 0],
        "logprobs": -draw.random(9).astype(np.float32),
        "advantages": draw.standard_normal(9),
    }
    return HandedRow.of(row_of(columns))


def batch_of(rows: list[HandedRow]) -> dict[str, Any]:
    return {
        "prompt_mask": torch.tensor([[1] * len(row.prompt_ids) for row in rows]),
        "completion_mask": torch.tensor([[1] * len(row.completion_ids) for row in rows]),
        "tool_mask": torch.tensor([row.mask for row in rows]),
        "advantages": torch.tensor(np.stack([row.advantages for row in rows])),
    }


def test_a_row_is_cut_in_front_of_its_first_trained_token() -> None:
    row = handed(0)
    assert (len(row.prompt_ids), len(row.completion_ids)) == (3, 6)
    assert row.mask == [1, 1, 0, 0, 1, 0]
    assert [at for at, value in enumerate(row.advantages) if value] == [0, 1, 4]
    assert [at for at, value in enumerate(row.logprobs) if value] == [0, 1, 4]


def test_the_same_batch_in_slices_has_the_same_sums() -> None:
    rows = [handed(seed) for seed in range(4)]
    check_batches(BatchSums.of_rows(rows), [batch_of(rows[2:]), batch_of(rows[:2])])


@pytest.mark.parametrize(
    "lose",
    [
        lambda batch: batch["completion_mask"][:, -1].zero_(),
        lambda batch: batch["tool_mask"][1, 1].zero_(),
        lambda batch: batch["advantages"].mul_(0.5),
        lambda batch: batch.update(advantages=batch["advantages"].mean(1)),
        lambda batch: batch["advantages"].roll(1, 1) is batch["advantages"].copy_(batch["advantages"].roll(1, 1)),
        lambda batch: batch.pop("tool_mask"),
    ],
    ids=["a token", "a trained token", "scaled", "one advantage for each row", "moved to observations", "no mask"],
)
def test_what_is_lost_on_the_way_stops_the_training(lose: Callable[[dict[str, Any]], Any]) -> None:
    rows = [handed(seed) for seed in range(4)]
    batch = batch_of(rows)
    lose(batch)
    with pytest.raises(TrainError, match="no update is made with it") as caught:
        check_batches(BatchSums.of_rows(rows), [batch])
    assert caught.value.kind == "handover"


@pytest.mark.slow
@pytest.mark.trainers
def test_trl_is_imported_only_for_its_trainer() -> None:
    code = "import sys; import engine.plugins.trainers.trl; sys.exit('trl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("train", "changes", "said"),
    [
        ({"asynchrony": {"max_staleness": 1}}, {}, "the weight version of each token"),
        ({}, {"backend": {"kind": "sglang", "urls": ["http://127.0.0.1:1"]}}, "does not sample with TRL's model"),
        ({"critic": {"kind": "probe"}}, {"rewards": {"credit": {"method": "gae"}}}, "needs a critic"),
    ],
)
def test_specs_that_do_not_reach_the_loss_are_refused(
    make: Any, tmp_path: Path, train: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(TrainError, match=said):
        EngineRollouts(make(train, **changes), tmp_path / "out")


@pytest.mark.parametrize(
    ("train", "named"),
    [
        ({"loss": {"kind": "reinforce"}}, "train.loss.kind: reinforce"),
        ({"kl": {"coefficient": 0.1, "estimator": "k1"}}, "train.kl.estimator: k1"),
        ({"lora": {}}, "train.lora"),
        ({"freeze": ["embed"]}, "train.freeze"),
        ({"minibatches": 2, "tasks_per_step": 3}, "train.minibatches: 2"),
    ],
)
def test_settings_without_a_counterpart_are_named(make: Any, train: dict[str, Any], named: str) -> None:
    with pytest.raises(TrainError, match=f"no argument .*{named}"):
        grpo_arguments(load_spec(make(train)))


# --- with TRL ------------------------------------------------------------------------------------------------


@pytest.fixture
def rollouts(make: Any, tmp_path: Path) -> Iterator[EngineRollouts]:
    with EngineRollouts(make(), tmp_path / "out") as found:
        yield found


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_loss_and_advantages_of_a_batch_are_those_of_the_rows(make: Any, tmp_path: Path, loss: str) -> None:
    """Eight episodes of two turns in two microbatches: the loss by hand, in float64, from the stored rows alone."""
    rewards = {
        "credit": {"method": "turn_return", "gamma": 0.5, "baseline": "none"}
    }  # else the sum of a group is about 0
    path = make({"loss": {"kind": loss}, "steps": 1}, rewards=rewards)
    with EngineRollouts(path, tmp_path / "out") as rollouts:
        trainer = trainer_of(rollouts)
        seen = Seen(trainer)
        trainer.train()
        handed_rows = rollouts.handed
        mean, rollouts.handed = rollouts.mean_length(), []
        assert rollouts.mean_length() == mean  # a later launch in the folder has the same constant
    sampled = AutoModelForCausalLM.from_pretrained(rollouts.model_folder, dtype=torch.float32).eval()
    store = RunStore.open(tmp_path / "out" / "rollouts", readonly=True)
    rows = {tuple(row["input_ids"].tolist()): row for row in export_rows(store)}
    assert len(handed_rows) == len(rows) == 8
    assert len({float(value) for row in handed_rows for value in row.advantages}) > 8  # by turn, not by row
    by_hand, trained, used = 0.0, sum(int(row["loss_mask"].sum()) for row in rows.values()), 0
    for batch in seen.slices:
        now = plain_logprobs(sampled, batch)
        for place in range(len(now)):
            prompt = batch["prompt_ids"][place][batch["prompt_mask"][place] == 1].tolist()
            completion = batch["completion_ids"][place][batch["completion_mask"][place] == 1].tolist()
            row = rows[tuple(prompt + completion)]
            mask = row["loss_mask"][len(prompt) :] == 1
            advantages = row["advantages"][len(prompt) :].astype(np.float64)
            given = batch["advantages"][place, : len(completion)].numpy()
            assert np.array_equal(given, advantages.astype(np.float32) * mask)
            assert np.array_equal(
                batch["old_per_token_logps"][place, : len(completion)].numpy()[mask],
                row["logprobs"][len(prompt) :][mask],
            )
            ratio = np.exp(now[place, : len(completion)].numpy() - row["logprobs"][len(prompt) :])
            terms = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.28 if loss == "dapo" else 1.2) * advantages)
            weight = {"grpo": 1 / (8 * mask.sum()), "dr_grpo": 1 / trained, "dapo": 1 / trained}[loss]
            by_hand -= float((terms * mask).sum()) * weight
            used += 1
    assert used == 8
    assert mean == trained / 8
    assert sum(seen.losses) == pytest.approx(by_hand, abs=1e-6)
    assert abs(by_hand) > 0.01
    (log,) = [line for line in trainer.state.log_history if "sampler/diff_max" in line]
    assert log["sampler/diff_max"] < 1e-4
    assert log["reward/mean"] == pytest.approx(log["reward"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.trainers
def test_a_training_learns_and_samples_with_the_weights_of_each_step(rollouts: EngineRollouts) -> None:
    """After each update the sampler's log-probs are the trainer's again, and the rows have the new version."""
    trainer = trainer_of(rollouts, max_steps=3)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    gaps = [line["sampler/diff_max"] for line in trainer.state.log_history if "sampler/diff_max" in line]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4
    assert any(not torch.equal(before[name], value) for name, value in trainer.model.named_parameters())
    assert trainer.model.training
    assert trainer.model.config._attn_implementation == "sdpa"
    store = RunStore.open(rollouts.folder / "rollouts", readonly=True)
    rows = list(export_rows(store))
    assert sorted({int(version) for row in rows for version in row["weight_versions"][row["loss_mask"] == 1]}) == [
        0,
        1,
        2,
    ]
    assert len({row["episode_id"] for row in rows}) == len(rows) == 24


@pytest.mark.slow
@pytest.mark.trainers
def test_rows_of_the_embedding_without_a_token_have_no_probability(
    make: Any, tmp_path: Path, tiny_model_dir: Path
) -> None:
    """As in published models, whose embedding is padded: TRL's log-probs stay those of the sampler over several updates."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    model.resize_token_embeddings(model.config.vocab_size + 200, mean_resizing=False)
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "padded"))
    model.save_pretrained(folder)
    with EngineRollouts(make(model={"path": str(folder)}), tmp_path / "out") as rollouts:
        trainer = trainer_of(rollouts, max_steps=3)
        assert trainer.model.get_output_embeddings().weight.shape[0] == 1200
        trainer.train()
    gaps = [line["sampler/diff_max"] for line in trainer.state.log_history if "sampler/diff_max" in line]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4


@pytest.mark.slow
@pytest.mark.trainers
def test_a_batch_that_lost_something_is_not_trained_on(rollouts: EngineRollouts) -> None:
    trainer = trainer_of(rollouts)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    whole = trainer._generate_and_score_completions

    def losing(inputs: Any) -> Any:
        batch = whole(inputs)
        batch["advantages"] = batch["advantages"].mean(1)
        return batch

    trainer._generate_and_score_completions = losing
    with pytest.raises(TrainError, match="TRL's batch is not what the engine handed over"):
        trainer.train()
    assert all(torch.equal(before[name], value) for name, value in trainer.model.named_parameters())


@pytest.mark.slow
@pytest.mark.trainers
def test_a_second_launch_in_the_folder_runs_other_episodes(make: Any, tmp_path: Path) -> None:
    for _ in range(2):
        with EngineRollouts(make({"steps": 1}), tmp_path / "out") as rollouts:
            trainer_of(rollouts).train()
    store = RunStore.open(tmp_path / "out" / "rollouts", readonly=True)
    assert len({each.episode_id for each in store.trajectories()}) == 16


@pytest.mark.slow
@pytest.mark.trainers
def test_failed_episodes_leave_rows_without_trained_tokens(make: Any, tmp_path: Path) -> None:
    """TRL needs a row for each prompt. What an environment's fault ended is not trained on, and is counted."""
    changes = {"user": {"use": "trl_code:SometimesDown"}}
    with EngineRollouts(make({"steps": 1, "min_group": 1}, **changes), tmp_path / "out") as rollouts:
        trainer = trainer_of(rollouts)
        seen = Seen(trainer)
        trainer.train()
    empty = sum(int((batch["tool_mask"] * batch["completion_mask"]).sum(1).eq(0).sum()) for batch in seen.slices)
    (line,) = [line for line in trainer.state.log_history if "trl/empty_rows" in line]
    assert empty == line["trl/empty_rows"] == line["episodes/masked"] > 0
    assert all(np.isfinite(seen.losses))


FORGETFUL = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and not loop.last %}{{- 'Said.' }}{% else %}{{- message.content }}{% endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""Rewrites history: old replies are shortened, so each turn is a row of its own."""


@pytest.mark.slow
@pytest.mark.trainers
def test_an_episode_with_several_rows_stops_the_training_or_is_counted(make: Any, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = make({"steps": 1})
    spec = yaml.safe_load(path.read_text())
    for file in Path(spec["model"]["path"]).iterdir():
        shutil.copy(file, tmp_path / "model" / file.name)
    (tmp_path / "model" / "chat_template.jinja").write_text(FORGETFUL)
    spec["model"]["path"] = str(tmp_path / "model")
    path.write_text(yaml.safe_dump(spec))
    with EngineRollouts(path, tmp_path / "one") as rollouts:
        trainer = trainer_of(rollouts)
        with pytest.raises(TrainError, match="has 2 rows, and TRL takes one for each prompt") as caught:
            trainer.train()
    assert caught.value.kind == "handover"
    with EngineRollouts(path, tmp_path / "two", several_rows="leave_out") as rollouts:
        trainer = trainer_of(rollouts)
        trainer.train()
    (line,) = [line for line in trainer.state.log_history if "trl/left_out_tokens" in line]
    assert (line["trl/empty_rows"], line["trl/left_out_tokens"]) == (8, line["tokens/trained"])


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": 0.7}, "temperature=0.7: the spec samples with 1"),
        ({"mask_truncated_completions": True}, "train.overlong: mask"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold"),
        ({"loss_type": "vespo"}, "vespo"),
        ({"num_generations": 3, "generation_batch_size": 8, "per_device_train_batch_size": 8}, None),
    ],
)
def test_arguments_that_would_change_the_rows_are_refused(
    rollouts: EngineRollouts, changes: dict[str, Any], said: str | None
) -> None:
    if said is None:
        with pytest.raises(ValueError, match="num_generations"):  # TRL's own check
            configured(rollouts, **changes, steps_per_generation=None)
        return
    with pytest.raises(TrainError, match=said):
        trainer_of(rollouts, **changes)


def _swap_rows(batch: dict[str, Any]) -> None:
    """Two rows of tiles are exchanged."""
    for name in ("pixel_values", "pixel_attention_mask"):
        batch[name] = batch[name].flip(0)


def _swap_images(batch: dict[str, Any]) -> None:
    """The first two images of the batch are exchanged."""
    grids = batch["image_grid_thw"]
    pieces = list(torch.split(batch["pixel_values"], grids.prod(1).tolist()))
    batch["pixel_values"] = torch.cat([pieces[1], pieces[0], *pieces[2:]])
    batch["image_grid_thw"] = torch.cat([grids[1:2], grids[:1], grids[2:]])


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.parametrize(("family", "swap"), [("qwen2_5_vl", _swap_images), ("idefics3", _swap_rows)])
def test_exchanged_images_stop_the_training(
    make: Any, tmp_path: Path, tmp_path_factory: Any, family: str, swap: Callable[[dict[str, Any]], None]
) -> None:
    folder = vision_kit.BUILDERS[family](tmp_path_factory.mktemp("vlm") / "model")
    images = IMAGES | {
        "environment": {"use": "pixel_kit:SomeBlind"},
        "limits": IMAGES["limits"] | {"episode_tokens": 512},
    }
    path = make(model={"path": str(folder)}, **images)
    with EngineRollouts(path, tmp_path / "out") as rollouts:
        trainer = trainer_of(rollouts)
        inner = trainer._generate_and_score_completions

        def swapped(inputs: Any) -> dict[str, Any]:
            batch: dict[str, Any] = inner(inputs)
            swap(batch)
            return batch

        trainer._generate_and_score_completions = swapped
        with pytest.raises(TrainError, match="images: lost, changed, or in another order or row"):
            trainer.train()
        assert trainer.state.global_step == 0


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3", "smolvlm"])
def test_images_of_later_turns_reach_the_loss(make: Any, tmp_path: Path, tmp_path_factory: Any, family: str) -> None:
    """A tiny model, two steps: the first image is in the prompt and others are between replies.

    TRL's log-probs and the sampler's are those of a plain pass of transformers with all images, with placeholders of images excluded. The
    weights of the vision tower change.
    """
    folder = vision_kit.BUILDERS[family](tmp_path_factory.mktemp("vlm") / "model")
    path = make(model={"path": str(folder)}, **IMAGES | {"limits": IMAGES["limits"] | {"episode_tokens": 512}})
    with EngineRollouts(path, tmp_path / "out") as rollouts:
        trainer = trainer_of(rollouts)
        before = {name: value.clone() for name, value in trainer.model.named_parameters()}
        seen = Seen(trainer)
        trainer.train()
        images = [len(row.images) for row in rollouts.handed]
        vision = rollouts.format.vision
    assert vision is not None
    assert trainer.state.global_step == 2
    assert min(images) > 1
    assert any(
        "vis" in name and not torch.equal(before[name], value) for name, value in trainer.model.named_parameters()
    )
    rows = {
        tuple(row["input_ids"].tolist()): row
        for row in export_rows(RunStore.open(tmp_path / "out" / "rollouts", readonly=True))
    }
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    batch, found = seen.slices[0], seen.logprobs[0]
    trained = []
    for place in range(len(found)):
        prompt = batch["prompt_ids"][place][batch["prompt_mask"][place] == 1].tolist()
        completion = batch["completion_ids"][place][batch["completion_mask"][place] == 1].tolist()
        row = rows[tuple(prompt + completion)]
        trained.append(row)
        assert vision.placeholder_id in completion
        alone = collate([row], vision, pad_id=0)
        with torch.no_grad():
            logits = model(**forward_inputs(alone)).logits[0, :-1]
        chosen = alone["input_ids"][0, 1:, None]
        sampled = torch.from_numpy(row["loss_mask"][1:] == 1)
        plain = logits.log_softmax(-1).gather(-1, chosen)[:, 0]
        logits[:, vision.banned] = float("-inf")
        allowed = logits.log_softmax(-1).gather(-1, chosen)[:, 0]
        assert (allowed - plain)[sampled].abs().max() > 1e-3  # the placeholders have some probability
        mask = sampled[len(prompt) - 1 :]
        assert (found[place, : len(completion)][mask] - allowed[sampled]).abs().max() < 1e-5
        assert (torch.from_numpy(row["logprobs"][1:])[sampled] - allowed[sampled]).abs().max() < 1e-5
    together = forward_inputs(collate(trained, vision, pad_id=0))
    for name in vision.family.names:
        assert torch.equal(batch[name], together[name])
    gaps = [line["sampler/diff_max"] for line in trainer.state.log_history if "sampler/diff_max" in line]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
    assert "lm_head.bias" not in trainer.model.state_dict()


@pytest.mark.slow
@pytest.mark.trainers
def test_the_example_of_the_page_runs(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spec and the script of docs/from-trainers.md, with a tiny model and one step."""
    pytest.importorskip("trl")
    page = (Path(__file__).parents[3] / "docs" / "from-trainers.md").read_text().split("\n## From TRL\n")[1]
    spec = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    spec["model"]["path"] = str(tiny_model_dir)
    spec["train"] |= {"steps": 1, "device": "cpu"}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    monkeypatch.chdir(tmp_path)
    exec(page.split("```python\n")[1].split("```")[0], {})
    store = RunStore.open(tmp_path / "runs" / "with-trl" / "rollouts", readonly=True)
    assert len(list(store.trajectories())) == 64
