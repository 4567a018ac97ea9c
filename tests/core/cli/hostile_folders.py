"""Folders of specs that a stranger could hand in: each names something that validating must not touch, print or wait for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SECRET = "tOpSeCrEt-4711-do-not-print"
"""In a file outside, in a variable, and nowhere else."""
HEAD = "spec: episode/v1\nname: demo\n"
MODEL = "model: {path: no/such-model}\n"
TASKS = "tasks: {source: inline, rows: [{q: a}]}\n"
PROMPT = 'prompt: [{role: user, content: "{{q}}"}]\n'
MACHINE = "machine: single_turn\n"
WHOLE = HEAD + MODEL + TASKS + PROMPT + MACHINE
BESIDE = """\
import os
open(os.environ["CANARY"], "a").write(__name__)
os._exit(0)

class Board:
    def reset(self, task, seed): ...
    def respond(self, view): ...
    def __call__(self, x: int) -> int: ...

def function(*anything): ...
"""
"""A module that shows that it was imported, and then makes the process look successful."""


@dataclass(frozen=True)
class Case:
    """What lies in one folder, and what must come of it."""

    spec: str
    """`{outside}` stands for a folder that may not be read, `{port}` for one that is listened at."""
    rules: tuple[str, ...] = ()
    """Some of the errors that it must have; none at all where this is empty."""
    files: Mapping[str, str] = field(default_factory=dict)
    make: Callable[[Path, Path], None] = lambda folder, outside: None
    """Makes what is no plain file, in the folder."""
    plugin: str | None = None
    """The plugin without which the spec has more errors."""


def link(name: str, target: str) -> Callable[[Path, Path], None]:
    def make(folder: Path, outside: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(outside / target)

    return make


def fifo(name: str) -> Callable[[Path, Path], None]:
    def make(folder: Path, outside: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(folder / name)

    return make


def uses(lines: str, rules: tuple[str, ...] = (), plugin: str | None = None) -> Case:
    """A spec that names the module beside it."""
    return Case(WHOLE + lines, rules, {"beside.py": BESIDE}, plugin=plugin)


def tasks(lines: str, *rules: str, **more: object) -> Case:
    return Case(HEAD + MODEL + f"tasks: {{{lines}}}\n" + PROMPT + MACHINE, rules, **more)  # type: ignore[arg-type]


TOUCH = 'source: python, use: "subprocess:getoutput", with: {cmd: "touch $CANARY; kill $PPID"}'
CODE: dict[str, Case] = {
    "rows of a shell": tasks(TOUCH),
    "rows of a shell for the evaluation": Case(
        WHOLE + "backend: {kind: sglang, urls: ['http://127.0.0.1:{port}']}\nrollout: {samples_per_task: 2}\n"
        f"train: {{eval: {{tasks: {{{TOUCH}}}}}}}\n",
        plugin="weights",
    ),
    "rows beside": tasks("source: python, use: 'beside:function'", files={"beside.py": BESIDE}),
    "environment": uses("environment: {use: 'beside:Board'}\n"),
    "tool": uses("tools: [{use: 'beside:Board'}, {use: 'os:system'}]\n"),
    "user": uses("user: {use: 'beside:Board'}\n"),
    "users and grader": Case(
        WHOLE.replace("tasks: {source: inline, rows: [{q: a}]}", "tasks: {source: inline, user: q, rows: [{q: b}]}")
        + "users:\n  a: {use: 'beside:Board'}\n"
        "  b: {model: {path: m}, backend: {kind: sglang, urls: ['http://127.0.0.1:{port}']},\n"
        "      prompt: [{role: user, content: hi}], grader: {use: 'beside:function'}}\n",
        (),
        {"beside.py": BESIDE},
        plugin="roles",
    ),
    "scorer": uses("rewards: {scorer: {use: 'beside:function'}}\n"),
    "parser of calls": Case(
        (HEAD + "model: {path: org/m, tool_calls: 'beside:Board'}\n" + TASKS + PROMPT + MACHINE),
        (),
        {"beside.py": BESIDE},
    ),
    "action": Case(
        HEAD + MODEL + TASKS + PROMPT + "machine:\n  preset: single_turn\n  states: {X: {action: 'beside:function'}}\n"
        "  transitions:\n    - {trigger: answered, source: GENERATING, dest: X}\n"
        "    - {trigger: done, source: X, dest: DONE}\n",
        ("code.action",),
        {"beside.py": BESIDE},
    ),
    "bonus": uses(
        "backend: {kind: sglang, urls: ['http://127.0.0.1:{port}']}\nrollout: {samples_per_task: 2}\n"
        "train: {advantage_bonuses: [{use: 'beside:function'}]}\n",
        plugin="weights",
    ),
    "package": Case(
        WHOLE + "environment: {use: 'pack.inner:Board'}\n", (), {"pack/__init__.py": BESIDE, "pack/inner.py": BESIDE}
    ),
    "namespace": Case(WHOLE + "environment: {use: 'space.inner:Board'}\n", (), {"space/inner.py": BESIDE}),
    "shadows a module of Python": Case(
        WHOLE + "tools: [{use: 'textwrap:dedent'}]\n", ("code.protocol",), {"textwrap.py": BESIDE, "jinja2.py": BESIDE}
    ),
    "name that is not there": uses("environment: {use: 'beside:Boord'}\n", ("code.import",)),
    "module that is not there": uses("environment: {use: 'besides:Board'}\n", ("code.import",)),
    "module of Python without the name": uses("environment: {use: 'antigravity:Board'}\n", ("code.import",)),
    "no Python": Case(WHOLE + "environment: {use: 'bad:Board'}\n", ("code.import",), {"bad.py": "def (:\n"}),
    "link to a module": Case(WHOLE + "environment: {use: 'linked:Board'}\n", (), {}, link("linked.py", "secret.txt")),
    "FIFO for a module": Case(WHOLE + "environment: {use: 'piped:Board'}\n", ("code.import",), {}, fifo("piped.py")),
    "deep module": Case(
        WHOLE + "environment: {use: 'deep:Board'}\n",
        ("code.import",),
        {"deep.py": "x = " + "(" * 5000 + ")" * 5000 + "\n"},
    ),
    "servers": uses(
        "backend: {kind: sglang, urls: ['http://127.0.0.1:{port}']}\n"
        "user: {model: {path: m}, backend: {kind: sglang, urls: ['http://127.0.0.1:{port}']},\n"
        "       prompt: [{role: user, content: hi}], marks: [{text: x, satisfied: true}]}\n",
        plugin="roles",
    ),
    "hub": tasks("source: hub, path: 'beside.py', split: train", files={"beside.py": BESIDE}),
}
"""Code that must not run, and servers that must not be asked."""

FILES: dict[str, Case] = {
    "extends a path": Case("extends: '{outside}/secret.txt'\n", ("spec.outside",)),
    "extends upwards": Case("extends: ../../../outside/secret.txt\n", ("spec.outside",)),
    "extends a link": Case("extends: base.yaml\n", ("spec.outside",), {}, link("base.yaml", "secret.txt")),
    "extends through a linked folder": Case("extends: sub/secret.txt\n", ("spec.outside",), {}, link("sub", ".")),
    "extends a FIFO": Case("extends: base.yaml\n", ("spec.extends",), {}, fifo("base.yaml")),
    "extends a device": Case("extends: /dev/zero\n", ("spec.outside",)),
    "extends the variables": Case("extends: /proc/self/environ\n", ("spec.outside",)),
    "extends a name that is not there": Case("extends: '{outside}/secre.txt'\n", ("spec.outside",)),
    "rows of a path": tasks("source: jsonl, path: '{outside}/secret.txt'", "tasks.unreadable"),
    "rows upwards": tasks("source: jsonl, path: ../../../outside/secret.txt", "tasks.unreadable"),
    "rows of a link": tasks("source: jsonl, path: r.jsonl", "tasks.unreadable", make=link("r.jsonl", "secret.txt")),
    "rows of a FIFO": tasks("source: jsonl, path: r.jsonl", "tasks.unreadable", make=fifo("r.jsonl")),
    "rows of a device": tasks("source: jsonl, path: /dev/zero", "tasks.unreadable"),
    "rows of the variables": tasks("source: jsonl, path: /proc/self/environ", "tasks.unreadable"),
    "rows for the evaluation": Case(
        WHOLE + "backend: {kind: sglang, urls: ['http://127.0.0.1:{port}']}\nrollout: {samples_per_task: 2}\n"
        "train: {eval: {tasks: {source: jsonl, path: '{outside}/secret.txt'}}}\n",
        ("train.eval-tasks",),
        plugin="evaluation",
    ),
    "Parquet of a path": tasks("source: parquet, path: '{outside}/secret.txt'", "tasks.unreadable"),
    "Parquet of links": tasks(
        "source: parquet, path: rows", "tasks.unreadable", make=link("rows/a.parquet", "secret.txt")
    ),
    "Parquet of a FIFO": tasks("source: parquet, path: rows", "tasks.unreadable", make=fifo("rows/a.parquet")),
    "template of a path": Case(
        WHOLE.replace("no/such-model", "no/such-model, chat_template: '{outside}/secret.txt'"), ("spec.outside",)
    ),
    "replies of a path": Case(
        WHOLE + "backend: {kind: scripted, replies: '{outside}/secret.txt'}\n", ("spec.outside",)
    ),
    "image of a path": Case(
        WHOLE.replace("'{{q}}'", "x").replace('"{{q}}"', "[{type: image, image: '{outside}/secret.txt'}]"),
        ("spec.outside",),
    ),
    "model with a linked template": Case(
        WHOLE.replace("no/such-model", "m"),
        ("model.template",),
        {"m/config.json": "{}", "m/tokenizer_config.json": "{}"},
        link("m/chat_template.jinja", "secret.txt"),
    ),
    "model with a FIFO": Case(
        WHOLE.replace("no/such-model", "m"),
        ("model.template",),
        {"m/config.json": "{}", "m/tokenizer_config.json": "{}"},
        fifo("m/chat_template.jinja"),
    ),
    "model of a path": Case(WHOLE.replace("no/such-model", "'{outside}'")),
    "model of the system": Case(WHOLE.replace("no/such-model", "/proc/self")),
    "template of the model's folder": Case(
        WHOLE.replace("no/such-model", "'{outside}', chat_template: '{outside}/secret.txt'"), ("spec.outside",)
    ),
}
"""Files that must be neither printed nor waited for."""

VARIABLE: dict[str, Case] = {
    "a number": Case(WHOLE + "limits: {user_turns: '${CI_SECRET}'}\n", ("spec.wrong-type",)),
    "within a text": Case(WHOLE + "limits: {user_turns: 'x${CI_SECRET}y'}\n", ("spec.wrong-type",)),
    "an entry point": Case(WHOLE + "environment: {use: '${CI_SECRET}'}\n", ("code.import",)),
    "a module": Case(WHOLE + "environment: {use: 'm_${CI_WORDS}.x:Board'}\n", ("code.import",)),
    "extends": Case("extends: '${CI_SECRET}.yaml'\n", ("spec.extends",)),
    "rows": tasks("source: jsonl, path: '${CI_SECRET}'", "tasks.unreadable"),
    "a folder of rows": tasks("source: jsonl, path: 'a/../${CI_SECRET}/b'", "tasks.unreadable"),
    "a column": tasks("source: inline, rows: [{q: a}], map: {q: '${CI_SECRET}'}", "tasks.unreadable"),
    "an id": tasks("source: inline, rows: [{q: a}], id: '${CI_SECRET}'", "tasks.unreadable"),
    "a guard": Case(
        WHOLE.replace(
            "single_turn",
            "{preset: single_turn, transitions: [{trigger: answered, source: GENERATING, "
            "dest: DONE, conditions: '${CI_SECRET} > 1'}]}",
        ),
        ("guard.unknown-name",),
    ),
    "a preset": Case(WHOLE.replace("single_turn", "'${CI_SECRET}'"), ("spec.bad-value",)),
    "a state": Case(
        WHOLE.replace(
            "single_turn",
            "{preset: single_turn, transitions: [{trigger: answered, source: GENERATING, dest: '${CI_SECRET}'}]}",
        ),
        ("machine.unknown-state",),
    ),
    "a field": Case(WHOLE.replace("{{q}}", "{{${CI_SECRET}}}"), ("prompt.unknown-field",)),
    "a kind": Case(WHOLE + "backend: {kind: '${CI_SECRET}'}\n", ("spec.bad-value",)),
    "a long text": Case(WHOLE + "limits: {user_turns: '${CI_LONG}'}\n", ("spec.wrong-type",)),
    "a duration": Case(WHOLE + "limits: {episode_seconds: '${CI_SECRET}'}\n", ("spec.bad-value",)),
    "an argument": Case(WHOLE + "sampling: {top_p: '${CI_PIN}'}\n", ("spec.bad-value",)),
}
"""Variables whose values must not be printed."""
LONG_SECRET = "".join(f"{SECRET}{index}" for index in range(40))
VARIABLES = {"CI_SECRET": SECRET, "CI_LONG": LONG_SECRET, "CI_PIN": "90417", "CI_WORDS": "sevensecretwords"}
FORGED = "\\x1b[2K\\x1b]52;c;aGk=\\x07\\u202e\\u2028\\x85\\n::error file=forged.py,line=1::forged\\r\\n##[error]forged"
"""What a quoted text of YAML can hold."""
FORGERIES: dict[str, Case] = {
    "key": Case(WHOLE + f'"{FORGED}": 1\n', ("spec.unknown-key",)),
    "key of a limit": Case(WHOLE + f'limits: {{"{FORGED}": 1}}\n', ("spec.unknown-key",)),
    "value": Case(WHOLE + f'limits: {{user_turns: "{FORGED}"}}\n', ("spec.wrong-type",)),
    "entry point": Case(WHOLE + f'environment: {{use: "{FORGED}"}}\n', ("code.import",)),
    "extends": Case(f'extends: "{FORGED}"\n', ("spec.extends",)),
    "rows": tasks(f'source: jsonl, path: "{FORGED}"', "tasks.unreadable"),
    "state": Case(
        WHOLE.replace(
            "single_turn",
            f'{{preset: single_turn, transitions: [{{trigger: answered, source: GENERATING, dest: "{FORGED}"}}]}}',
        ),
        ("machine.unknown-state",),
    ),
    "field": Case(WHOLE.replace("{{q}}", f"{{{{{FORGED}}}}}"), ("prompt.unknown-field",)),
    "stop": Case(WHOLE + f'sampling: {{stop: 1, "[x](http://evil)": "{FORGED}"}}\n', ("spec.unknown-key",)),
    "line of the source": Case(
        WHOLE + "limits: {x: 1} # ##[error]forged \u202e ::error::forged\n", ("spec.unknown-key",)
    ),
    "rows of a file": tasks(
        "source: jsonl, path: r.jsonl", "tasks.unreadable", files={"r.jsonl": "::error::forged \x1b[1m\n"}
    ),
    "template": Case(
        WHOLE.replace("no/such-model", "m"),
        ("model.template",),
        {"m/tokenizer_config.json": "{}", "m/chat_template.jinja": "{% ::error::forged \x1b %}"},
    ),
}
"""Texts that must not reach a terminal or a CI system as commands."""
NAMES = ("::error::forged.yaml", "a\n::error::forged.yaml", "\x1b[2Kforged.yaml", "##[error]forged.yaml", "[a](b).yaml")
"""Names of files, which may stand at the beginning of a line."""
BACKTRACKS = """{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": [],
"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a|a|aa)+b"}, "behavior": "Isolated", "invert": false}}"""
HANGING: dict[str, Case] = {
    "template that loops": Case(
        WHOLE.replace("no/such-model", "m"),
        ("model.template",),
        {
            "m/tokenizer_config.json": "{}",
            "m/chat_template.jinja": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        },
    ),
    "template that grows": Case(
        WHOLE.replace("no/such-model", "m"),
        ("model.template",),
        {"m/tokenizer_config.json": "{}", "m/chat_template.jinja": "{% set x = 'a' * 10**12 %}{{ x }}"},
    ),
    "tokenizer that backtracks": Case(
        WHOLE.replace("no/such-model", "m").replace("rows: [{q: a}]", f"rows: [{{q: {'a' * 4000}}}]")
        + "limits: {episode_tokens: 600, turn_tokens: 10}\n",
        ("limits.prompt-too-long",),
        {
            "m/tokenizer_config.json": "{}",
            "m/chat_template.jinja": "{{ messages[0].content }}",
            "m/tokenizer.json": BACKTRACKS,
        },
    ),
    "template that loops over a row": Case(
        WHOLE.replace("no/such-model", "m").replace("rows: [{q: a}]", f"rows: [{{q: {'a' * 4000}}}]")
        + "limits: {episode_tokens: 600, turn_tokens: 10}\n",
        ("limits.prompt-too-long",),
        {
            "m/tokenizer_config.json": "{}",
            "m/chat_template.jinja": "{{ messages[0].content }}{% if messages[0].content | length > 2000 %}"
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}",
        },
    ),
}
"""Templates that never end, or fill the memory."""


def build(cases: Mapping[str, Case], folder: Path, outside: Path, port: int) -> dict[str, Path]:
    """Write each case into a folder of its own; the spec of each."""
    found = {}
    for index, (name, case) in enumerate(cases.items()):
        own = folder / f"case{index:02}"
        own.mkdir(parents=True)
        for file, text in case.files.items():
            (own / file).parent.mkdir(parents=True, exist_ok=True)
            (own / file).write_text(text, encoding="utf-8")
        case.make(own, outside)
        text = case.spec.replace("{outside}", str(outside)).replace("{port}", str(port))
        found[name] = own / "s.yaml"
        found[name].write_text(text, encoding="utf-8")
    return found
