"""The capabilities of backends: declared once, the same for checks and for what runs."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from installed_plugins import needs_plugin

from engine.backends.backend import Backend
from engine.backends.registry import runtime_class
from engine.plugin import entries, load
from engine.schemas.backend import BackendBase, backend_classes, kinds_that_train
from engine.schemas.generation import SamplingParams
from engine.spec.added import missing_sync
from engine.spec.load import load_spec
from engine.validate import check_spec

KINDS = pytest.mark.parametrize("declared", backend_classes(), ids=lambda declared: declared.kind_name())
EXAMPLES: dict[str, str] = {
    "local": "{kind: local}",
    "sglang": '{kind: sglang, urls: ["http://127.0.0.1:30000"]}',
    "vllm": '{kind: vllm, urls: ["http://127.0.0.1:8000"]}',
    "openai": '{kind: openai, url: "http://127.0.0.1:8000/v1", model: m}',
    "anthropic": '{kind: anthropic, url: "http://127.0.0.1:8000/v1", model: m}',
    "scripted": "{kind: scripted, replies: [a]}",
}
VALUES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"1": 1.0},
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "min_new_tokens": 2,
    "stop_token_ids": [7],
    "ignore_eos": True,
    "stop_regex": ["x+"],
    "json_schema": "{}",
    "regex": "x+",
    "ebnf": "root ::= x",
    "structural_tag": "{}",
    "custom_params": {"a": 1},
}


def validated(folder: Path, backend: str, more: str) -> list[str]:
    lines = ["spec: episode/v1", "name: demo", "model: {path: org/m}", "tasks: {source: inline, rows: [{q: a}]}"]
    (folder / "s.yaml").write_text("\n".join([*lines, "machine: single_turn", f"backend: {backend}", more, ""]))
    return [f"{'.'.join(map(str, item.path))}: {item.message}" for item in check_spec(load_spec(folder / "s.yaml"))]


@KINDS
def test_every_kind_runs_as_a_backend_that_names_its_config_class(declared: type[BackendBase]) -> None:
    running = runtime_class(declared)
    assert issubclass(running, Backend)
    assert running.declared is declared
    assert not inspect.isabstract(running)


@KINDS
def test_a_kind_that_trains_has_exact_ids_with_versions_and_a_way_for_weights(declared: type[BackendBase]) -> None:
    if not declared.trains:
        assert declared.weight_methods == ()
        return
    assert (declared.exact_ids, declared.reports_versions) == (True, True)
    assert missing_sync(declared.kind_name()) is not None or callable(
        load(entries("weight_syncs")[declared.kind_name()])
    )
    assert "auto" in declared.weight_methods


@needs_plugin("sglang")
def test_the_kinds_that_train_are_named_in_messages() -> None:
    assert kinds_that_train() == "`local` or `sglang`"


@KINDS
def test_validate_refuses_the_sampling_parameters_that_the_run_refuses(
    declared: type[BackendBase], tmp_path: Path
) -> None:
    backend = declared.model_validate(yaml.safe_load(EXAMPLES[declared.kind_name()]))
    refused = backend.unsupported(SamplingParams.model_validate(VALUES))
    assert refused == list(backend.lacking)
    found = validated(tmp_path, EXAMPLES[declared.kind_name()], f"sampling: {json.dumps(VALUES)}")
    assert sorted(line for line in found if "does not have" in line) == sorted(
        f"sampling.{name}: the `{declared.kind_name()}` backend does not have `{name}`" for name in refused
    )


def test_every_unsupported_parameter_is_one_that_this_test_sets() -> None:
    examples = [
        declared.model_validate(yaml.safe_load(EXAMPLES[declared.kind_name()])) for declared in backend_classes()
    ]
    assert {name for backend in examples for name in backend.lacking} <= set(VALUES)


@needs_plugin("roles")
def test_a_role_s_sampling_is_checked_against_its_own_backend(tmp_path: Path) -> None:
    user = 'user: {prompt: [{role: user, content: "{{reply}}"}], backend: {kind: local}, sampling: {regex: "x+"}}'
    found = validated(tmp_path, EXAMPLES["sglang"], f'sampling: {{regex: "x+"}}\n{user}')
    assert [line for line in found if "does not have" in line] == [
        "user.sampling.regex: the `local` backend does not have `regex`"
    ]


@pytest.mark.slow
def test_validate_imports_no_backend() -> None:
    code = (
        "import sys; from engine.validate import check_spec; from engine.spec.load import load_spec; "
        "check_spec(load_spec(sys.argv[1])); print(sorted(m for m in sys.modules if m.startswith('engine.backends')))"
    )
    spec = Path(__file__).parents[3] / "specs" / "train_arithmetic.yaml"
    done = subprocess.run([sys.executable, "-c", code, str(spec)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
