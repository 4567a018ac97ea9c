"""Words and examples for an editor, where a contract's own docstrings have none.

Invariant: every key of a spec has a description, and every example is one that the loader accepts; the tests hold both.
"""

from __future__ import annotations

from typing import Any

from engine.actions.facts import ACTIONS
from engine.limits import LIMITS
from engine.tokens.toolcalls import FORMATS

WORDS: dict[str, dict[str, str]] = {
    "": {
        "description": "What the episode is about, for whoever reads the spec.",
        "model": "Which model speaks, and how conversations become its tokens.",
        "backend": "Who samples: `local`, `sglang`, `openai` or `scripted`.",
        "sampling": "How tokens are sampled.",
        "tasks": "Where tasks come from.",
        "environment": "The world of each episode, by entry point.",
        "tools": "What the model may call: typed functions, by entry point.",
        "user": "The simulated user: a class of your own, or a model that plays it.",
        "machine": "The state machine: a preset by name, a preset with changes, or your own.",
        "limits": "What one episode may cost.",
        "rewards": "How rewards are moved between turns, and become advantages.",
        "recover": "What the model is told when its reply cannot be used.",
        "isolation": "Where the spec's own code runs: in threads of the engine, or in worker processes with limits.",
        "rollout": "How many episodes run, and how many at once.",
    },
    "EnvironmentSpec": {"effects": "What a crash may do with a call that was made already."},
    "ToolSpec": {"effects": "What a crash may do with a call that was made already."},
    "UserSpec": {"effects": "What a crash may do with an answer that was given already."},
    "MachineSpec": {
        "states": "The states, by name, and what is done in each.",
        "transitions": "Where events lead, in the order in which they are tried.",
    },
    "TransitionSpec": {"dest": "The state that comes next."},
    "TasksSpec": {
        "source": "`inline` rows, a `jsonl` or `parquet` file, a data set on the `hub`, or a `python` function."
    },
    "PromptMessage": {"role": "Who says it."},
    "RoleMessage": {"role": "Who says it.", "content": "What is said; `{{field}}` is filled in."},
    "ReassignRule": {"op": "Move what is there, add to it, or set it."},
    "RewardEvent": {"op": "Add to what is there, set it, or move it."},
    "TextPart": {"type": "A run of text.", "text": "The text."},
    "ImagePart": {"type": "An image, by reference."},
    "LocalBackendSpec": {"kind": "transformers in this process."},
    "SGLangBackendSpec": {"kind": "SGLang servers, over their native HTTP API."},
    "ScriptedBackendSpec": {"kind": "Replies from a file: a dry run without a model."},
    "OpenAIBackendSpec": {
        "kind": "Any OpenAI-compatible chat endpoint; its rows do not train.",
        "model": "The model's name at the endpoint.",
        "api_key_env": "Name of the environment variable that holds the API key.",
        "retries": "Attempts after the first, on connection errors and 5xx.",
    },
    "SamplingParams": {
        "top_p": "Sample from the fewest tokens whose probabilities sum to this.",
        "min_p": "Leave out tokens less likely than this times the likeliest.",
        "frequency_penalty": "Subtracted from a token's logit for each time it was said.",
        "presence_penalty": "Subtracted from the logit of every token that was said.",
        "repetition_penalty": "Divides (or multiplies) the logits of what was said; 1 is none.",
        "min_new_tokens": "No end before so many tokens.",
        "ignore_eos": "Go on behind the model's end token.",
        "spaces_between_special_tokens": "Affects a backend's text alone; the engine reads ids.",
        "no_stop_trim": "Affects a backend's text alone; the engine reads ids.",
        "json_schema": "Sample only JSON that fits this schema (SGLang only).",
        "regex": "Sample only what fits this regular expression (SGLang only).",
        "ebnf": "Sample only what fits this grammar (SGLang only).",
        "structural_tag": "Sample tagged parts by their own grammars (SGLang only).",
        "custom_params": "Handed to a logit processor of the server's own (SGLang only).",
    },
}
"""By definition (the empty name is the spec itself) and key."""

METHOD = "How turn rewards become advantages."
"""`method` of every way of credit."""
LOSS = "What is made smaller."
"""`kind` of every loss."""

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
"""Likewise."""


def add_words(schema: dict[str, Any]) -> None:
    """Put words and examples into an episode's schema."""
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
