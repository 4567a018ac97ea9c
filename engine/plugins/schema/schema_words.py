"""Descriptions and examples for editors, for keys whose data class has no docstring.

Invariant: every key of a spec has a description, and the loader accepts every example; tests check both.
"""

from __future__ import annotations

from typing import Any

from engine.actions.facts import ACTIONS
from engine.limits import LIMITS
from engine.tokens.toolcalls import FORMATS

WORDS: dict[str, dict[str, str]] = {
    "": {
        "description": "What the episode is about, for readers of the spec.",
        "model": "The model, and how conversations become its tokens.",
        "backend": "The sampler: `local`, `sglang`, `vllm`, `openai`, `anthropic` or `scripted`.",
        "sampling": "How tokens are sampled.",
        "tasks": "Where tasks come from.",
        "environment": "The environment of each episode, by entry point.",
        "tools": "The tools that the model may call: typed functions, by entry point.",
        "user": "The simulated user: a class of your own, or a model that plays it.",
        "machine": "The state machine: a preset by name, a preset with changes, or your own.",
        "limits": "Limits on one episode.",
        "rewards": "How rewards are moved between turns, and become advantages.",
        "recover": "Texts for the model when its reply cannot be used.",
        "isolation": "Where the spec's own code runs: in threads of the engine, or in worker processes with limits.",
        "rollout": "How many episodes run, and how many at once.",
    },
    "EnvironmentSpec": {"effects": "Whether a call that was made before a crash may be repeated."},
    "ToolSpec": {"effects": "Whether a call that was made before a crash may be repeated."},
    "UserSpec": {"effects": "Whether an answer that was given before a crash may be requested again."},
    "MachineSpec": {
        "states": "The states by name, each with its action.",
        "transitions": "Where events lead, in the order in which they are tried.",
    },
    "TransitionSpec": {"dest": "The state that comes next."},
    "TasksSpec": {
        "source": "`inline` rows, a `jsonl`, `csv` or `parquet` file, a data set on the `hub`, a `python` function, or a `mix` of "
        "several sources."
    },
    "PromptMessage": {"role": "The role of the message."},
    "RoleMessage": {"role": "The role of the message.", "content": "The text; `{{field}}` is filled in."},
    "ReassignRule": {"op": "Move a reward, add to it, or set it."},
    "RewardEvent": {"op": "Add to a reward, set it, or move it."},
    "TextPart": {"type": "A run of text.", "text": "The text."},
    "ImagePart": {"type": "An image, by reference."},
    "LocalBackendSpec": {"kind": "transformers in this process."},
    "SGLangBackendSpec": {"kind": "SGLang servers, over their native HTTP API."},
    "ScriptedBackendSpec": {"kind": "Replies from a file, without a model."},
    "SamplingParams": {
        "top_p": "Sample from the fewest tokens whose probabilities sum to this.",
        "min_p": "Exclude tokens less probable than this times the most probable one.",
        "frequency_penalty": "Subtracted from a token's logit for each time that it was sampled.",
        "presence_penalty": "Subtracted from the logit of every token that was sampled.",
        "repetition_penalty": "Divides (or multiplies) the logits of tokens that were sampled; 1 has no effect.",
        "min_new_tokens": "Minimum number of tokens of a reply.",
        "ignore_eos": "Continue after the model's end token.",
        "spaces_between_special_tokens": "Affects only a backend's text; the engine reads ids.",
        "no_stop_trim": "Affects only a backend's text; the engine reads ids.",
        "json_schema": "Sample only JSON that matches this schema (SGLang only).",
        "regex": "Sample only text that matches this regular expression (SGLang only).",
        "ebnf": "Sample only text of this grammar (SGLang only).",
        "structural_tag": "Sample tagged parts by their own grammars (SGLang only).",
        "custom_params": "Passed to a custom logit processor of the server (SGLang only).",
    },
}
"""Descriptions by definition (the empty name is the spec itself) and key."""

METHOD = "How turn rewards become advantages."
"""Description of `method` of every credit method."""
LOSS = "The loss that training minimises."
"""Description of `kind` of every loss."""

EXAMPLES: dict[str, dict[str, list[Any]]] = {
    "": {
        "spec": ["episode/v1"],
        "name": ["gsm8k-feedback"],
        "machine": ["tools_and_user", {"preset": "retry_with_feedback"}],
        "environment": [{"use": "engine.environments.arithmetic:Arithmetic"}],
        "tools": [[{"use": "engine.environments.tools.calculator:calculate", "timeout": "5s"}]],
        "user": [{"use": "engine.environments.arithmetic:Teacher"}],
        "prompt": [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{question}}"}]],
        "backend": [{"kind": "local"}, {"kind": "sglang", "urls": ["http://127.0.0.1:30000"]}],
    },
    "ModelSpec": {
        "path": ["smollm2-135m-instruct", "Qwen/Qwen3-0.6B", "./my-model"],
        "template_kwargs": [{"enable_thinking": False}],
        "tool_calls": ["auto", *FORMATS],
        "context": [8192],
    },
    "SamplingParams": {"temperature": [1.0, 0.7], "stop": [["</call>"]], "max_new_tokens": [256]},
    "TasksSpec": {
        "rows": [[{"question": "What is 2 + 2?", "answer": "4"}]],
        "path": ["data/train.jsonl"],
        "map": [{"question": "problem"}],
        "limit": [64],
    },
    "LimitsSpec": {limit.name: list(limit.examples) for limit in LIMITS if limit.owner == "limits" and limit.examples},
    "TransitionSpec": {
        "trigger": ["answered", ["limit", "failed"]],
        "source": ["GENERATING", "*"],
        "conditions": ["turns.user < limits.user_turns", "feedback.solved && turns.user > 1"],
    },
    "StateSpec": {"action": list(ACTIONS)},
    "ReassignRule": {
        "at": ["AWAITING_USER_FEEDBACK"],
        "when": ["feedback.solved && turns.user > 1"],
        "from": ["last"],
        "to": ["previous", 0],
        "share": [0.3],
    },
    "IsolationSpec": {"memory": ["1GB"], "cpu": ["60s"], "output": ["1MB"], "processes": [16], "user": ["engine"]},
    "RolloutSpec": {"samples_per_task": [8], "concurrency": [64], "seed": [0]},
}
"""Examples by definition and key."""


def add_words(schema: dict[str, Any]) -> None:
    """Add descriptions and examples to the schema of a spec."""
    definitions = schema["$defs"]
    for name, words in WORDS.items():
        properties = (schema if not name else definitions[name])["properties"]
        for key, text in words.items():
            properties[key].setdefault("description", text)
    for name, definition in definitions.items():
        if name.endswith("Credit") and "method" in definition.get("properties", {}):
            definition["properties"]["method"].setdefault("description", METHOD)
        if name.endswith("Loss") and "kind" in definition.get("properties", {}):
            definition["properties"]["kind"].setdefault("description", LOSS)
    for name, examples in EXAMPLES.items():
        properties = (schema if not name else definitions[name])["properties"]
        for key, values in examples.items():
            properties[key]["examples"] = values
