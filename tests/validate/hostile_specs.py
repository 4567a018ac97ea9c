"""Specs that would keep a careless reader or verifier busy for ever, or make it fail."""

from __future__ import annotations

from collections.abc import Callable

HEAD = "spec: episode/v1\nname: demo\nmodel: {path: org/m}\n"
TASKS = "tasks: {source: inline, rows: [{q: a}]}\n"
PROMPT = 'prompt: [{role: user, content: "{{q}}"}]\n'
SINGLE = "machine: single_turn\n"
BASE = HEAD + TASKS + PROMPT
WHOLE = BASE + SINGLE
OWN = BASE + "machine:\n  initial: S0\n  states:\n"
END = (
    '    Z: {final: true}\n  transitions:\n    - {trigger: [truncated, aborted, limit, failed], source: "*", dest: Z}\n'
)
NINES = "9" * 400


def guarded(count: int, condition: Callable[[int], str]) -> str:
    """Many transitions for one event."""
    lines = (
        f'    - {{trigger: answered, source: GENERATING, dest: DONE, conditions: "{condition(index)}"}}\n'
        for index in range(count)
    )
    return BASE + "machine:\n  preset: single_turn\n  transitions:\n" + "".join(lines)


def many(count: int, item: str) -> str:
    """A flow list of the same thing."""
    return "[" + ", ".join([item] * count) + "]"


def ring(count: int) -> str:
    """States one after another, round and round."""
    actions = ("generate", "ask_user", "call_tools")
    events = ("[answered, tool_calls, malformed]", "[feedback, satisfied]", "[results]")
    states = "".join(f"    S{index}: {{action: {actions[index % 3]}}}\n" for index in range(count))
    steps = "".join(
        f"    - {{trigger: {events[index % 3]}, source: S{index}, dest: S{(index + 1) % count}}}\n"
        for index in range(count)
    )
    return OWN + states + END + steps + f"limits: {{assistant_turns: {NINES}, user_turns: 9999, tool_calls: 9999}}\n"


def dense(count: int, ways: int) -> str:
    """Every state leads to many others, and nothing counts."""
    states = "".join(f"    S{index}: {{action: reset}}\n" for index in range(count))
    steps = "".join(
        f'    - {{trigger: ready, source: S{index}, dest: S{(index * 7 + way) % count}, conditions: "facts.x == {way}"}}\n'
        for index in range(count)
        for way in range(ways)
    )
    return OWN + states + END + steps + "    - {trigger: ready, source: '*', dest: Z}\n"


def names(prefix: str, count: int) -> str:
    """a0, a1, …"""
    return ", ".join(f"{prefix}{index}" for index in range(count))


REFUSED: dict[str, tuple[str, str]] = {
    "deep list": (WHOLE + "x: " + "[" * 100_000 + "]" * 100_000, "yaml.depth"),
    "deep mapping": (WHOLE + "".join(" " * level + "a:\n" for level in range(1000)), "yaml.depth"),
    "only braces": ("{" * 5000, "yaml.depth"),
    "only questions": ("? " * 100_000, "yaml.depth"),
    "alias bomb": (
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(f"{chr(98 + n)}: &{chr(98 + n)} {many(9, '*' + chr(97 + n))}\n" for n in range(15)),
        "yaml.size",
    ),
    "too many rows": (HEAD + f"tasks: {{source: inline, rows: {many(120_000, '{q: a}')}}}\n", "yaml.size"),
    "anchor in itself": (BASE + "machine: &m {preset: single_turn, states: {A: *m}}\n", "yaml.alias"),
    "odd keys": (WHOLE + "? [a, b]\n: c\n? {a: b}\n: c\n1: 2\ntrue: x\n~: y\n1.5: z\n", "yaml.key"),
    "merge key": (BASE + "x: &a {x: 1}\nmachine: {<<: *a, preset: single_turn}\n", "yaml.merge-key"),
    "duplicate key": (WHOLE + "name: again\n", "yaml.duplicate-key"),
    "tags": (WHOLE + 'description: !!python/object/apply:os.system ["echo hi"]\n', "yaml.tag"),
    "surrogate": (WHOLE + 'description: "\\ud800"\n', "yaml.syntax"),
    "raw nul": (WHOLE + "description: a\0b\n", "yaml.syntax"),
    "tab": (WHOLE + "limits:\n\tturn_tokens: 3\n", "yaml.syntax"),
    "mark inside": (HEAD + "\ufeff" + TASKS, "yaml.syntax"),
    "open quote": (HEAD + 'description: "' + "x\n" * 200_000, "yaml.syntax"),
    "two documents": (WHOLE + "---\na: 1\n", "yaml.documents"),
    "infinite": (
        WHOLE + "limits: {episode_seconds: .inf}\nsampling: {temperature: .nan, top_p: 1e400}\n",
        "spec.bad-value",
    ),
    "long base 16": (
        WHOLE + "description: 0x" + "f" * 3000 + "\nlimits: {images: 0x" + "f" * 3900 + "}\n",
        "spec.wrong-type",
    ),
    "variables": (HEAD + 'prompt: [{role: user, content: "' + "${" * 500_000 + '"}]\n', "spec.more"),
    "unknown keys": (WHOLE + "".join(f"k{'x' * 900}{index}: 1\n" for index in range(1000)), "spec.more"),
    "wrong types": (BASE + f"machine: {{preset: tools, transitions: {many(100_000, '1')}}}\n", "spec.more"),
    "long name": (WHOLE.replace("demo", '"' + "a" * 500_000 + '!"'), "spec.bad-value"),
    "nothing": (" " * 3_000_000, "spec.empty"),
    "extends itself": ("extends: s.yaml\n" + WHOLE, "spec.extends-cycle"),
    "extends much": (f"extends: {many(5000, 'base.yaml')}\n" + SINGLE, "spec.extends"),
    "extends a device": ("extends: /dev/zero\n" + SINGLE, "spec.outside"),
    "transitions": (
        BASE
        + "machine:\n  preset: tools\n  transitions:\n    - {trigger: ["
        + names("e", 30_000)
        + '], source: "*", dest: DONE}\n',
        "machine.too-many",
    ),
    "guard too long": (guarded(1, lambda _: "true && " * 20_000 + "true"), "guard.parse"),
    "guard too deep": (guarded(1, lambda _: "(" * 1900 + "true" + ")" * 1900), "guard.parse"),
    "guard of negations": (guarded(1, lambda _: "!" * 3900 + "true"), "guard.parse"),
    "guard of a huge number": (guarded(1, lambda _: "turns.user < " + "9" * 30), "guard.parse"),
    "rows of a device": (WHOLE.replace("inline, rows: [{q: a}]", "jsonl, path: /dev/zero"), "tasks.unreadable"),
    "rows of a folder": (WHOLE.replace("inline, rows: [{q: a}]", "jsonl, path: ."), "tasks.unreadable"),
    "rows of a long name": (WHOLE.replace("inline, rows: [{q: a}]", "jsonl, path: " + "a" * 5000), "tasks.unreadable"),
    "shared ids": (
        HEAD + f"tasks: {{source: inline, id: q, rows: {many(20_000, '{q: a}')}}}\n" + PROMPT + SINGLE,
        "tasks.row",
    ),
    "pattern": (WHOLE + 'rollout: {samples_per_task: 2}\ntrain: {freeze: ["' + "(" * 5000 + '"]}\n', "train.freeze"),
    "measure": (
        WHOLE + "rollout: {samples_per_task: 2}\ntrain: {eval: {metric: pass@" + "9" * 5000 + "}}\n",
        "train.metric",
    ),
}
"""What must be refused, and the rule that says so."""

BUSY: dict[str, tuple[str, str | None]] = {
    "guards": (guarded(5000, lambda index: f"turns.assistant < {index}"), "check.unfinished"),
    "long guards": (
        guarded(400, lambda index: " || ".join(f"facts.a{part} == {index}" for part in range(150))),
        "check.unfinished",
    ),
    "guards that multiply": (
        guarded(
            60, lambda index: " && ".join(f"(turns.user < {k + index} || turns.assistant < {k})" for k in range(8))
        ),
        "check.unfinished",
    ),
    "one guard that multiplies": (
        guarded(1, lambda index: " && ".join(f"(facts.a{k} == 1 || facts.b{k} == 1)" for k in range(40))),
        None,
    ),
    "guard of infinity": (guarded(1, lambda _: "tokens.sampled * 1e308 * 1e308 < 1e400 - 1e400"), None),
    "ring": (ring(300), "limits.too-wide"),
    "larger ring": (ring(1500), "machine.too-large"),
    "dense": (dense(400, 10), "check.unfinished"),
    "wide limits": (
        BASE + "machine: tools_and_user\nlimits: {assistant_turns: 70, user_turns: 70, tool_calls: 70}\n",
        "limits.too-wide",
    ),
    "huge limits": (
        WHOLE.replace("single_turn", "tools_and_user")
        + f"limits: {{assistant_turns: {NINES}, user_turns: {NINES}, tool_calls: {NINES}, turn_tokens: {NINES}, "
        + f"images: {NINES}, episode_tokens: {NINES}9}}\nrollout: {{samples_per_task: {NINES}, live_episodes: {NINES}}}\n"
        + f"sampling: {{max_new_tokens: {NINES}}}\n",
        "limits.too-wide",
    ),
    "reward rules": (
        BASE
        + "machine: tools_and_user\nlimits: {assistant_turns: 15, user_turns: 15, tool_calls: 15}\n"
        + f"rewards: {{reassign: {many(6000, '{at: DONE, turn: first, to: last, share: 0.5, when: turns.user < 9}')}}}\n",
        "check.unfinished",
    ),
    "rows and prompts": (
        HEAD
        + f"tasks: {{source: inline, rows: {many(20_000, '{q: a}')}}}\n"
        + "prompt:\n"
        + "  - {role: user, content: '{{q}}'}\n" * 5000
        + SINGLE,
        "check.unfinished",
    ),
    "open braces": (HEAD + TASKS + 'prompt: [{role: user, content: "' + "{{" * 1_000_000 + '"}]\n' + SINGLE, None),
    "many fields": (
        HEAD + TASKS + 'prompt: [{role: user, content: "' + "{{q}}" * 200_000 + '"}]\n' + SINGLE,
        None,
    ),
    "tools that are not there": (
        BASE
        + "machine: tools\ntools: ["
        + ", ".join(f"{{use: 'no_such_module_{index}:x'}}" for index in range(3000))
        + "]\n",
        "check.unfinished",
    ),
    "one tool often": (
        BASE + "machine: tools\ntools: " + many(20_000, "{use: 'textwrap:dedent'}") + "\n",
        "check.more",
    ),
    "state names": (
        BASE
        + "machine:\n  preset: single_turn\n  transitions:\n"
        + "".join(
            f"    - {{trigger: answered, source: GENERATING, dest: {'y' * 3000}{index}}}\n" for index in range(1000)
        ),
        "check.more",
    ),
    "infinite rows": (
        HEAD + "tasks: {source: inline, rows: [{q: .nan, r: .inf, id: 1e400}], id: id}\n" + PROMPT + SINGLE,
        "tasks.unreadable",
    ),
}
"""What is read, and the rule that says where not everything was looked at; None where everything was."""
