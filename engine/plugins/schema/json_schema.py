"""JSON Schemas of the data classes for editors: exactly what the loader accepts.

In four places Pydantic's schema of a spec differs from the loader: a preset may be given as a string, `${NAME}` may
replace a number, with `extends` required keys may be missing, and some keys are required only together with others.
This module adds them, and descriptions and examples for keys whose data class has no docstring: every key of a spec has
a description, and the loader accepts every example.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic.json_schema import models_json_schema

from engine.actions.facts import ACTIONS
from engine.limits import LIMITS
from engine.plugin import Section, entries, loaded
from engine.schemas.base import Contract, Struct, adapter
from engine.schemas.environment import Reset, Step, Task, ToolReply, UserTurn
from engine.schemas.episode import EpisodeSpec
from engine.schemas.generation import GenerateRequest, Generation, SamplingParams
from engine.schemas.journal import JournalEntry
from engine.schemas.message import Message, ToolCall, ToolResult
from engine.schemas.reward import Posting, RewardEvent
from engine.schemas.script import Script
from engine.schemas.sections import SectionOwner, SpecSection, owner_classes, sections_of
from engine.schemas.tasks import all_sources
from engine.schemas.trajectory import Branch, Outcome, Trajectory, Turn
from engine.tokens.toolcalls import FORMATS

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]

CONTRACTS: dict[str, type[Contract | Struct]] = {
    "branch": Branch,
    "generate-request": GenerateRequest,
    "generation": Generation,
    "journal-entry": JournalEntry,
    "message": Message,
    "outcome": Outcome,
    "posting": Posting,
    "replies": Script,
    "reset": Reset,
    "reward-event": RewardEvent,
    "sampling-params": SamplingParams,
    "step": Step,
    "task": Task,
    "tool-call": ToolCall,
    "tool-reply": ToolReply,
    "tool-result": ToolResult,
    "trajectory": Trajectory,
    "turn": Turn,
    "user-turn": UserTurn,
}
"""Public data classes of the core, by the name of their file."""

VARIABLE: Schema = {
    "type": "string",
    "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*(:[^{}]*)?\}",
    "description": "An environment variable: ${NAME} or ${NAME:default}.",
}
_BREAK = re.compile(r"(?<!\n)\n(?!\n|RewardEvent)")
"""A line break inside a paragraph; the examples of reward events have lines of their own."""
_VARIABLE_REF: Schema = {"$ref": "#/$defs/Variable"}


def documents() -> dict[str, str]:
    """Return the text of every JSON Schema file, by its name without `.schema.json`."""
    schemas = {"episode": episode_schema()}
    for name, model in {**CONTRACTS, **loaded("schemas", ("episode", *CONTRACTS))}.items():
        schemas[name] = _untitled({"$schema": DIALECT, **adapter(model).json_schema(by_alias=True)})
        if adapt := getattr(model, "adapt_json_schema", None):
            adapt(schemas[name])
    return {
        name: json.dumps(_joined(schema), indent=2, ensure_ascii=False) + "\n"
        for name, schema in sorted(schemas.items())
    }


def _joined(schema: Any) -> Any:
    """A schema whose descriptions have no line breaks of the source inside a paragraph; those of examples stay."""
    if isinstance(schema, list):
        return [_joined(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _BREAK.sub(" ", value) if key == "description" and isinstance(value, str) else _joined(value)
        for key, value in schema.items()
    }


def episode_schema() -> Schema:
    """The schema of a spec as written: before `extends`, variables and presets are resolved."""
    schema = _untitled(_with_sections())
    definitions: Schema = schema["$defs"]
    for definition in definitions.values():
        for key, value in definition.get("properties", {}).items():
            selects_class = "const" in value  # the `kind` of a backend or a loss, the `method` of a credit
            definition["properties"][key] = value if selects_class else _with_variable(value)
    properties: Schema = schema["properties"]
    for key, value in properties.items():
        properties[key] = value if key == "spec" else _with_variable(value)
    for key in ("stop", "stop_regex"):
        texts = definitions["SamplingParams"]["properties"][key]
        texts["anyOf"] = [{name: texts.pop(name) for name in ("type", "items")}, {"type": "string"}]
    properties["backend"] = {"anyOf": properties["backend"]["oneOf"], "default": {"kind": "local"}}
    for definition in definitions.values():  # those of the models that play a part
        backend = definition.get("properties", {}).get("backend", {})
        if kinds := next((member["oneOf"] for member in backend.get("anyOf", ()) if "oneOf" in member), None):
            backend["anyOf"] = [*kinds, {"type": "null"}]
    for _, _, model in _sections():
        model.adapt_json_schema(definitions)
    credit = definitions["RewardsSpec"]["properties"]["credit"]
    definitions["RewardsSpec"]["properties"]["credit"] = {
        "anyOf": credit["oneOf"],
        **{key: value for key, value in credit.items() if key not in ("oneOf", "discriminator")},
    }
    modes = {
        "type": "string",
        "enum": ["thread", *entries("isolation_modes")],
        "description": "Where it runs, without limits of its own.",
    }
    for owner in ({"properties": properties}, *definitions.values()):
        if "isolation" in owner.get("properties", {}):  # `isolation: process` as well as a mapping
            owner["properties"]["isolation"]["anyOf"].insert(0, modes)
    presets = next(member for member in definitions["MachineSpec"]["properties"]["preset"]["anyOf"] if "enum" in member)
    properties["machine"] = {  # `machine: tools` as well as a mapping
        "anyOf": [{**presets, "description": "A preset, by name."}, {"$ref": "#/$defs/MachineSpec"}, _VARIABLE_REF],
        "default": "tools_and_user",
    }
    properties["extends"] = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "description": "Specs that this one begins with, relative to this file, or names of published settings "
        "(docs/published.md); later ones win over earlier ones, and this file over all. Mappings are merged, anything "
        "else is replaced.",
    }
    definitions["Variable"] = VARIABLE
    writes = {"required": ["op"], "properties": {"op": {"enum": ["add", "set"]}}}
    definitions["ReassignRule"]["allOf"] = [{"if": writes, "then": _WRITES, "else": _MOVES}]
    moves = {"required": ["op"], "properties": {"op": {"const": "transfer"}}}
    definitions["RewardEvent"]["allOf"] = [{"if": moves, "then": _MOVES, "else": _WRITES}]
    definitions["Mark"]["oneOf"] = [{"required": ["text"]}, {"required": ["pattern"]}]
    if "SGLangBackendSpec" in definitions:
        definitions["SGLangBackendSpec"]["oneOf"] = [{"required": ["urls"]}, {"required": ["launch"]}]
    add_words(schema)
    whole = _loosen(schema)
    whole["allOf"] = [_USERS]
    return {"$schema": DIALECT, **schema, "if": {"required": ["extends"]}, "then": True, "else": whole}


def _sections() -> list[tuple[type[SectionOwner], Section, type[SpecSection]]]:
    """The sections that plugins add, with the classes to which they add them."""
    owners = dict(owner_classes(EpisodeSpec)).values()
    return [(owner, section, model) for owner in owners for section, model in sections_of(owner)]


def _with_sections() -> Schema:
    """Pydantic's schema of a spec, with the keys that plugins add."""
    sections = _sections()
    models: list[tuple[Any, Any]] = [(EpisodeSpec, "validation"), *((model, "validation") for _, _, model in sections)]
    references, rest = models_json_schema(models, by_alias=True)
    definitions: Schema = rest["$defs"]
    schema: Schema = definitions.pop("EpisodeSpec")
    for owner, section, model in sections:
        properties = (schema if owner is EpisodeSpec else definitions[owner.__name__])["properties"]
        reference = references[model, "validation"]
        if section.inline:
            properties |= definitions.pop(reference["$ref"].rpartition("/")[2])["properties"]
        else:
            about = {"description": " ".join((model.__doc__ or "").split())}
            optional = {"anyOf": [reference, {"type": "null"}], "default": None}
            properties[section.keys[0]] = (optional if model.NULLABLE else reference) | about
    return {"$defs": dict(sorted(definitions.items())), **schema}


def _untitled(schema: Schema) -> Schema:
    """Remove the titles that Pydantic makes of names: an editor would show each name twice."""
    for key in ("properties", "$defs"):
        for item in schema.get(key, {}).values():
            item.pop("title", None)
            _untitled(item)
    return schema


def _with_variable(schema: Schema) -> Schema:
    """Accept a variable where a number, a boolean or an enumerated word is required."""
    if "anyOf" in schema:
        wanted = [member for member in schema["anyOf"] if member.get("type") != "null"]
        return {**schema, "anyOf": [*schema["anyOf"], _VARIABLE_REF]} if any(map(_narrow, wanted)) else schema
    if not _narrow(schema):
        return schema
    outer: Schema = {key: schema[key] for key in ("description", "default", "title") if key in schema}
    inner = {key: value for key, value in schema.items() if key not in outer}
    return {"anyOf": [inner, _VARIABLE_REF], **outer}


def _narrow(schema: Schema) -> bool:
    if any(key in schema for key in ("enum", "const", "pattern")):
        return True
    return schema.get("type") in ("integer", "number", "boolean") or any(map(_narrow, schema.get("anyOf", [])))


def _loosen(schema: Schema) -> Schema:
    """Remove every `required` that a base file may satisfy, and return the requirements of a spec without a base file.

    Only mappings are merged: items of lists must always be complete.
    """
    definitions: Schema = schema["$defs"]
    backends: list[Schema] = []
    for name in sorted(name for name in definitions if name.endswith("BackendSpec")):
        kind = {"kind": {"const": definitions[name]["properties"]["kind"]["const"]}}
        if required := [key for key in definitions[name].pop("required", []) if key != "kind"]:
            backends.append({"if": {"required": ["kind"], "properties": kind}, "then": {"required": required}})
    by_kind = {"if": {"type": "object"}, "then": {"required": ["kind"], "allOf": backends}}
    whole: Schema = {"required": schema.pop("required"), "properties": {"backend": by_kind}}
    by_method = {"if": {"type": "object"}, "then": {"required": ["method"]}}
    played = {"if": {"type": "object"}, "then": {"anyOf": [{"required": ["use"]}, {"required": ["prompt"]}]}}
    whole["properties"]["rewards"] = {"properties": {"credit": by_method, "scorer": played}}
    whole["properties"]["user"] = played
    whole["properties"]["users"] = {"additionalProperties": played}
    for key, value in schema["properties"].items():
        members = [] if key == "backend" else [value, *value.get("anyOf", [])]  # without those of list items
        names = {member["$ref"].rpartition("/")[2] for member in members if "$ref" in member}
        for name in names - {"Variable"}:
            if rules := _rules(name, definitions[name]):
                whole["properties"][key] = {"if": {"type": "object"}, "then": {"allOf": rules}}
    return whole


def _rules(name: str, definition: Schema) -> list[Schema]:
    """The requirements of a mapping of this kind, moved from its `required`."""
    required = definition.pop("required", None)
    rules: list[Schema] = [{"required": required}] if required else []
    if name == "MachineSpec":
        rules.append({"anyOf": [{"required": ["preset"]}, {"required": ["initial", "states"]}]})
    for source, facts in all_sources().items() if name == "TasksSpec" else ():
        chosen = {"required": ["source"], "properties": {"source": {"const": source}}}
        rules.append({"if": chosen, "then": {"required": [facts.keys[0]]}})
    return rules


_MOVES: Schema = {
    "required": ["to"],
    "oneOf": [
        {"required": ["share"], "not": {"required": ["value"]}},
        {"required": ["value"], "not": {"required": ["share"]}},
    ],
}
"""What a transfer needs."""
_WRITES: Schema = {"required": ["value"], "not": {"anyOf": [{"required": ["to"]}, {"required": ["share"]}]}}
"""What `add` and `set` need."""


_USERS: Schema = {
    "if": {"required": ["users"], "properties": {"users": {"type": "object", "minProperties": 1}}},
    "then": {
        "not": {"required": ["user"], "properties": {"user": {"type": "object"}}},
        "required": ["tasks"],
        "properties": {"tasks": {"required": ["user"]}},
    },
}
"""One user for all tasks, or several from which `tasks.user` chooses."""

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
        "transitions": "Where events lead, in the order in which they are tried. Where none says otherwise, "
        "`limit` and `failed` lead to the final state, if there is one alone.",
    },
    "TasksSpec": {
        "source": "`inline` rows, a `jsonl`, `csv` or `parquet` file, a data set on the `hub`, a `python` function, or "
        "a `mix` of several sources."
    },
    "PromptMessage": {"role": "The role of the message."},
    "RoleMessage": {"role": "The role of the message.", "content": "The text; `{{field}}` is filled in."},
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
        "unless": [["last.malformed", "facts.done"]],
    },
    "StateSpec": {"action": list(ACTIONS)},
    "ReassignRule": {
        "at": ["AWAITING_USER_FEEDBACK"],
        "when": ["feedback.solved && turns.user > 1"],
        "turn": ["last"],
        "to": ["previous", 0, {"first": "answered"}],
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
            definition["properties"]["method"].setdefault("description", "How turn rewards become advantages.")
        if name.endswith("Loss") and "kind" in definition.get("properties", {}):
            definition["properties"]["kind"].setdefault("description", "The loss that training minimises.")
    for name, examples in EXAMPLES.items():
        properties = (schema if not name else definitions[name])["properties"]
        for key, values in examples.items():
            properties[key]["examples"] = values
