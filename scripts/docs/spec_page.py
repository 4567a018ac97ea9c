"""docs/spec.md: every key of a spec with its type, default and meaning, from the data classes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from engine.actions.facts import ACTIONS
from engine.limits import LIMITS
from engine.machine.machine import resolve_machine
from engine.machine.presets import PRESETS
from engine.machine.variables import VARIABLES
from engine.schemas.base import Bytes, Seconds, description_of, parse_seconds
from engine.schemas.entry import IsolationSpec
from engine.schemas.episode import EpisodeSpec
from engine.schemas.limits import ALWAYS, LIMIT
from engine.schemas.machine import MachineSpec
from engine.schemas.sections import annotation_of, section_fields
from engine.spec.text.places import bare, branches, fields_by_key, is_model, literals
from engine.spec.text.problems import describe

HEAD = """\
# The spec

<!-- Written by `python scripts/docs` from the data classes in schemas/. Edit those, then run it again. -->

An episode is declared in one YAML file. This page lists every key; `engine validate` checks a file against it and
against [its rules](rules.md),
and editors do so with a first line of `# yaml-language-server: $schema=…/schemas/json/episode.schema.json`.
First come the machines that have names, what their states do, and what conditions may read; [the keys](#the-keys-of-a-spec) follow.
"""

READING = """\
## How a file is read

- **YAML 1.2.** Only `true` and `false` are booleans: `yes`, `no`, `on` and `off` are strings, `1e-5` is a number,
  `010` is ten. A number is not taken for a string, nor `"5"` for a number. Duplicate keys, merge keys (`<<`) and
  tags beyond the core are errors.
- **`extends: base.yaml`**, or a list of files, loads other specs as a base. Mappings are merged key by key,
  other values are replaced, and `null` removes a value. Later files override earlier ones, and this file overrides all.
  A backend or loss of another `kind` and a credit of another `method` replace the base's completely; tasks of another `source`
  keep `map`, `id` and `limit`, and `backend.launch` replaces the base's `backend.urls`. A name without a suffix is that of [published settings](published.md).
- **`${NAME}`** and **`${NAME:default}`** inside a value are environment variables; `$${` is a literal `${`. If
  the variable is the whole value, it is read as YAML, so numbers work. Inside `{…}` or `[…]` quote it: `"${NAME}"`.
- **`--set a.b=value`** on the command line overrides a value, which is read as YAML; `tools.0.timeout=5s` sets
  a value in a list.
- **Files** are relative to the file that names them: in a base file to the base file, in `--set` to the
  current folder.
- **Entry points** are `package.module:Name`. Modules are searched in the spec's folder, the current folder and
  the installed packages.
- **Durations** are seconds, or `500ms`, `5s`, `2m`, `1h`.
- In the tables below, – is a key that may be left out and has no value then.

"""

GUARDS = """\
## Guards

`conditions` and `unless` of transitions and `when` of reward rules are expressions in CEL (the Common Expression Language) that
are true or false: `turns.user < limits.user_turns && !last.malformed`. They have booleans, integers of 64 bits, doubles,
strings, lists and maps with strings as keys; the operators of CEL; `has(a.b)`, `type(x)`, `size`, `contains`, `startsWith`,
`endsWith`, `matches` (RE2), `int`, `double`, `string`; and the macros `all`, `exists`, `exists_one`, `filter` and `map`.
They may read:

"""


def spec_page() -> str:
    """Return the page."""
    parts = [HEAD, _presets(), _actions(), _guards(), _limits(), READING, *_sections()]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _sections() -> Iterator[str]:
    """One section for each place of a spec, in the order of its keys; a class that stands in several places has one."""
    places = _places()
    groups: dict[str, list[type[BaseModel]]] = {}
    for model in places:
        groups.setdefault(_title(model, places), []).append(model)
    links = {model: _anchor(title) for title, models in groups.items() for model in models}
    for title, models in groups.items():
        yield f"## {title}\n\n" + (
            _section(models[0], places, links) if len(models) == 1 else _kinds(models, places, links)
        )


def _places() -> dict[type[BaseModel], list[str]]:
    """The places of each data class, the first one first: its keys are followed from there alone."""
    places: dict[type[BaseModel], list[str]] = {}
    waiting: list[tuple[str, type[BaseModel]]] = [("", EpisodeSpec)]
    while waiting:
        place, model = waiting.pop(0)
        first = model not in places
        places.setdefault(model, []).append(place)
        if first:
            waiting[:0] = [
                (_place(place, key, annotation_of(info)), member)
                for key, info in fields_by_key(model).items()
                for member in _models(annotation_of(info))
            ]
    return places


def _place(place: str, key: str, annotation: Any) -> str:
    shown = describe(annotation)
    mark = "[]" if shown.startswith("a list") else ".*" if str(bare(annotation)).startswith("dict[") else ""
    return f"{place}.{key}{mark}".lstrip(".")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The data classes of a field."""
    for member in branches(bare(annotation)):
        inner = bare(member)
        if is_model(inner):
            yield inner
        else:
            for arg in getattr(inner, "__args__", ()):
                if arg is not inner and is_model(bare(arg)):
                    yield bare(arg)


def _title(model: type[BaseModel], places: dict[type[BaseModel], list[str]]) -> str:
    """The heading of a class's section: its first place. Classes that a key tells apart, such as kinds of backends, share one."""
    place = places[model][0]
    if not place:
        return "The keys of a spec"
    rivals = [other for other, its_places in places.items() if its_places[0] == place]
    if len(rivals) == 1 or all(_decider(rival) for rival in rivals):
        return f"`{place}`"
    return f"`{place}` (`{_tag(model)}`)"


def _decider(model: type[BaseModel]) -> str:
    """The key whose value tells a class from others in its place."""
    fields = fields_by_key(model)
    return next(
        (key for key in ("kind", "method", "by", "name") if key in fields and literals(fields[key].annotation)), ""
    )


def _tag(model: type[BaseModel]) -> str:
    """What tells a class from others in its place: `sglang`, or its first key."""
    fields = fields_by_key(model)
    decider = _decider(model)
    return literals(fields[decider].annotation)[0] if decider else next(iter(fields))


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _section(
    model: type[BaseModel], places: dict[type[BaseModel], list[str]], links: dict[type[BaseModel], str]
) -> str:
    cells = {key: _cells(model, key, info, links) for key, info in fields_by_key(model).items()}
    lines = [f"{_about(model)} {_same_keys(model, places)}".rstrip()]
    shared: list[str] = []
    for other in links:
        if other is model:
            break
        fields = fields_by_key(other)
        same = [key for key in cells if key in fields and _cells(other, key, fields[key], links) == cells[key]]
        if len(same) > max(3, len(shared)):
            shared = same
            origin = other
    if shared:
        names = ", ".join(f"`{key}`" for key in shared)
        lines += ["", f"As in [{_title(origin, places)}](#{links[origin]}): {names}."]
    rows = [_row(row) for key, row in cells.items() if key not in shared]
    head = ["", "| key | type | default | |", "|---|---|---|---|"]
    return "\n".join([*lines, *(head if rows else []), *rows]) + "\n"


def _kinds(
    models: list[type[BaseModel]], places: dict[type[BaseModel], list[str]], links: dict[type[BaseModel], str]
) -> str:
    """Classes of one place: a table of the classes, and one of their keys, in which a key that several have stands once."""
    abouts, same_keys = [_about(model) for model in models], [_same_keys(model, places) for model in models]
    lines = []
    if len(set(same_keys)) == 1:
        lines = [same_keys[0], ""] if same_keys[0] else []
    else:
        abouts = [f"{about} {same}".rstrip() for about, same in zip(abouts, same_keys, strict=True)]
    lines += [f"| `{_decider(models[0])}` | |", "|---|---|"]
    lines += [_row([f"`{_tag(model)}`", about]) for model, about in zip(models, abouts, strict=True)]
    owners: dict[tuple[str, ...], list[str]] = {}
    for model in models:
        for key, info in fields_by_key(model).items():
            if key != _decider(model):
                owners.setdefault(tuple(_cells(model, key, info, links)), []).append(f"`{_tag(model)}`")
    if owners:
        lines += ["", "| key | of | type | default | |", "|---|---|---|---|---|"]
    for (key, *rest), tags in owners.items():
        lines.append(_row([key, "all" if len(tags) == len(models) else ", ".join(tags), *rest]))
    return "\n".join(lines) + "\n"


def _about(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def _same_keys(model: type[BaseModel], places: dict[type[BaseModel], list[str]]) -> str:
    """The other places of a class."""
    also = sorted({f"`{place}`" for place in places[model][1:]} - {f"`{places[model][0]}`"})
    return f"The same keys: {', '.join(also)}." if also else ""


_SHORT = {
    r"(?:^|(?<=or )|(?<=\[))an? ": "",
    "whole number": "integer",
    "true or false": "boolean",
    "at least": "≥",
    "more than": ">",
    "less than": "<",
    "at most": "≤",
}
"""Words of messages about types, and what a cell of the table has."""


def _cells(model: type[BaseModel], key: str, info: FieldInfo, links: dict[type[BaseModel], str]) -> list[str]:
    owner = {key: section for key, _, section in section_fields(model)}.get(key, model)
    inner = list(dict.fromkeys(_models(annotation_of(info))))
    kind = _type(info)
    if inner and len({links[member] for member in inner}) == 1:
        kind = re.sub("(a list of mappings|a mapping)", rf"[\1](#{links[inner[0]]})", kind, count=1)
    elif inner:
        kind += ": " + ", ".join(f"[`{_tag(member)}`](#{links[member]})" for member in inner)
    for long, short in _SHORT.items():
        kind = re.sub(long, short, kind)
    return [f"`{key}`", kind, _default(info), " ".join((description_of(owner, key) or _doc(info)).split())]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _doc(info: FieldInfo) -> str:
    models = list(_models(annotation_of(info)))
    return " ".join((models[0].__doc__ or "").split()) if len(models) == 1 else ""


def _type(info: FieldInfo) -> str:
    parts: list[str] = []
    for member in branches(annotation_of(info)):
        words = literals(member)
        parts.append(", ".join(f"`{word}`" for word in words) if words else describe(member))
    converted = any(getattr(item, "func", None) is parse_seconds for item in info.metadata)
    if converted or Seconds in branches(annotation_of(info)):
        parts = ["a duration"]
    if Bytes in branches(annotation_of(info)):
        parts = ["a size"]
    if bare(annotation_of(info)) is MachineSpec:
        parts = ["a mapping", "the name of a preset"]
    if IsolationSpec in map(bare, branches(annotation_of(info))):
        parts = ["a mapping", "`thread`, `process`"]
    text = " or ".join(dict.fromkeys(part for part in parts if part))
    bounds = [_bound(item) for item in info.metadata]
    return ", ".join([text, *(bound for bound in bounds if bound)])


def _bound(item: Any) -> str:
    names = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
    for name, words in names.items():
        if (value := getattr(item, name, None)) is not None:
            return f"{words} {value:g}"
    if getattr(item, "min_length", None):
        return "not empty"
    return ""


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "**needed**"
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is None or value is PydanticUndefined:
        return "–"
    if isinstance(value, BaseModel):
        given = value.model_dump(exclude_defaults=True, by_alias=True) or value.model_dump(include={"kind", "method"})
        return f"`{json.dumps(given)}`" if given else "`{}`"
    return f"`{json.dumps(value, ensure_ascii=False)}`"


TRANSITIONS = """
## Transitions

The words of a machine are those of the library [transitions](https://github.com/pytransitions/transitions):

| in the library | here |
|---|---|
| `trigger`, `source`, `dest`, `"*"` | the same; `trigger` may be a list too |
| `conditions`, `unless` | the same, one or a list, in CEL in place of methods: they are checked before a run, and have the same result in a replay. Code gives what it knows as a fact, which they read |
| `dest: "="` (reflexive) | the same: the state's action is performed again |
| `dest: null` (internal) | no: events come from a state's action alone, so an episode that stays without performing it would wait for ever. Write `=` |
| `on_enter`, `on_exit`, `before`, `after` | no: `action` is what happens when a state is entered, and `rewards.reassign` with `at` what follows it. Both are in the journal; a callback would be repeated when an episode is resumed |
| nested states | no: the journal, metrics, checks and pictures name one state at a time. What several states share is written once, with a list or `"*"` as `source` |

    transitions:
      - {trigger: answered, source: GENERATING, dest: AWAITING_USER_FEEDBACK, conditions: ["turns.user < 3"], unless: [last.malformed, facts.done]}
      - {trigger: [answered, malformed], source: GENERATING, dest: "="}
"""


def _actions() -> str:
    lines = [
        "## Actions",
        "",
        "The actions of states, and the events with which they may end.",
        "",
        "| action | what it does | events |",
        "|---|---|---|",
    ]
    lines += [f"| `{name}` | {facts.does} | {_events(facts.events)} |" for name, facts in ACTIONS.items()]
    own = 'what the function\'s `events` lists (`@action("done")`)'
    lines.append(f"| `package.module:action` | Call a function of your own. | {own} |")
    always = " and ".join(f"`{event}`" for event in ALWAYS)
    lines += [
        "",
        f"In every state that is not final, {always} may also occur: a limit was reached, or the action failed.",
    ]
    return "\n".join(lines) + "\n" + TRANSITIONS


def _events(events: tuple[str, ...] | None) -> str:
    if events is None:
        return "what the environment's `events` lists"
    return ", ".join(f"`{event}`" for event in events) or "none"


def _presets() -> str:
    """Return the presets, with what happens after a reply that was cut off."""
    lines = [
        "## Presets",
        "",
        "The machines that `machine: NAME` names. `engine graph` draws the machine of a spec.",
        "",
    ]
    lines += ["| preset | the episode | a reply that was cut off (`truncated`) |", "|---|---|---|"]
    for name, preset in PRESETS.items():
        machine = resolve_machine(MachineSpec(preset=name))
        dest = machine.leaving("GENERATING", "truncated")[0].dest
        ends = "ends the episode" if dest in machine.final else f"goes to `{dest}`, like every reply without a call"
        lines.append(f"| `{name}` | {preset.about} | {ends} |")
    lines += [
        "",
        "A cut-off reply that ends the episode is judged only by the `score` of the environment and by `rewards.scorer`. If a wrong answer",
        "costs something and a cut-off one does not, the model learns to write without end (`engine explain rewards.truncated-pays`).",
        "A transition sends it to the judge instead; it is tried before the preset's own:",
        "",
        "    machine:",
        "      preset: tools_and_user",
        "      transitions: [{trigger: truncated, source: GENERATING, dest: AWAITING_USER_FEEDBACK}]",
    ]
    return "\n".join(lines) + "\n"


def _limits() -> str:
    lines = [
        "## When a limit is checked",
        "",
        f"A limit is checked before its action begins, in this order. If it is reached, the state ends with `{LIMIT}`.",
        "A limit that cuts something does not stop the action. The action of a final state has no limits.",
        "",
        "| limit | unit | stops | what is counted | in guards | budget |",
        "|---|---|---|---|---|---|",
    ]
    for limit in LIMITS:
        stops = f"cuts {limit.cuts}" if limit.cuts else f"`{limit.action}`" if limit.action else "every action"
        variable, budget = (f"`{name}`" if name else "" for name in (limit.variable, limit.budget))
        lines.append(f"| `{limit.key}` | {limit.unit} | {stops} | {limit.counted} | {variable} | {budget} |")
    return "\n".join(lines) + "\n"


def _guards() -> str:
    lines = ["| name | type | |", "|---|---|---|"]
    for name, variable in VARIABLES.items():
        lines.append(f"| **`{name}`** | | {variable.doc} |")
        lines += [
            f"| `{name}.{field}` | {' or '.join(sorted(member.types))} | {' '.join(member.doc.split())} |"
            for field, member in variable.fields.items()
        ]
    return GUARDS + "\n".join(lines) + "\n"
