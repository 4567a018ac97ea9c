"""Every key of `train` and `rewards`: the setting under which it has no effect is found, or there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from slow_cases import slow_but_each
from test_no_effect import GROUP, HEAD, JUDGE, SERVER, TRANSFER, USER

from engine.errors import SpecError
from engine.schemas.credit import RewardsSpec
from engine.schemas.sections import OneOf, annotation_of, mark_of
from engine.schemas.train import TrainSpec
from engine.spec.load import load_spec
from engine.spec.text.places import fields_by_key
from engine.validate import check_spec

Case = tuple[str, str]
"""Lines of a spec, and the start of a message that names the key."""


def train(lines: str) -> str:
    return f"{GROUP}train: {{{lines}}}\n"


def no_effect(key: str, lines: str, head: str = GROUP) -> Case:
    return f"{head}train: {{{lines}}}\n", f"`train.{key}` has no effect"


def credit(key: str, lines: str) -> Case:
    return f"{GROUP}rewards: {{credit: {{{lines}}}}}\n", f"`{key}` has no effect"


SFT = "kind: sft, data: {path: rows.jsonl}"
CRITIC = GROUP + "rewards: {credit: {method: gae}}\n"
SETS = (
    "sets: {a: {tasks: {source: inline, rows: [{q: b}]}, every: 1, limit: 1, samples: 1, sampling: {temperature: 0}}}"
)
ONE = "critic: {kind: probe, %s}"
FOUND: dict[str, Case] = {
    "train.data.path": (train("data: {path: rows.jsonl}"), "`data` belongs to `kind: sft`"),
    "train.data.reward": no_effect("data.reward", "kind: sft, data: {path: rows.jsonl, reward: right}"),
    "train.steps": no_effect("steps", "steps: 5, epochs: 2"),
    "train.tasks_per_step": no_effect("tasks_per_step", f"{SFT}, tasks_per_step: 2"),
    "train.update_epochs": no_effect("update_epochs", f"{SFT}, update_epochs: 2"),
    "train.minibatches": no_effect("minibatches", "tasks_per_step: 2, minibatches: 3"),
    "train.seed": no_effect("seed", "seed: 4, shuffle: false"),
    "train.loss.kind": no_effect("loss", f"{SFT}, loss: {{kind: grpo}}"),
    "train.loss.clip_low": no_effect("loss.clip_low", "loss: {kind: grpo, clip_low: 0.1}"),
    "train.loss.clip_high": no_effect("loss.clip_high", "loss: {kind: grpo, clip_high: 0.1}"),
    "train.loss.delta": no_effect("loss.delta", "loss: {kind: grpo, delta: 4}"),
    "train.loss.length": no_effect("loss", f"{SFT}, loss: {{kind: dr_grpo, length: 9}}"),
    "train.loss.temperature_positive": no_effect(
        "loss.temperature_positive", "loss: {kind: sapo, temperature_positive: 2}"
    ),
    "train.loss.temperature_negative": no_effect(
        "loss.temperature_negative", "loss: {kind: sapo, temperature_negative: 2}"
    ),
    "train.proximal_logprobs": no_effect("proximal_logprobs", "proximal_logprobs: recompute"),
    "train.rollout_correction.kind": no_effect(
        "rollout_correction.kind", "proximal_logprobs: sampler, rollout_correction: {kind: mask}"
    ),
    **{
        f"train.rollout_correction.{key}": no_effect(
            f"rollout_correction.{key}", f"rollout_correction: {{kind: none, {key}: {value}}}"
        )
        for key, value in (("level", "turn"), ("low", 0.5), ("high", 3))
    },
    "train.kl.coefficient": no_effect("kl", f"{SFT}, kl: {{coefficient: 0.1}}"),
    "train.kl.in": no_effect("kl.in", "kl: {in: reward}"),
    "train.kl.estimator": no_effect("kl.estimator", "kl: {estimator: k2, in: reward, coefficient: 0.1}"),
    "train.entropy_coefficient": no_effect("entropy_coefficient", f"{SFT}, entropy_coefficient: 0.1"),
    "train.advantage_bonuses.use": no_effect("advantage_bonuses", f"{SFT}, advantage_bonuses: [{{use: 'math:floor'}}]"),
    "train.advantage_bonuses.coefficient": no_effect(
        "advantage_bonuses.0.coefficient", "advantage_bonuses: [{use: 'math:floor', coefficient: 0}]"
    ),
    "train.advantage_norm": no_effect("advantage_norm", f"{SFT}, advantage_norm: batch"),
    "train.critic.kind": (train("critic: {kind: probe}"), "the credit method `turn_return` reads no values"),
    "train.critic.clip": (f"{CRITIC}train: {{{ONE % 'clip: 0.3'}}}", "`clip` bounds how far values move"),
    "train.critic.warmup_steps": (
        f"{CRITIC}train: {{steps: 3, {ONE % 'warmup_steps: 3'}}}",
        "the critic alone is trained for 3 steps",
    ),
    "train.critic.bootstrap": (
        f"{CRITIC}train: {{{ONE % 'bootstrap: [episode_tokens]'}}}",
        "the limit `episode_tokens` is not set",
    ),
    "train.critic.revision": (
        f"{CRITIC}train: {{critic: {{kind: network, revision: main}}}}",
        "`path` is not set, so the critic begins as the policy's model, and `revision` has no effect",
    ),
    "train.overlong.margin": (train("overlong: {margin: 512}"), "replies are penalized in the last 512 tokens"),
    "train.overlong.coefficient": (
        f"{USER}rewards: {{credit: {{method: mt_grpo, outcome: [right]}}}}\ntrain: {{overlong: {{margin: 9, coefficient: 2}}}}",
        "in the last turn only `right` counts: `overlong_penalty` reaches no token there",
    ),
    "train.dynamic_sampling": (
        f"{CRITIC}train: {{critic: {{kind: probe}}, dynamic_sampling: true}}",
        "with a critic no group",
    ),
    "train.min_group": (
        train("min_group: 9"),
        "a group has 8 episodes (`rollout.samples_per_task`), so every group is left out",
    ),
    "train.max_sampling_rounds": no_effect("max_sampling_rounds", f"{SFT}, max_sampling_rounds: 2"),
    **{
        f"train.difficulty.{key}": no_effect(
            "difficulty", f"steps: 1, tasks_per_step: 1, dynamic_sampling: false, difficulty: {{{key}: {value}}}"
        )
        for key, value in (("window", 2), ("low", 0.1), ("high", 0.9), ("keep", 0), ("solved_at", 1))
    },
    "train.optimizer.schedule": no_effect(
        "optimizer.schedule", "steps: 5, optimizer: {schedule: cosine, warmup_steps: 5}"
    ),
    "train.memory.offload": no_effect("memory.offload", "device: cpu, memory: {offload: all}"),
    "train.memory.share_prefixes": no_effect(
        "memory.share_prefixes", "lora: {dropout: 0.1}, memory: {share_prefixes: true}"
    ),
    "train.asynchrony.max_staleness": no_effect("asynchrony", f"{SFT}, asynchrony: {{max_staleness: 1}}"),
    "train.asynchrony.oversample": no_effect(
        "asynchrony.oversample", "tasks_per_step: 2, asynchrony: {oversample: 1.2}"
    ),
    "train.colocate": (train("colocate: true"), "the `local` backend has no servers that release memory"),
    "train.weight_sync.method": (train("weight_sync: {method: disk}"), "`disk` has no effect"),
    "train.weight_sync.pause_generation": no_effect(
        "weight_sync.pause_generation", "weight_sync: {pause_generation: false}"
    ),
    "train.weight_sync.folder": no_effect("weight_sync.folder", "weight_sync: {folder: /tmp/w}"),
    "train.weight_sync.address": no_effect("weight_sync.address", "weight_sync: {address: trainer-0}"),
    "train.weight_sync.port": no_effect("weight_sync.port", "weight_sync: {port: 29600}"),
    **{
        f"train.eval.{key}": no_effect(f"eval.{key}", f"eval: {{{SETS}, {key}: {value}}}")
        for key, value in (("every", 2), ("limit", 2), ("samples", 2), ("best", "a"))
    },
    "train.eval.sampling": no_effect("eval.sampling.temperature", f"eval: {{{SETS}, sampling: {{temperature: 1}}}}"),
    "train.eval.tasks": (
        train(f"eval: {{{SETS}, tasks: {{source: inline, rows: []}}}}"),
        "`tasks` has no effect beside `sets`",
    ),
    **{
        f"train.tracking.{key}": no_effect(f"tracking.{key}", f"report_to: [tensorboard], tracking: {{{key}: {value}}}")
        for key, value in (("project", "p"), ("name", "n"), ("group", "g"), ("tags", "[t]"))
    },
    "rewards.placement": (f"{GROUP}rewards: {{placement: spread}}\ntrain: {{}}", "`rewards.placement` has no effect"),
    "rewards.credit.scale": (
        "machine: single_turn\nrewards: {credit: {method: turn_return, baseline: none, scale: std}}\ntrain: {}",
        "`scale` has no effect",
    ),
    "rewards.credit.baseline": (
        "machine: single_turn\nrewards: {credit: {method: turn_return, baseline: leave_one_out}}\n",
        "`turn_return` compares episodes of one task, and `rollout.samples_per_task` is 1: no baseline is subtracted",
    ),
    "rewards.credit.gamma": credit("gamma", "method: turn_return, gamma: 0.9"),
    "rewards.credit.form": credit("form", "method: turn_discount, form: max"),
    "rewards.credit.state_key": credit("state_key", "method: gigpo, weight: 0, state_key: q"),
    "rewards.credit.alpha": credit("alpha", "method: score, alpha: 0.5"),
    "rewards.credit.reward": credit("reward", "method: score, alpha: 0, reward: a"),
    "rewards.credit.decay": credit("decay", "method: progress, decay: 0.5"),
    "rewards.credit.lam": (f"{GROUP}rewards: {{credit: {{method: turn_ppo, lam: 0.5}}}}\n", "`lam` has no effect"),
    "rewards.credit.outcome": (
        f"{USER}rewards: {{credit: {{method: mt_grpo, outcome: [right]}}, {JUDGE}}}\n",
        "in the last turn only `right` counts: `quality` reaches no token there",
    ),
    "rewards.reassign.op": (
        f"{USER}rewards: {{credit: {{method: outcome}}, {TRANSFER}}}\n",
        "moving a reward to another turn has no effect",
    ),
    "rewards.reassign.turn.first": (
        f"{USER}rewards: {{credit: {{method: outcome}}, reassign: [{{at: AWAITING_USER_FEEDBACK, op: add, turn: {{first: answered}}, value: 1}}]}}\n",
        "`turn: {first: answered}` has no effect",
    ),
    "rewards.reassign.share": (
        f"{USER}rewards: {{{TRANSFER.replace('0.5', '0')}}}\n",
        "`share: 0` has no effect",
    ),
    "rewards.reassign.value": (
        f"{USER}rewards: {{reassign: [{{at: AWAITING_USER_FEEDBACK, op: add, value: 0}}]}}\n",
        "`value: 0` has no effect",
    ),
    "rewards.reassign.discount": (
        f"{USER}rewards: {{{TRANSFER.replace('share: 0.5', 'share: 0.5, discount: 0.5')}}}\n",
        "`discount` has no effect",
    ),
    "rewards.reassign.when": (
        f"{USER}rewards: {{{TRANSFER.replace('turns.assistant > 1', 'false')}}}\n",
        "`false` never holds here",
    ),
    "rewards.scorer.turns": (
        f"{USER}rewards: {{credit: {{method: outcome}}, {JUDGE}}}\n",
        "judging each turn has no effect",
    ),
}
"""For each key: a spec in which it has no effect, and the message that says so."""

ALWAYS = {
    "train.kind": "selects the training",
    "train.optimizer.kind": "which moments",
    "train.epochs": "sets the number of steps; at most rounded",
    "train.shuffle": "the order of tasks or rows",
    "train.data.min_reward": "which rows",
    "train.data.episodes_per_step": "the size of an update",
    "train.advantage_bonuses.with": "arguments of a function",
    "train.critic.lr": "learning rate of every critic",
    "train.critic.max_grad_norm": "bound of every critic",
    "train.critic.level": "where values are",
    "train.critic.update_epochs": "number of passes",
    "train.critic.lam": "targets of the values",
    "train.critic.width": "a layer of the critic",
    "train.critic.coefficient": "factor of the critic's gradient",
    "train.critic.path": "the model of the critic",
    **{f"train.optimizer.{key}": "every update" for key in ("lr", "betas", "eps", "weight_decay", "max_grad_norm", "warmup_steps")},
    "train.precision": "every forward pass",
    "train.device": "every forward pass",
    "train.freeze": "a pattern without effect is refused when the model is loaded (test_policy.py)",
    **{f"train.lora.{key}": "every update of an adapter" for key in ("rank", "alpha", "dropout", "target_modules")},
    **{f"train.memory.{key}": "memory of every update" for key in ("max_tokens_per_microbatch", "logits_chunk_elements", "gradient_checkpointing")},
    **{f"train.plan.{key}": "the plan of `engine plan` and `engine validate`" for key in ("gpu_memory", "processes", "images", "image_size")},
    **{f"train.checkpoints.{key}": "checkpoints of every training" for key in ("every", "keep", "grace")},
    "train.eval.metric": "selects the best checkpoint",
    **{f"train.eval.sets.{key}": "of one evaluation" for key in ("tasks", "every", "limit", "samples", "sampling")},
    "train.report_to": "a tracker",
    "rewards.credit.method": "selects the method",
    "rewards.credit.weight": "factor of a part of every advantage",
    "rewards.credit.token_gamma": "between tokens of a turn",
    "rewards.credit.token_lam": "between tokens of a turn",
    "rewards.credit.use": "a function",
    "rewards.credit.with": "arguments of a function",
    "rewards.reassign.at": "where the rule is applied (rules.unknown-state)",
    "rewards.reassign.name": "which reward (rewards.unknown-name)",
    "rewards.reassign.turn.last": "which turn (rewards.no-such-turn); `first` and `last` are found alike",
    "rewards.reassign.to": "which turn receives (rewards.unpayable, rewards.no-such-turn)",
    "rewards.reassign.cause": "shown with the reward",
    **{f"rewards.reassign.{part}.{key}": "the address of a part (rewards.unpayable)" for part in ("part", "to_part") for key in ("call", "text", "tokens")},
    "rewards.scorer": "keys of a role, a function or a backend: checked by `role.*`, `code.*`, `isolation.*` and `backend.*`",
}  # fmt: skip
"""Keys that have an effect in every spec that is accepted, and what they act on."""


def keys_of(model: type[BaseModel], above: str) -> list[str]:
    found: dict[str, None] = {}
    for name, field in fields_by_key(model).items():
        path = f"{above}.{name}"
        below = models_in(annotation_of(field))
        for each in [key for model_ in below for key in keys_of(model_, path)] or [path]:
            found[each] = None
    return list(found)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if (opened := mark_of(annotation, OneOf)) is not None:
        return list(opened.members())
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for part in get_args(annotation) for model in models_in(part)]


KEYS = [*keys_of(TrainSpec, "train"), *keys_of(RewardsSpec, "rewards")]


def test_every_key_has_a_decision() -> None:
    """A new key of `train` or `rewards` needs a rule and a case here, or a reason why it always has an effect."""
    undecided = [
        key for key in KEYS if key not in FOUND and not any(f"{key}.".startswith(f"{each}.") for each in ALWAYS)
    ]
    assert undecided == []
    assert [key for key in FOUND if key not in KEYS] == []
    assert [key for key in ALWAYS if not any(f"{each}.".startswith(f"{key}.") for each in KEYS)] == []
    assert not FOUND.keys() & ALWAYS.keys()


@pytest.mark.parametrize("key", slow_but_each(2, FOUND))
def test_the_setting_without_effect_is_found(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines, message = FOUND[key]
    Path("rows.jsonl").write_text("")
    Path("s.yaml").write_text(HEAD + lines)
    try:
        told = [item.message for item in check_spec(load_spec("s.yaml"))]
    except SpecError as error:
        told = [item.message for item in error.diagnostics]
    assert [each for each in told if message in each], told


@pytest.mark.parametrize(
    "lines",
    [
        train("seed: 4"),
        train("seed: 4, shuffle: false, minibatches: 2"),
        train("proximal_logprobs: recompute, minibatches: 2"),
        train("proximal_logprobs: sampler, loss: {kind: reinforce}"),
        train("lora: {}, memory: {share_prefixes: true}"),
        train(f"eval: {{{SETS.replace('every: 1, ', '')}, every: 2}}"),
        train("steps: 9, tasks_per_step: 1, dynamic_sampling: false, difficulty: {window: 8}"),
        f"{USER}rewards: {{credit: {{method: turn_return, gamma: 0.9}}}}\n",
        SERVER + train("weight_sync: {folder: /tmp/w}"),
        SERVER + train("weight_sync: {method: collective, address: trainer-0, port: 29600, pause_generation: false}"),
    ],
)
def test_where_it_has_an_effect_it_is_not_reported(lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(HEAD + lines)
    assert [str(item) for item in check_spec(load_spec("s.yaml")) if item.rule.endswith("no-effect")] == []
