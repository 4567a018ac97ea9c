"""The rules as a whole: stable ids, and never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.spec.load import read_spec
from engine.validate import all_rules, check_spec


def test_ids_are_stable() -> None:
    assert sorted((item.id, item.severity) for item in all_rules()) == [
        ("agent.allow", "error"),
        ("agent.missing", "error"),
        ("agent.no-effect", "error"),
        ("backend.no-experts", "error"),
        ("backend.no-launcher", "error"),
        ("backend.no-prices", "error"),
        ("backend.unsupported-sampling", "error"),
        ("code.action", "error"),
        ("code.adapter", "error"),
        ("code.construct", "error"),
        ("code.given", "error"),
        ("code.import", "error"),
        ("code.moved", "warning"),
        ("code.no-package", "info"),
        ("code.protocol", "error"),
        ("code.returns", "error"),
        ("code.unknown-field", "warning"),
        ("code.with-type", "error"),
        ("condense.action", "error"),
        ("condense.no-effect", "warning"),
        ("condense.no-package", "info"),
        ("condense.window", "warning"),
        ("environment.effects", "error"),
        ("guard.constant", "warning"),
        ("guard.fact-may-miss", "warning"),
        ("guard.not-boolean", "error"),
        ("guard.parse", "error"),
        ("guard.too-costly", "error"),
        ("guard.unknown-fact", "warning"),
        ("guard.unknown-field", "warning"),
        ("guard.unknown-name", "error"),
        ("guard.wrong-type", "error"),
        ("isolation.no-effect", "error"),
        ("limits.contradiction", "error"),
        ("limits.never-binds", "info"),
        ("limits.no-deadline", "info"),
        ("limits.no-time", "warning"),
        ("limits.prompt-too-long", "error"),
        ("limits.too-wide", "info"),
        ("machine.cycle-by-time", "warning"),
        ("machine.done-unreachable", "error"),
        ("machine.duplicate-transition", "warning"),
        ("machine.final-action", "error"),
        ("machine.final-exits", "error"),
        ("machine.no-action", "error"),
        ("machine.no-default", "error"),
        ("machine.overlap", "warning"),
        ("machine.shadowed", "error"),
        ("machine.too-large", "warning"),
        ("machine.too-many", "error"),
        ("machine.unbounded-cycle", "error"),
        ("machine.unhandled-event", "error"),
        ("machine.unknown-action", "error"),
        ("machine.unknown-event", "error"),
        ("machine.unknown-state", "error"),
        ("machine.unreachable", "error"),
        ("machine.user-after-user", "warning"),
        ("model.calls-not-read", "error"),
        ("model.context", "warning"),
        ("model.hidden-roles", "warning"),
        ("model.images", "error"),
        ("model.no-tool-role", "error"),
        ("model.no-tools", "warning"),
        ("model.not-at-hand", "info"),
        ("model.rewrites-history", "info"),
        ("model.special-text", "warning"),
        ("model.stop-in-token", "warning"),
        ("model.template", "error"),
        ("model.template-patch", "error"),
        ("model.unknown", "error"),
        ("notify.no-effect", "warning"),
        ("notify.no-package", "info"),
        ("prompt.empty", "error"),
        ("prompt.jinja", "warning"),
        ("prompt.unknown-field", "error"),
        ("recover.unused", "warning"),
        ("report.no-effect", "warning"),
        ("report.no-package", "info"),
        ("rewards.credit-group", "info"),
        ("rewards.credit-ignores", "warning"),
        ("rewards.credit-needs", "warning"),
        ("rewards.no-effect", "warning"),
        ("rewards.no-such-turn", "error"),
        ("rewards.nothing-to-move", "warning"),
        ("rewards.outcome-drops", "warning"),
        ("rewards.truncated-pays", "info"),
        ("rewards.turn-may-miss", "warning"),
        ("rewards.turns-in-sum", "info"),
        ("rewards.unknown-name", "warning"),
        ("rewards.unpayable", "error"),
        ("role.free-verdict", "warning"),
        ("role.frozen", "error"),
        ("role.no-file", "error"),
        ("role.no-player", "error"),
        ("role.policy-weights", "warning"),
        ("role.unknown-field", "error"),
        ("role.user-never-ends", "warning"),
        ("rollout.drivers", "error"),
        ("rollout.no-effect", "warning"),
        ("rollout.shards", "warning"),
        ("rules.unknown-state", "error"),
        ("spec.no-file", "error"),
        ("spec.outside", "error"),
        ("tasks.harbor", "error"),
        ("tasks.no-effect", "warning"),
        ("tasks.not-read", "info"),
        ("tasks.row", "error"),
        ("tasks.unreadable", "error"),
        ("tasks.video", "warning"),
        ("tools.docs", "warning"),
        ("tools.missing", "warning"),
        ("tools.name", "error"),
        ("tools.not-called", "warning"),
        ("tools.schema", "warning"),
        ("traces.no-effect", "warning"),
        ("traces.no-package", "info"),
        ("train.adapter", "error"),
        ("train.backend", "error"),
        ("train.colocate", "error"),
        ("train.critic", "error"),
        ("train.critic-option", "warning"),
        ("train.cut-sampling", "warning"),
        ("train.data", "warning"),
        ("train.delta", "warning"),
        ("train.difficulty-no-effect", "warning"),
        ("train.eval-form", "error"),
        ("train.eval-no-effect", "warning"),
        ("train.eval-on-training-tasks", "warning"),
        ("train.eval-tasks", "error"),
        ("train.expert-routing", "warning"),
        ("train.freeze", "error"),
        ("train.greedy", "error"),
        ("train.half-precision", "warning"),
        ("train.kl-credit", "error"),
        ("train.kl-estimator", "warning"),
        ("train.metric", "error"),
        ("train.min-group", "error"),
        ("train.no-effect", "warning"),
        ("train.no-package", "info"),
        ("train.nothing-to-learn", "error"),
        ("train.overlong", "warning"),
        ("train.precision", "warning"),
        ("train.published-steps", "warning"),
        ("train.random-weights", "warning"),
        ("train.sft", "error"),
        ("train.shifted-sampling", "error"),
        ("train.weight-sync", "error"),
        ("train.weight-sync-method", "warning"),
        ("user.missing", "error"),
    ]


def test_findings_come_in_the_order_of_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(
        "rewards: {reassign: [{at: X, op: add, value: 1, when: turns}]}\n"
        "spec: episode/v1\nname: demo\nmodel: {path: org/m}\nuser: {use: 'no_such_module_here:U'}\n"
        "machine: single_turn\ntasks: {source: jsonl, path: none}\nprompt: [{role: user, content: hi}]\n"
    )
    loaded, _ = read_spec("s.yaml")
    assert loaded is not None
    assert [
        (item.origin.line, item.rule) for item in check_spec(loaded) if item.origin and item.severity != "info"
    ] == [
        (1, "rules.unknown-state"),
        (1, "guard.not-boolean"),
        (5, "code.import"),
        (7, "tasks.unreadable"),
    ]


names = st.sampled_from(["PENDING", "GENERATING", "DONE", "A", "B", "", "*", "é"])
events = st.sampled_from(["ready", "answered", "limit", "failed", "x", ""])
actions = st.sampled_from(
    ["reset", "generate", "ask_user", "step", "score", "nope", "json:loads", "json:nope", ":", "a:b:c"]
)
uses = st.sampled_from(
    ["json:loads", "json:JSONDecoder", "json:nope", "nope:x", "textwrap:dedent", "x", "os:environ", "enum:Enum"]
)
guards = st.none() | st.sampled_from(["true", "turns.user < 3", "nope", "(", ""])
states = st.fixed_dictionaries({}, optional={"action": actions, "final": st.booleans(), "with": st.just({"x": 1})})
transitions = st.fixed_dictionaries(
    {"trigger": events | st.lists(events, max_size=3), "source": names | st.lists(names, max_size=3), "dest": names},
    optional={"conditions": guards},
)
machines = st.fixed_dictionaries(
    {"initial": names, "states": st.dictionaries(names, states, min_size=1, max_size=4)},
    optional={"preset": st.sampled_from(["tools", "single_turn"]), "transitions": st.lists(transitions, max_size=5)},
)
entries = st.fixed_dictionaries(
    {"use": uses}, optional={"with": st.dictionaries(st.sampled_from(["x", "s", "text"]), st.integers(), max_size=2)}
)
prompts = st.lists(
    st.fixed_dictionaries(
        {"role": st.just("user"), "content": st.sampled_from(["{{q}}", "{{", "{{}}", "{{a.b}}", "x"])}
    ),
    max_size=2,
)
specs = st.fixed_dictionaries(
    {
        "spec": st.just("episode/v1"),
        "name": st.just("demo"),
        "model": st.just({"path": "org/m"}),
        "tasks": st.sampled_from(
            [
                {"source": "inline", "rows": [{"q": 1}, {}]},
                {"source": "jsonl", "path": ""},
                {"source": "python", "use": "json:loads"},
            ]
        ),
        "machine": machines,
    },
    optional={
        "environment": entries,
        "user": entries,
        "tools": st.lists(entries, max_size=2),
        "prompt": prompts,
        "rewards": st.fixed_dictionaries({}, optional={"scorer": entries}),
    },
)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(specs)
def test_no_spec_raises(tmp_path: Path, document: dict[str, Any]) -> None:
    file = tmp_path / "fuzz.yaml"
    file.write_text(json.dumps(document))
    loaded, problems = read_spec(file)
    if loaded is None:
        assert problems
        return
    known = {item.id for item in all_rules()}
    for problem in check_spec(loaded):
        assert problem.rule in known
        assert problem.origin is not None
