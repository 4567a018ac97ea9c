"""Options without effect are found, and the same options are accepted where they have one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.plugin import OFF, installed
from engine.schemas.loss import LOSSES
from engine.schemas.tasks import TasksSpec, all_sources
from engine.spec.load import load_spec
from engine.validate import check_spec

HEAD = """\
spec: episode/v1
name: demo
model: {path: org/m}
tasks: {source: inline, rows: [{q: a}]}
prompt: [{role: user, content: "{{q}}"}]
"""
GROUP = "machine: single_turn\nrollout: {samples_per_task: 8}\n"
SERVER = 'backend: {kind: sglang, urls: ["http://127.0.0.1:30000"]}\n'
RULES = (".no-effect]", "[train.kl-estimator]", "[train.delta]", "[rewards.credit-ignores]", "[rewards.outcome-drops]")
USER = """\
machine: retry_with_feedback
rollout: {samples_per_task: 8}
user: {use: "engine.environments.users.attempts:Attempts"}
"""
JUDGE = "scorer: {prompt: [{role: user, content: 'Score {{reply}}'}], name: quality, turns: each}"


def found(lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(HEAD + lines)
    told = [str(item).removeprefix("s.yaml:").partition("; ")[0] for item in check_spec(load_spec("s.yaml"))]
    return [line.partition(" ")[2] for line in told if any(name in line for name in RULES)]


NO_EFFECT = [
    (
        "loss: {kind: grpo, clip_low: 0.1}",
        "train.loss.clip_low",
        "train: {loss: {kind: grpo, clip_low: 0.1}, minibatches: 2}",
    ),
    (
        "loss: {kind: dapo, clip_high: 0.3}",
        "train.loss.clip_high",
        "train: {loss: {kind: dapo, clip_high: 0.3}, update_epochs: 2}",
    ),
    (
        "loss: {kind: ppo, delta: 3.0}",
        "train.loss.delta",
        "train: {loss: {kind: ppo, delta: 3.0}, proximal_logprobs: sampler}",
    ),
    (
        "loss: {kind: cispo, clip_low: 0.5}",
        "train.loss.clip_low",
        "train: {loss: {kind: cispo, clip_low: 0.5}, minibatches: 4}",
    ),
    (
        "loss: {kind: sapo, temperature_negative: 2.0}",
        "train.loss.temperature_negative",
        "train: {loss: {kind: sapo, temperature_negative: 2.0}, minibatches: 4}",
    ),
    (
        "rollout_correction: {kind: none, high: 3.0}",
        "train.rollout_correction.high",
        "train: {rollout_correction: {kind: mask, high: 3.0}}",
    ),
    (
        "proximal_logprobs: sampler, rollout_correction: {high: 3.0}",
        "train.rollout_correction.high",
        "train: {proximal_logprobs: recompute, minibatches: 2, rollout_correction: {high: 3.0}}",
    ),
    ("kl: {estimator: k2}", "train.kl.estimator", "train: {kl: {estimator: k2, coefficient: 0.1}}"),
    (
        "kl: {estimator: k2, in: reward, coefficient: 0.1}",
        "train.kl.estimator",
        "train: {kl: {in: reward, coefficient: 0.1}}",
    ),
    ("steps: 5, epochs: 2", "train.steps", "train: {epochs: 2}"),
    ("kl: {in: reward}", "train.kl.in", "train: {kl: {in: reward, coefficient: 0.1}}"),
    (
        "advantage_bonuses: [{use: 'math:floor', coefficient: 0}]",
        "train.advantage_bonuses.0.coefficient",
        "train: {advantage_bonuses: [{use: 'math:floor', coefficient: 0.1}]}",
    ),
    ("tasks_per_step: 2, minibatches: 3", "train.minibatches", "train: {tasks_per_step: 3, minibatches: 3}"),
    (
        "tasks_per_step: 2, asynchrony: {oversample: 1.2}",
        "train.asynchrony.oversample",
        "train: {tasks_per_step: 2, asynchrony: {oversample: 1.5}}",
    ),
    (
        "steps: 5, optimizer: {schedule: cosine, warmup_steps: 5}",
        "train.optimizer.schedule",
        "train: {steps: 6, optimizer: {schedule: cosine, warmup_steps: 5}}",
    ),
    (
        "weight_sync: {pause_generation: false}",
        "train.weight_sync.pause_generation",
        SERVER + "train: {weight_sync: {pause_generation: false}}",
    ),
    ("weight_sync: {folder: /tmp/w}", "train.weight_sync.folder", SERVER + "train: {weight_sync: {folder: /tmp/w}}"),
]


@pytest.mark.parametrize(("train", "option", "with_effect"), NO_EFFECT)
def test_an_option_of_train_without_effect_is_found(
    train: str, option: str, with_effect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = found(f"{GROUP}train: {{{train}}}\n", tmp_path, monkeypatch)
    assert [line.partition(": ")[0] for line in told] == [f"warning[train.no-effect] `{option}` has no effect"]
    assert found(f"{GROUP}{with_effect}\n", tmp_path, monkeypatch) == []


def test_every_key_that_acts_on_a_ratio_is_declared() -> None:
    """A key of a loss either acts with one update per batch (a length), or is in `ratio_keys`."""
    for loss in LOSSES.members():
        assert set(loss.model_fields) - {"kind", "length"} == set(loss.ratio_keys), loss


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        ("train: {loss: {kind: grpo, delta: 1.2}, minibatches: 2}", []),
        ("train: {loss: {kind: dapo, clip_high: 0.1, delta: 1.15}, minibatches: 2}", []),
        ("train: {kl: {estimator: k3, coefficient: 0.1}}", []),
        ("train: {}", []),
        (
            "rewards: {placement: spread}\ntrain: {}",
            ["warning[train.no-effect] `rewards.placement` has no effect: training reads `advantages`"],
        ),
        ("rewards: {placement: spread}", []),
        (
            "rewards: {credit: {method: score, alpha: 0, reward: a}}",
            [
                "warning[rewards.no-effect] `alpha` has no effect: an episode has one turn of the model, and it acts between turns",
                "warning[rewards.no-effect] `reward` has no effect: `alpha: 0` gives no bonus",
            ],
        ),
    ],
)
def test_findings_of_single_turns(
    lines: str, problems: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(f"{GROUP}{lines}\n", tmp_path, monkeypatch) == problems


TRANSFER = "reassign: [{at: AWAITING_USER_FEEDBACK, when: 'turns.assistant > 1', turn: last, to: previous, share: 0.5}]"


@pytest.mark.parametrize(
    "credit", ["method: outcome", "method: turn_discount, form: attempts", "method: gigpo, weight: 0"]
)
def test_rewards_of_turns_under_a_method_that_reads_the_sum(
    credit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = credit.partition(", ")[0].removeprefix("method: ")
    lines = f"{USER}rewards:\n  credit: {{{credit}}}\n  {TRANSFER}\n  {JUDGE}\n"
    assert found(lines, tmp_path, monkeypatch) == [
        f"warning[rewards.credit-ignores] moving a reward to another turn has no effect: `{method}` reads only the sum of the "
        "episode's rewards",
        f"warning[rewards.credit-ignores] judging each turn has no effect beyond the sum of the scores: `{method}` reads only the sum of "
        "the episode's rewards",
    ]
    lines = f"{USER}rewards:\n  credit: {{method: turn_return}}\n  {TRANSFER}\n  {JUDGE}\n"
    assert found(lines, tmp_path, monkeypatch) == []


def test_rewards_that_an_outcome_by_names_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = "reassign: [{at: AWAITING_USER_FEEDBACK, op: add, value: 1, name: polite}]"
    lines = f"{USER}rewards:\n  credit: {{method: mt_grpo, outcome: [right]}}\n  {add}\n  {JUDGE}\n"
    assert found(lines, tmp_path, monkeypatch) == [
        "warning[rewards.outcome-drops] in the last turn only `right` counts: `quality` and `polite` reach no token there"
    ]
    for outcome in ("", ", outcome: [right, polite, quality]"):
        lines = f"{USER}rewards:\n  credit: {{method: mt_grpo{outcome}}}\n  {add}\n  {JUDGE}\n"
        assert found(lines, tmp_path, monkeypatch) == []


def test_rules_that_move_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = "at: AWAITING_USER_FEEDBACK, when: 'turns.assistant > 1'"
    lines = (
        f"{USER}rewards:\n  reassign:\n    - {{{at}, turn: last, to: previous, share: 0, discount: 0.5}}\n"
        f"    - {{{at}, op: add, turn: each, value: 1, discount: 0.5}}\n    - {{{at}, op: set, value: 0}}\n"
    )
    assert found(lines, tmp_path, monkeypatch) == [
        "warning[rewards.no-effect] `share: 0` has no effect: nothing is moved or added",
        "warning[rewards.no-effect] `discount` has no effect: it belongs to the address `each`",
    ]


def test_keys_of_another_task_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = GROUP + "tasks: {source: inline, rows: [{q: a}], path: x.jsonl, name: main, limit: 1}\n"
    monkeypatch.setattr(f"{__name__}.HEAD", HEAD.replace("tasks: {source: inline, rows: [{q: a}]}\n", ""))
    assert found(lines, tmp_path, monkeypatch) == [
        "warning[tasks.no-effect] `path` has no effect with `source: inline`: it belongs to `jsonl`, `csv`, `parquet`, `hub`, `harbor`",
        "warning[tasks.no-effect] `name` has no effect with `source: inline`: it belongs to `hub`",
    ]


@pytest.fixture
def without_harbor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(OFF, "harbor")
    installed.cache_clear()
    yield
    monkeypatch.undo()
    installed.cache_clear()


@pytest.mark.usefixtures("without_harbor")
def test_a_key_that_no_installed_source_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = GROUP + "tasks: {source: inline, rows: [{q: a}], unsupported: drop, limit: 1}\n"
    monkeypatch.setattr(f"{__name__}.HEAD", HEAD.replace("tasks: {source: inline, rows: [{q: a}]}\n", ""))
    assert found(lines, tmp_path, monkeypatch) == [
        "warning[tasks.no-effect] `unsupported` has no effect with `source: inline`"
    ]


def test_each_kind_of_source_reads_keys_of_tasks() -> None:
    keys = {info.alias or name for name, info in TasksSpec.model_fields.items()}
    assert {key for facts in all_sources().values() for key in facts.keys} <= keys


def test_a_transfer_between_two_calls_of_a_turn_is_no_transfer_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rule = "{at: AWAITING_USER_FEEDBACK, turn: last, part: {call: 0}, to: last, to_part: {call: 1}, share: 1.0}"
    for text, rules in ((rule, []), (rule.replace("call: 1", "call: 0"), ["rewards.unpayable"])):
        Path("s.yaml").write_text(f"{HEAD}{USER}rewards: {{reassign: [{text}]}}\n")
        assert [one.rule for one in check_spec(load_spec("s.yaml")) if one.rule.startswith("rewards.")] == rules


KEEP_WITHOUT_EFFECT = [
    ("rollout: {keep: {steps: 3}}", "rollout.keep", "only a training drops episodes, and the spec has no `train`"),
    (
        "rollout: {samples_per_task: 8, keep: {steps: 5}}\ntrain: {steps: 5}",
        "rollout.keep.steps",
        "every group is kept",
    ),
    (
        "rollout: {samples_per_task: 8, keep: {sample: 1}}\ntrain: {steps: 50}",
        "rollout.keep.sample",
        "it keeps every group",
    ),
    (
        "rollout: {samples_per_task: 8, keep: {trained: true}}\ntrain: {steps: 50, dynamic_sampling: false}",
        "rollout.keep.trained",
        "every group trains",
    ),
]


@pytest.mark.parametrize(("text", "option", "why"), KEEP_WITHOUT_EFFECT)
def test_a_keep_that_drops_nothing_is_found(
    text: str, option: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = found(f"{text}\n", tmp_path, monkeypatch)
    ours = [line for line in told if "rollout.no-effect" in line]
    assert len(ours) == 1
    assert ours[0].startswith(f"warning[rollout.no-effect] `{option}` has no effect: ")
    assert why in ours[0]


def test_a_keep_that_drops_something_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "rollout: {samples_per_task: 8, keep: {steps: 5, trained: true, sample: 0.1}}\ntrain: {steps: 50}\n"
    assert not [line for line in found(text, tmp_path, monkeypatch) if "rollout.no-effect" in line]
