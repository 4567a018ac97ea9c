"""A configuration of verl's as a spec, with a note for each of its keys that the spec does not hold.

Source of the keys: verl's documented configuration (https://verl.readthedocs.io, "Config Explanation" and "Multi-turn
Rollout Support").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

HEADER = """\
# Made from {source} by `engine import verl`.
{notes}"""
_NO_NOTE: Mapping[str, tuple[Any, ...]] = {
    "actor_rollout_ref.hybrid_engine": (True,),
    "actor_rollout_ref.model.use_remove_padding": (True, False),
    "actor_rollout_ref.rollout.mode": ("sync", "async"),
    "actor_rollout_ref.rollout.multi_turn.enable": (True,),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("vanilla",),
    "algorithm.use_kl_in_reward": (False,),
    "data.return_raw_chat": (True, False),
    "trainer.critic_warmup": (0,),
    "trainer.nnodes": (1,),
    "trainer.save_freq": (-1,),
}
"""Keys that change nothing here, with the values for which this holds."""
_TRAIN: tuple[tuple[str, str, bool | int | float], ...] = (
    ("tasks_per_step", "data.train_batch_size", 1024),
    ("shuffle", "data.shuffle", True),
    ("update_epochs", "actor_rollout_ref.actor.ppo_epochs", 1),
    ("loss.clip_low", "actor_rollout_ref.actor.clip_ratio_low", 0.2),
    ("loss.clip_high", "actor_rollout_ref.actor.clip_ratio_high", 0.2),
    ("loss.delta", "actor_rollout_ref.actor.clip_ratio_c", 3.0),
    ("entropy_coefficient", "actor_rollout_ref.actor.entropy_coeff", 0.0),
    ("dynamic_sampling", "algorithm.filter_groups.enable", False),
    ("optimizer.lr", "actor_rollout_ref.actor.optim.lr", 1e-6),
    ("optimizer.weight_decay", "actor_rollout_ref.actor.optim.weight_decay", 0.01),
    ("optimizer.max_grad_norm", "actor_rollout_ref.actor.grad_clip", 1.0),
    ("optimizer.warmup_steps", "actor_rollout_ref.actor.optim.lr_warmup_steps", 0),
    ("memory.gradient_checkpointing", "actor_rollout_ref.model.enable_gradient_checkpointing", True),
)
"""Keys of `train`, verl's keys and verl's defaults; -1 is the default too."""
_LOSSES = {"token-mean": "bnpo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow")


class _Settings:
    """A configuration that knows which of its keys were taken over."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._taken = {path for path, values in _NO_NOTE.items() if self.peek(path) in values}

    def peek(self, path: str) -> Any:
        """The value of a key, which may not be taken over; None where it is left out."""
        value: Any = self._config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def take(self, path: str, default: Any = None) -> Any:
        """The value of a key that the spec holds."""
        self._taken.add(path)
        value = self.peek(path)
        return default if value is None else value

    def known(self, path: str, names: Mapping[str, Any], default: str) -> Any:
        """What a value is called here; the default's name, and a note, where it has none."""
        return names[self.take(path, default) if self.peek(path) in names else default]

    def notes(self) -> Iterator[str]:
        """The keys that were not taken over, those of one section in one note."""
        sections: dict[str, list[str]] = {}
        for path, value in _leaves(self._config):
            if path not in self._taken:
                section, _, key = path.rpartition(".")
                sections.setdefault(section, []).append(f"{key}: {json.dumps(value, default=str)[:80]}")
        for section, keys in sections.items():
            yield f"not taken over{f' of `{section}`' if section else ''}: {', '.join(keys)}"


def _leaves(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a configuration that say something, by their paths."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        elif value is not None and not str(key).startswith("_"):
            yield f"{above}{key}", value


def spec_of(
    config: Mapping[str, Any],
    *,
    name: str,
    interactions: str | None,
    model: str | None = None,
    tasks: str | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """The spec, and notes on what of the configuration it does not hold.

    Args:
        config: verl's configuration, as plain data; what it leaves out has verl's defaults.
        name: Of the spec.
        interactions: Path of the interaction YAML, as the spec is to name it; what the configuration says when left out.
        model: Path of the model, where the configuration has none.
        tasks: Path of the rows, likewise.

    Raises:
        ValueError: a model, rows or interactions are named nowhere.
    """
    settings = _Settings({key: value for key, value in config.items() if key not in ("hydra", "interaction")})
    turns = "actor_rollout_ref.rollout.multi_turn"
    own_model, own_tasks = settings.take("actor_rollout_ref.model.path"), _one(settings.take("data.train_files"))
    own_interactions = settings.take(f"{turns}.interaction_config_path")
    model, tasks, interactions = model or own_model, tasks or own_tasks, interactions or own_interactions
    tools = settings.take(f"{turns}.tool_config_path")
    for what, value, option in (
        ("model (`actor_rollout_ref.model.path`)", model, "--model"),
        ("rows (`data.train_files`)", tasks, "--tasks"),
        (
            "interactions and no tools (`actor_rollout_ref.rollout.multi_turn.interaction_config_path`, `tool_config_path`)",
            interactions or tools,
            "--interactions",
        ),
    ):
        if not value:
            raise ValueError(f"the configuration names no {what}; give {option}")
    notes = [*_tool_notes(settings, turns, bool(tools))]
    prompt = settings.take("data.prompt_key", "prompt")
    preset = prompt if tools else None
    spec: dict[str, Any] = {
        "spec": "episode/v1",
        "name": name,
        "model": {"path": model},
        "backend": (backend := _backend(settings)),
        "sampling": _sampling(settings, "actor_rollout_ref.rollout"),
        "tasks": _rows(str(tasks), preset, settings.take("data.train_max_samples", -1)) | _overlong(settings),
        **_code(interactions, tools, prompt),
        "limits": _limits(settings, turns),
        "rewards": {"credit": _credit(settings, notes)},
        "rollout": {"samples_per_task": int(settings.take("actor_rollout_ref.rollout.n", 1))},
        "train": _train(settings, preset, colocate=bool(backend)),
    }
    notes += settings.notes()
    return {key: value for key, value in spec.items() if value not in ({}, None)}, notes


def _tool_notes(settings: _Settings, turns: str, tools: bool) -> Iterator[str]:
    if functions := settings.take(f"{turns}.function_tool_path"):
        yield f"verl's function tools ({functions}) are not taken over: name them under `tools`"
    if tools:
        calls = settings.take(f"{turns}.max_parallel_calls", 1)
        cut = settings.take(f"{turns}.max_tool_response_length", 256)
        yield (
            f"verl executes {calls} call of a reply and cuts results at {cut} characters; here all calls are executed, "
            "and `limits.tool_result_tokens` cuts"
        )


def _rows(path: str, prompt_key: str | None, most: int) -> dict[str, Any]:
    kind = "parquet" if path.endswith(".parquet") else "jsonl"
    preset = {} if prompt_key is None else {"preset": {"name": "verl", "prompt_key": prompt_key}}
    return {"source": kind, "path": path, **preset, **({"limit": most} if most > 0 else {})}


def _overlong(settings: _Settings) -> dict[str, str]:
    """What becomes of rows whose prompt is longer than `max_prompt_length`: that leaves no room for `max_response_length`."""
    dropped = settings.take("data.filter_overlong_prompts")
    if not dropped and settings.peek("data.truncation") != "error":
        return {}
    settings.take("data.truncation")  # where they are dropped, it finds nothing
    return {"overlong": "drop" if dropped else "error"}


def _backend(settings: _Settings) -> dict[str, Any]:
    """Servers on the GPUs of the training, as verl has them."""
    rollout = "actor_rollout_ref.rollout"
    engine = settings.peek(f"{rollout}.name")
    if engine is None:
        return {}
    if str(engine).startswith("sglang"):  # a training has no other servers here
        settings.take(f"{rollout}.name")
    gpus = int(settings.take("trainer.n_gpus_per_node", 8))
    launch = {"gpus": gpus, "tp": int(settings.take(f"{rollout}.tensor_model_parallel_size", 2))}
    share = settings.take(f"{rollout}.gpu_memory_utilization", 0.5)
    return {"kind": "sglang", "launch": {**launch, "args": ["--mem-fraction-static", str(share)]}}


def _train(settings: _Settings, prompt_key: str | None, *, colocate: bool) -> dict[str, Any]:
    """verl's trainer and actor as `train`, with verl's defaults for what they leave out."""
    take = settings.take
    actor = "actor_rollout_ref.actor"
    if not any(settings.peek(path) for path in ("trainer", actor, "data.train_batch_size")):
        return {}
    steps, epochs = take("trainer.total_training_steps"), take("trainer.total_epochs", 30)
    length = {"steps": int(steps)} if steps else {"epochs": epochs}
    train: dict[str, Any] = {**length, "rollout_correction": {"kind": "none"}, "colocate": colocate}
    for place, path, default in _TRAIN:
        section, _, key = place.rpartition(".")
        value = take(path, default)
        (train.setdefault(section, {}) if section else train)[key] = type(default)(default if value == -1 else value)
    train["minibatches"] = max(1, train["tasks_per_step"] // int(take(f"{actor}.ppo_mini_batch_size", 256)))
    train["loss"]["kind"] = settings.known(f"{actor}.loss_agg_mode", _LOSSES, "token-mean")
    if take(f"{actor}.use_kl_loss", False):
        estimator = settings.known(f"{actor}.kl_loss_type", _ESTIMATORS, "low_var_kl")
        train["kl"] = {"coefficient": float(take(f"{actor}.kl_loss_coef", 0.001)), "estimator": estimator}
    weights, moments = take(f"{actor}.fsdp_config.param_offload"), take(f"{actor}.fsdp_config.optimizer_offload")
    if weights or moments:
        train["memory"]["offload"] = "all" if weights else "optimizer"
    loggers = settings.peek("trainer.logger") or []
    if set(loggers) <= {"console", *_TRACKERS}:
        take("trainer.logger")
    if trackers := [name for name in loggers if name in _TRACKERS]:
        train["report_to"] = trackers
        train["tracking"] = {"project": take("trainer.project_name"), "name": take("trainer.experiment_name")}
    files, every = settings.peek("data.val_files"), take("trainer.test_freq", -1)
    if files and every > 0:
        take("data.val_files")
        validation = "actor_rollout_ref.rollout.val_kwargs"
        sampled = bool(take(f"{validation}.do_sample", False))
        tasks = _rows(str(_one(files)), prompt_key, take("data.val_max_samples", -1))
        train["eval"] = {"every": int(every), "tasks": tasks, "samples": int(take(f"{validation}.n", 1))}
        train["eval"]["sampling"] = _sampling(settings, validation) if sampled else {"temperature": 0.0}
    return train


def _code(interactions: str | None, tools: str | None, prompt: str) -> dict[str, Any]:
    """The environment, the user and the machine."""
    code: dict[str, Any] = {
        "environment": {"adapter": "verl", "use": tools}
        if tools
        else {"use": "engine.integrations.verl:Prompt", "effects": "pure", "with": {"field": prompt}}
    }
    if interactions:
        code["user"] = {
            "use": "engine.integrations.verl:Interactions",
            "effects": "replayable",
            "with": {"config": interactions},
        }
    return code | {"machine": "retry_with_feedback" if not tools else "tools_and_user" if interactions else "tools"}


def _limits(settings: _Settings, turns: str) -> dict[str, Any]:
    """verl's `max_assistant_turns`, `max_user_turns` and lengths as our limits. Its `null` is no limit; so is ours."""
    limits: dict[str, Any] = {
        "assistant_turns": settings.take(f"{turns}.max_assistant_turns"),
        "user_turns": settings.take(f"{turns}.max_user_turns"),
    }
    if response := settings.take("data.max_response_length"):
        limits["turn_tokens"] = int(response)
        if prompt := settings.take("data.max_prompt_length"):
            limits["episode_tokens"] = int(prompt) + int(response)
    return limits


def _sampling(settings: _Settings, at: str) -> dict[str, Any]:
    values = {key: settings.take(f"{at}.{key}") for key in ("temperature", "top_p", "top_k")}
    return {key: value for key, value in values.items() if value is not None and (key, value) != ("top_k", -1)}


def _credit(settings: _Settings, notes: list[str]) -> dict[str, Any]:
    estimator = settings.take("algorithm.adv_estimator", "gae")
    scaled = settings.take("algorithm.norm_adv_by_std_in_grpo")
    grpo = {"method": "outcome", "baseline": "mean", "scale": "none" if scaled is False else "std"}
    known: dict[str, dict[str, Any]] = {
        "grpo": grpo,
        "rloo": {"method": "outcome", "baseline": "leave_one_out", "scale": "none"},
    }
    if estimator not in known:
        notes.append(f"`adv_estimator: {estimator}` is not taken over: the group's outcome gives credit")
    return known.get(str(estimator), grpo)


def _one(files: Any) -> str | None:
    """The file of rows; verl may list several."""
    if isinstance(files, list):
        if len(files) > 1:
            raise ValueError(f"the configuration lists {len(files)} files of rows; a spec has one source: give --tasks")
        files = files[0] if files else None
    return files if files is None else str(files)


def as_yaml(spec: Mapping[str, Any], notes: list[str], source: str) -> str:
    """The spec's text, with what it leaves out said at its top."""
    said = "".join(f"# Note: {note}\n" for note in notes)
    return HEADER.format(source=source, notes=said) + yaml.safe_dump(dict(spec), sort_keys=False, allow_unicode=True)
