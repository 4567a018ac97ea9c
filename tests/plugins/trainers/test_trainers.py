"""What other trainers carry: the table, its page, and `engine validate --trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import engine_here
from trainer_evidence import CELLS, EVIDENCE, INSTALLED, PARTS
from written_specs import save_spec

from engine.errors import TrainError
from engine.plugins.trainers.capabilities import THINGS, TRAINERS, uses
from engine.plugins.trainers.rollouts import refuse_lost
from engine.spec.load import load_spec

ROOT = Path(__file__).parents[3]
PLAIN: dict[str, Any] = {
    "spec": "episode/v1",
    "name": "plain",
    "model": {"path": "org/m"},
    "tasks": {"source": "inline", "rows": [{"q": "?"}]},
    "prompt": [{"role": "user", "content": "{{q}}"}],
    "machine": "single_turn",
    "rewards": {"credit": {"method": "outcome"}, "scorer": {"use": "math-verify"}},
    "train": {"dynamic_sampling": False, "rollout_correction": {"kind": "none"}},
}


def used(folder: Path, **changes: Any) -> dict[str, str]:
    """The things that a spec uses, with the key that uses them."""
    merged = PLAIN | changes
    path = save_spec(folder / "spec.yaml", {key: value for key, value in merged.items() if value is not None})
    return {use.thing: ".".join(map(str, use.path)) for use in uses(load_spec(path))}


def test_every_trainer_says_something_of_every_thing() -> None:
    assert " ".join(TRAINERS) == "trl verl verl_agent_loop slime skyrl areal prime_rl rllm tinker art"
    for name, trainer in TRAINERS.items():
        assert list(trainer.things) == list(THINGS), name
        assert all(carried.how for carried in trainer.things.values())


def test_the_page_is_made_of_the_table() -> None:
    page = (ROOT / "docs" / "trainers.md").read_text()
    assert all(carried.how in page for trainer in TRAINERS.values() for carried in trainer.things.values())


def test_what_ran_names_its_tests() -> None:
    """A trainer whose hand-over ran has an adapter; what ran names files that exist, and the other parts name none."""
    assert list(EVIDENCE) == [name for name, trainer in TRAINERS.items() if trainer.ran]
    assert [name for name in EVIDENCE if name in INSTALLED] == list(INSTALLED)
    for name, parts in EVIDENCE.items():
        assert list(parts) == list(PARTS), name
        for part, evidence in parts.items():
            assert bool(evidence.tests) == (evidence.seen in ("ran", "scripted")), (name, part)
            assert [file for file in evidence.tests if not (ROOT / file).is_file()] == []
        assert (parts["images"].seen == "refused") == (TRAINERS[name].things["images"].status == "refused")


def test_the_table_of_tests_names_files_that_exist() -> None:
    for thing, files in CELLS.values():
        assert thing in THINGS
        assert set(files) == set(EVIDENCE)
        assert [file for file in files.values() if not (ROOT / file).is_file()] == []


USER = {"user": {"use": "m:User"}, "machine": "tools_and_user"}
TRAIN: dict[str, Any] = PLAIN["train"]
USED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "one turn": ({}, {}),
    "observations": (USER | {"rewards": {"credit": {"method": "outcome"}}}, {"masks": "machine"}),
    "credit by turn": (
        USER | {"rewards": {"credit": {"method": "turn_return"}}},
        {"masks": "machine", "turn_credit": "rewards.credit"},
    ),
    "credit by turn in episodes of one turn": ({"rewards": {"credit": {"method": "turn_return"}}}, {}),
    "credit by token": ({"rewards": {"credit": {"method": "gae"}}}, {"token_bonuses": "rewards.credit"}),
    "bonuses": (
        {"train": TRAIN | {"advantage_bonuses": [{"use": "m:bonus"}]}},
        {"token_bonuses": "train.advantage_bonuses"},
    ),
    "images": ({"model": {"path": "org/m", "max_images": 2}}, {"images": "model.max_images"}),
    "images of the prompt": (
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": "{{q}}"}]}]},
        {"images": "prompt.0"},
    ),
    "two sources of rewards": (
        USER | {"rewards": PLAIN["rewards"]},
        {"masks": "machine", "reward_names": "rewards"},
    ),
    "a correction": ({"train": {"dynamic_sampling": False}}, {"logprobs": "train.rollout_correction"}),
    "old weights": (
        {"train": TRAIN | {"asynchrony": {"max_staleness": 1}}},
        {"versions": "train.asynchrony.max_staleness"},
    ),
    "a KL penalty in the loss": ({"train": TRAIN | {"kl": {"coefficient": 0.1}}}, {}),
    "a KL penalty in the reward": (
        {"train": TRAIN | {"kl": {"coefficient": 0.1, "in": "reward"}}},
        {"kl_in_reward": "train.kl.in"},
    ),
    "a KL penalty in the reward of 0": ({"train": TRAIN | {"kl": {"in": "reward"}}}, {}),
    "more groups": (
        {"train": TRAIN | {"asynchrony": {"oversample": 2.0}}},
        {"oversampling": "train.asynchrony.oversample"},
    ),
    "groups without signal": (
        {"train": TRAIN | {"dynamic_sampling": True}},
        {"oversampling": "train.dynamic_sampling"},
    ),
}


@pytest.mark.parametrize("what", USED)
def test_what_a_spec_uses(what: str, tmp_path: Path) -> None:
    changes, expected = USED[what]
    assert used(tmp_path, **changes) == {"token_ids": "model"} | expected


def test_a_backend_without_ids_has_none_to_carry(tmp_path: Path) -> None:
    assert "token_ids" not in used(tmp_path, backend={"kind": "openai", "url": "http://127.0.0.1:1/v1", "model": "x"})


def test_findings_are_exactly_what_is_not_carried(tmp_path: Path) -> None:
    used(tmp_path, **USER, **{"rewards": {"credit": {"method": "turn_return"}}})
    loaded = load_spec(tmp_path / "spec.yaml")
    for name, trainer in TRAINERS.items():
        expected = [
            (f"trainer.{trainer.things[use.thing].status}", use.path)
            for use in uses(loaded)
            if trainer.things[use.thing].status != "carried"
        ]
        assert [(item.rule, item.path) for item in TRAINERS[name].findings(loaded)] == expected
    assert [item.rule for item in TRAINERS["areal"].findings(loaded)] == []


@pytest.mark.parametrize("trainer", list(TRAINERS))
def test_no_trainer_gets_advantages_without_the_penalty_that_the_spec_puts_into_the_reward(
    trainer: str, tmp_path: Path
) -> None:
    used(tmp_path, train=TRAIN | {"kl": {"coefficient": 0.1, "in": "reward"}})
    loaded = load_spec(tmp_path / "spec.yaml")
    refused = [item.path for item in TRAINERS[trainer].findings(loaded) if item.severity == "error"]
    assert ("train", "kl", "in") in refused
    with pytest.raises(TrainError, match=r"a KL penalty in the reward; .* use `train.kl.in: loss`, or `engine train`"):
        refuse_lost(loaded, trainer)


@pytest.mark.parametrize(
    ("trainer", "code", "said"),
    [
        (
            "verl",
            0,
            "warning[trainer.approximated] verl 0.9.1 (V1 trainer): carried in part: the weight version of each token",
        ),
        (
            "trl",
            1,
            "error[trainer.refused] TRL GRPOTrainer 1.16.0: not carried: the weight version of each token; a row has",
        ),
        ("areal", 0, "1 spec valid"),
        ("vrl", 2, "there is no trainer `vrl`; did you mean `verl`?"),
    ],
)
def test_validate_says_it_at_the_line_of_the_spec(trainer: str, code: int, said: str, tmp_path: Path) -> None:
    used(tmp_path, train=TRAIN | {"asynchrony": {"max_staleness": 1}}, model={"path": "smollm2-135m-instruct"})
    found, out, err = engine_here("validate", "spec.yaml", "--trainer", trainer, cwd=tmp_path)
    assert said in out + err
    assert found == code


def test_a_model_with_vision_is_shown_images(tmp_path: Path) -> None:
    """Images may come from a user or an environment, which is known only when an episode runs."""
    (tmp_path / "vlm").mkdir()
    (tmp_path / "vlm" / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {}}')
    assert used(tmp_path, model={"path": "./vlm"}) == {"token_ids": "model", "images": "model.path"}
