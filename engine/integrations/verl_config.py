"""A configuration of verl's as a spec: what it says of models, rows, interactions and limits.

Source of the keys: verl's documented configuration (https://verl.readthedocs.io, "Config Explanation" and "Multi-turn
Rollout Support").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

HEADER = """\
# Made from {source} by `engine import verl`.
{notes}"""


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
    rollout = _at(config, "actor_rollout_ref.rollout") or {}
    turns = rollout.get("multi_turn") or {}
    data = config.get("data") or {}
    model = model or _at(config, "actor_rollout_ref.model.path")
    tasks = tasks or _one(data.get("train_files"))
    interactions = interactions or turns.get("interaction_config_path")
    tools = turns.get("tool_config_path")
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
    notes: list[str] = []
    if turns.get("function_tool_path"):
        notes.append(
            f"verl's function tools ({turns['function_tool_path']}) are not taken over: name them under `tools`"
        )
    if tools:
        notes.append(
            f"verl executes {turns.get('max_parallel_calls') or 1} call of a reply and cuts results at "
            f"{turns.get('max_tool_response_length') or 256} characters; here all calls are executed, and `limits.tool_result_tokens` cuts"
        )
    spec: dict[str, Any] = {
        "spec": "episode/v1",
        "name": name,
        "model": {"path": model},
        "sampling": _sampling(rollout),
        "tasks": {"source": "parquet" if str(tasks).endswith(".parquet") else "jsonl", "path": tasks},
        **_code(interactions, tools, data.get("prompt_key") or "prompt"),
        "limits": limits_of(turns, data),
        "rewards": {"credit": _credit(config, notes)},
        "rollout": {"samples_per_task": int(rollout.get("n") or 1)},
    }
    if tools:
        spec["tasks"]["preset"] = {"name": "verl", "prompt_key": data.get("prompt_key") or "prompt"}
    return {key: value for key, value in spec.items() if value not in ({}, None)}, notes


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


def limits_of(turns: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """verl's `max_assistant_turns`, `max_user_turns` and lengths as our limits. Its `null` is no limit; so is ours."""
    limits: dict[str, Any] = {
        "assistant_turns": turns.get("max_assistant_turns"),
        "user_turns": turns.get("max_user_turns"),
    }
    prompt, response = data.get("max_prompt_length"), data.get("max_response_length")
    if response:
        limits["turn_tokens"] = int(response)
        if prompt:
            limits["episode_tokens"] = int(prompt) + int(response)
    return limits


def _sampling(rollout: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {key: rollout[key] for key in ("temperature", "top_p") if rollout.get(key) is not None}
    if rollout.get("top_k") not in (None, -1):
        sampling["top_k"] = rollout["top_k"]
    return sampling


def _credit(config: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    estimator = _at(config, "algorithm.adv_estimator") or "gae"
    scaled = _at(config, "algorithm.norm_adv_by_std_in_grpo")
    grpo = {"method": "outcome", "baseline": "mean", "scale": "none" if scaled is False else "std"}
    known: dict[str, dict[str, Any]] = {
        "grpo": grpo,
        "rloo": {"method": "outcome", "baseline": "leave_one_out", "scale": "none"},
    }
    if estimator not in known:
        notes.append(f"`adv_estimator: {estimator}` is not taken over: the group's outcome gives credit")
    return known.get(str(estimator), grpo)


def _at(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _one(files: Any) -> str | None:
    """The file of rows; verl may list several."""
    if isinstance(files, list):
        if len(files) > 1:
            raise ValueError(f"`data.train_files` lists {len(files)} files; a spec has one source: give --tasks")
        files = files[0] if files else None
    return files if files is None else str(files)


def as_yaml(spec: Mapping[str, Any], notes: list[str], source: str) -> str:
    """The spec's text, with what it leaves out said at its top."""
    said = "".join(f"# Note: {note}\n" for note in notes)
    return HEADER.format(source=source, notes=said) + yaml.safe_dump(dict(spec), sort_keys=False, allow_unicode=True)
