"""`engine import verl`: a configuration of verl's as a spec, with a note for each of its keys that the spec does not
hold.

Source of the keys: verl's documented configuration (https://verl.readthedocs.io, "Config Explanation" and "Multi-turn
Rollout Support").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.terminal import echo

_NO_NOTE: Mapping[str, tuple[Any, ...]] = {
    "actor_rollout_ref.hybrid_engine": (True,),
    "actor_rollout_ref.model.use_remove_padding": (True, False),
    "actor_rollout_ref.rollout.multi_turn.enable": (True,),
    "algorithm.use_kl_in_reward": (False,),
    "data.return_raw_chat": (True, False),
    "trainer.critic_warmup": (0,),
    "trainer.nnodes": (1,),
    "trainer.save_freq": (-1,),
    "trainer.test_freq": (-1,),
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
_Rest = dict[str, Any]
"""The values of the keys that were not taken over yet, by their paths."""


def _leaves(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a configuration that say something, by their paths."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        elif value is not None and not str(key).startswith("_"):
            yield f"{above}{key}", value


def _notes(rest: _Rest) -> Iterator[str]:
    """The keys that were not taken over, those of one section in one note."""
    sections: dict[str, list[str]] = {}
    for path, value in rest.items():
        section, _, key = path.rpartition(".")
        sections.setdefault(section, []).append(f"{key}: {json.dumps(value, default=str)[:80]}")
    for section, keys in sections.items():
        yield f"not taken over{f' of `{section}`' if section else ''}: {', '.join(keys)}"


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
        interactions: Path of the interaction YAML, as the spec is to name it; by default what the configuration says.
        model: Path of the model, where the configuration has none.
        tasks: Path of the rows, likewise.

    Raises:
        ValueError: a model, rows or interactions are named nowhere.
    """
    rest = dict(_leaves({key: value for key, value in config.items() if key not in ("hydra", "interaction")}))
    for path, values in _NO_NOTE.items():
        if rest.get(path) in values:
            del rest[path]
    turns = "actor_rollout_ref.rollout.multi_turn"
    model = model or rest.pop("actor_rollout_ref.model.path", None)
    tasks = tasks or _file(rest, "data.train_files")
    interactions = interactions or rest.pop(f"{turns}.interaction_config_path", None)
    tools = rest.pop(f"{turns}.tool_config_path", None)
    played = f"interactions and no tools (`{turns}.interaction_config_path`, `tool_config_path`)"
    for what, value, option in (
        ("model (`actor_rollout_ref.model.path`)", model, "--model"),
        ("rows in one file (`data.train_files`)", tasks, "--tasks"),
        (played, interactions or tools, "--interactions"),
    ):
        if not value:
            raise ValueError(f"the configuration names no {what}; give {option}")
    notes = []
    if functions := rest.pop(f"{turns}.function_tool_path", None):
        notes.append(f"verl's function tools ({functions}) are not taken over: name them under `tools`")
    if tools:
        calls, most = rest.pop(f"{turns}.max_parallel_calls", 1), rest.pop(f"{turns}.max_tool_response_length", 256)
        words = f"verl executes {calls} call of a reply and cuts results at {most} characters; here all calls are "
        notes.append(f"{words}executed, and `limits.tool_result_tokens` cuts")
    prompt = rest.pop("data.prompt_key", "prompt")
    preset = prompt if tools else None
    backend = _backend(rest)
    spec: dict[str, Any] = {
        "spec": "episode/v1",
        "name": name,
        "model": {"path": model},
        "backend": backend,
        "sampling": _sampling(rest, "actor_rollout_ref.rollout"),
        "tasks": _rows(str(tasks), preset, rest.pop("data.train_max_samples", -1)) | _overlong(rest),
        **_code(interactions, tools, prompt),
        "limits": _limits(rest, turns),
        "rewards": {"credit": _credit(rest, notes)},
        "rollout": {"samples_per_task": int(rest.pop("actor_rollout_ref.rollout.n", 1))},
        "train": _train(rest, preset, colocate=bool(backend)),
    }
    return {key: value for key, value in spec.items() if value not in ({}, None)}, [*notes, *_notes(rest)]


def _file(rest: _Rest, path: str) -> str | None:
    """A file of rows. None, if there is none or if there are several, which a spec does not hold."""
    files = rest.get(path)
    if isinstance(files, list) and len(files) != 1:
        return None
    rest.pop(path, None)
    return files[0] if isinstance(files, list) else files


def _rows(path: str, prompt_key: str | None, most: int) -> dict[str, Any]:
    rows = {"source": "parquet" if path.endswith(".parquet") else "jsonl", "path": path}
    preset = {} if prompt_key is None else {"preset": {"name": "verl", "prompt_key": prompt_key}}
    return rows | preset | ({"limit": most} if most > 0 else {})


def _overlong(rest: _Rest) -> dict[str, str]:
    """What becomes of rows with more than `max_prompt_length`, which leave no room for `max_response_length`."""
    dropped = rest.pop("data.filter_overlong_prompts", False)
    if not dropped and rest.get("data.truncation") != "error":
        return {}
    rest.pop("data.truncation", None)  # where they are dropped, it finds nothing
    return {"overlong": "drop" if dropped else "error"}


def _backend(rest: _Rest) -> dict[str, Any]:
    """Servers on the GPUs of the training, as verl has them; a training has none but SGLang's here."""
    rollout = "actor_rollout_ref.rollout"
    if f"{rollout}.name" not in rest:
        return {}
    if str(rest[f"{rollout}.name"]).startswith("sglang"):
        del rest[f"{rollout}.name"]
    gpus, tp = rest.pop("trainer.n_gpus_per_node", 8), rest.pop(f"{rollout}.tensor_model_parallel_size", 2)
    share = rest.pop(f"{rollout}.gpu_memory_utilization", 0.5)
    launch = {"gpus": int(gpus), "tp": int(tp), "args": ["--mem-fraction-static", str(share)]}
    return {"kind": "sglang", "launch": launch}


def _train(rest: _Rest, prompt_key: str | None, *, colocate: bool) -> dict[str, Any]:
    """verl's trainer and actor as `train`, with verl's defaults for what they leave out."""
    take, actor = rest.pop, "actor_rollout_ref.actor"
    if not any(path.startswith(("trainer.", f"{actor}.", "data.train_batch_size")) for path in rest):
        return {}
    steps, epochs = take("trainer.total_training_steps", None), take("trainer.total_epochs", 30)
    train: dict[str, Any] = {"steps": int(steps)} if steps else {"epochs": epochs}
    train |= {"rollout_correction": {"kind": "none"}, "colocate": colocate}
    for place, path, default in _TRAIN:
        section, _, key = place.rpartition(".")
        value = take(path, default)
        (train.setdefault(section, {}) if section else train)[key] = type(default)(default if value == -1 else value)
    train["minibatches"] = max(1, train["tasks_per_step"] // int(take(f"{actor}.ppo_mini_batch_size", 256)))
    train["loss"]["kind"] = _named(rest, f"{actor}.loss_agg_mode", _LOSSES, "token-mean")
    if take(f"{actor}.use_kl_loss", False):
        estimator = _named(rest, f"{actor}.kl_loss_type", _ESTIMATORS, "low_var_kl")
        train["kl"] = {"coefficient": float(take(f"{actor}.kl_loss_coef", 0.001)), "estimator": estimator}
    if offloaded := [key for key in ("param", "optimizer") if take(f"{actor}.fsdp_config.{key}_offload", False)]:
        train["memory"]["offload"] = "all" if "param" in offloaded else "optimizer"
    loggers = rest.get("trainer.logger", [])
    if set(loggers) <= {"console", *_TRACKERS}:
        take("trainer.logger", None)
    if trackers := [name for name in loggers if name in _TRACKERS]:
        names = {"project": take("trainer.project_name", None), "name": take("trainer.experiment_name", None)}
        train |= {"report_to": trackers, "tracking": names}
    if (every := int(rest.get("trainer.test_freq", -1))) > 0 and (file := _file(rest, "data.val_files")):
        del rest["trainer.test_freq"]
        validation = "actor_rollout_ref.rollout.val_kwargs"
        sampled = take(f"{validation}.do_sample", False)
        train["eval"] = {
            "every": every,
            "tasks": _rows(file, prompt_key, take("data.val_max_samples", -1)),
            "samples": int(take(f"{validation}.n", 1)),
            "sampling": _sampling(rest, validation) if sampled else {"temperature": 0.0},
        }
    return train


def _named(rest: _Rest, path: str, names: Mapping[str, str], default: str) -> str:
    """What a value is called here; the default's name, and a note, where it has none."""
    return names[rest.pop(path) if rest.get(path) in names else default]


def _code(interactions: str | None, tools: str | None, prompt: str) -> dict[str, Any]:
    """The environment, the user and the machine."""
    messages = {"use": "engine.plugins.adapters.verl.interactions:Prompt", "effects": "pure", "with": {"field": prompt}}
    code: dict[str, Any] = {"environment": {"adapter": "verl", "use": tools} if tools else messages}
    if interactions:
        user = {"use": "engine.plugins.adapters.verl.interactions:Interactions", "effects": "replayable"}
        code["user"] = {**user, "with": {"config": interactions}}
    return code | {"machine": "retry_with_feedback" if not tools else "tools_and_user" if interactions else "tools"}


def _limits(rest: _Rest, turns: str) -> dict[str, Any]:
    """verl's `max_assistant_turns`, `max_user_turns` and lengths as our limits. Its `null` is no limit; so is ours."""
    limits = {f"{who}_turns": rest.pop(f"{turns}.max_{who}_turns", None) for who in ("assistant", "user")}
    if response := rest.pop("data.max_response_length", None):
        limits["turn_tokens"] = int(response)
        if prompt := rest.pop("data.max_prompt_length", None):
            limits["episode_tokens"] = int(prompt) + int(response)
    return limits


def _sampling(rest: _Rest, at: str) -> dict[str, Any]:
    values = {key: rest.pop(f"{at}.{key}", None) for key in ("temperature", "top_p", "top_k")}
    return {key: value for key, value in values.items() if value is not None and (key, value) != ("top_k", -1)}


def _credit(rest: _Rest, notes: list[str]) -> dict[str, Any]:
    estimator, scaled = rest.pop("algorithm.adv_estimator", "gae"), rest.pop("algorithm.norm_adv_by_std_in_grpo", True)
    if estimator == "rloo":
        return {"method": "outcome", "baseline": "leave_one_out", "scale": "none"}
    if estimator != "grpo":
        notes.append(f"`adv_estimator: {estimator}` is not taken over: the group's outcome gives credit")
    return {"method": "outcome", "baseline": "mean", "scale": "std" if scaled else "none"}


def as_yaml(spec: Mapping[str, Any], notes: list[str], source: str) -> str:
    """The spec's text, with what it leaves out said at its top."""
    import yaml

    said = "".join(f"# Note: {note}\n" for note in notes)
    text = yaml.safe_dump(dict(spec), sort_keys=False, allow_unicode=True)
    return f"# Made from {source} by `engine import verl`.\n{said}{text}"


def verl(
    config: Annotated[Path, typer.Argument(help="A verl configuration, or only an interaction YAML file.")],
    out: Annotated[
        Path | None, typer.Option(help="The spec to write; by default CONFIG.spec.yaml beside CONFIG.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model, if the configuration names none.")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="The rows (.parquet or .jsonl), if the configuration names none.")
    ] = None,
    interactions: Annotated[
        str | None, typer.Option(help="The interaction YAML file, if the configuration names none.")
    ] = None,
) -> None:
    """Convert a verl multi-turn configuration with interactions or tools to a spec; its classes run unchanged.

    Rollout, actor and trainer become `backend` and `train`, turns and lengths limits, and a turn's score its reward.
    Keys that are not converted are listed at the top of the spec. Exits with 1 if no model, no rows, or neither
    interactions nor tools are given, or if the output file exists.
    """
    import yaml

    target = out or config.with_suffix(".spec.yaml")
    try:
        data: Any = yaml.safe_load(config.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"{config} is not a YAML mapping")
        if "interaction" in data and interactions is None:
            interactions = config.name
        spec, notes = spec_of(data, name=config.stem, interactions=interactions, model=model, tasks=tasks)
        if target.exists():
            raise ValueError(f"{target} exists already, and nothing was changed; choose another file with --out")
        target.write_text(as_yaml(spec, notes, config.name), encoding="utf-8")
    except (OSError, ValueError, yaml.YAMLError) as error:
        echo(str(error), err=True)
        raise typer.Exit(1) from None
    for note in notes:
        echo(f"note: {note}")
    echo(f"Made {target}\nNext: engine validate {target}")
