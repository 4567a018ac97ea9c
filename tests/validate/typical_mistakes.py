"""Typical mistakes in a spec and its code: each is one edit of a project that has none, and the rule that finds it.

The test reads this list, and so does the table in docs/testing.md: `python tests/validate/typical_mistakes.py` writes it anew.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from typical_project import FILES, PYTHON_ROWS, RENDERED


class Mistake(NamedTuple):
    """One edit, and the finding."""

    kind: str
    old: str
    """What is replaced, in `file`."""
    new: str
    rule: str
    says: str
    """A part of the message."""
    at: str
    """A part of the line of the spec, or of the rows, at which the finding is."""
    file: str = "task.yaml"
    imports: bool = False
    """Whether it is found only with `--import`."""
    before: tuple[tuple[str, str], ...] = ()
    """Edits of the spec that are no mistakes, made first."""


CLERK = "  use: kiosk:Clerk"
KIOSK = "  use: kiosk:Kiosk"
KEY, TYPE, MISSING, METHOD, RESULT, REWARD, FACT, ROW, RAISES, YAML, ENTRY, TOOL = (
    "key of `with`",
    "type of a value of `with`",
    "missing argument",
    "missing method",
    "annotation of a result",
    "name of a reward",
    "name of a fact",
    "field of a row",
    "constructor that raises",
    "YAML syntax",
    "entry point",
    "schema of a tool",
)

MISTAKES: list[Mistake] = [
    Mistake(KEY, "patience: 2", "patiance: 2", "code.protocol", "takes no argument `patiance`", "patiance"),
    Mistake(KEY, "{tries: 3,", "{attempts: 3,", "code.protocol", "takes no argument `attempts`", "attempts"),
    Mistake(KEY, "fee: 0.1", "fees: 0.1", "code.protocol", "takes no argument `fees`", "fees"),
    Mistake(KEY, "with: {most: 100}", "with: {max: 100}", "code.protocol", "takes no argument `max`", "max: 100"),
    Mistake(
        KEY,
        '"kiosk:convert"}',
        '"kiosk:convert", with: {to: km}}',
        "code.protocol",
        "is a function: it takes its arguments from the model",
        "convert",
    ),
    Mistake(
        KEY,
        'use: "kiosk:rows"',
        'use: "kiosk:rows"\n  with: {number: 3}',
        "code.protocol",
        "takes no argument `number`",
        "number: 3",
        before=(PYTHON_ROWS,),
    ),
    Mistake(
        TYPE, "patience: 2", 'patience: "2"', "code.with-type", 'takes `patience: int`; it is the text "2"', "patience"
    ),
    Mistake(
        TYPE, "polite: true", "polite: yes", "code.with-type", 'takes `polite: bool`; it is the text "yes"', "polite"
    ),
    Mistake(
        TYPE,
        "books: [atlas]",
        "books: atlas",
        "code.with-type",
        'takes `books: list[str]`; it is the text "atlas"',
        "books",
    ),
    Mistake(
        TYPE, "books: [atlas]", "books: [1984]", "code.with-type", "takes `books: list[str]`; it is a list", "books"
    ),
    Mistake(TYPE, "tone: plain", "tone: cold", "code.with-type", 'it is the text "cold"', "tone"),
    Mistake(TYPE, "tries: 3", "tries: 2.5", "code.with-type", "takes `tries: int`; it is 2.5", "tries"),
    Mistake(TYPE, "patience: 2", "patience: null", "code.with-type", "takes `patience: int`; it is null", "patience"),
    Mistake(MISSING, "patience: 2, ", "", "code.protocol", "needs the argument `patience`", CLERK),
    Mistake(
        MISSING, "  with: {patience: 2, polite: true}\n", "", "code.protocol", "needs the argument `patience`", CLERK
    ),
    Mistake(MISSING, "books: [atlas], ", "", "code.protocol", "needs the argument `books`", "kiosk:Shelf"),
    Mistake(
        MISSING,
        "tries: int = 3, tone",
        "rooms: int, tries: int = 3, tone",
        "code.protocol",
        "needs the argument `rooms`",
        KIOSK,
        "kiosk.py",
    ),
    Mistake(
        MISSING,
        "most: int = 100",
        "most: int, least: int",
        "code.protocol",
        "needs the argument `least`",
        "kiosk:brevity",
        "kiosk.py",
    ),
    Mistake(
        MISSING,
        "def rows(count: int = 2)",
        "def rows(count: int)",
        "code.protocol",
        "needs the argument `count`",
        "kiosk:rows",
        "kiosk.py",
        before=(PYTHON_ROWS,),
    ),
    Mistake(METHOD, "def respond(", "def answer(", "code.protocol", "has no method `respond`", CLERK, "kiosk.py"),
    Mistake(METHOD, "def reset(", "def start(", "code.protocol", "has no method `reset`", KIOSK, "kiosk.py"),
    Mistake(
        METHOD,
        "def reset(self, task: Task, seed: int)",
        "def reset(self, task: Task)",
        "code.protocol",
        "`kiosk:Kiosk.reset` cannot be called",
        KIOSK,
        "kiosk.py",
    ),
    Mistake(
        METHOD,
        "def respond(self, view: EpisodeView)",
        "def respond(self)",
        "code.protocol",
        "`kiosk:Clerk.respond` cannot be called",
        CLERK,
        "kiosk.py",
    ),
    Mistake(
        METHOD,
        "def __call__(",
        "def call(",
        "code.protocol",
        "cannot be called, so it is not a tool",
        "kiosk:Shelf",
        "kiosk.py",
    ),
    Mistake(
        METHOD,
        KIOSK,
        "  use: kiosk:open_kiosk",
        "code.construct",
        "builds a `dict`, which has no method `reset`",
        "kiosk:open_kiosk",
        imports=True,
        before=(("tries: 3, tone: plain", "tries: 3"),),
    ),
    Mistake(
        RESULT,
        "-> UserTurn",
        "-> str",
        "code.returns",
        "annotated `-> str` (kiosk.py:27), and must return a `UserTurn`",
        CLERK,
        "kiosk.py",
    ),
    Mistake(RESULT, "-> Reset", "-> list[Message]", "code.returns", "must return a `Reset`", KIOSK, "kiosk.py"),
    Mistake(
        RESULT,
        "EpisodeView) -> list[RewardEvent]:\n        return",
        "EpisodeView) -> float:\n        return",
        "code.returns",
        "must return a `list[RewardEvent]`",
        KIOSK,
        "kiosk.py",
    ),
    Mistake(
        RESULT,
        "most: int = 100) -> list[RewardEvent]",
        "most: int = 100) -> float",
        "code.returns",
        "must return a `list[RewardEvent]`",
        "kiosk:brevity",
        "kiosk.py",
    ),
    Mistake(
        RESULT,
        "most: int = 100) -> list[RewardEvent]",
        "most: int = 100) -> list[float]",
        "code.returns",
        "annotated `-> list[float]`",
        "kiosk:brevity",
        "kiosk.py",
    ),
    Mistake(RESULT, "-> ToolReply", "-> set[str]", "code.returns", "what JSON can hold", "kiosk:Shelf", "kiosk.py"),
    Mistake(
        RESULT,
        "def rows(count: int = 2):",
        "def rows(count: int = 2) -> str:",
        "code.returns",
        "must return the rows",
        "kiosk:rows",
        "kiosk.py",
        before=(PYTHON_ROWS,),
    ),
    Mistake(REWARD, "name: right", "name: rigth", "rewards.unknown-name", "nothing writes a reward `rigth`", "rigth"),
    Mistake(
        REWARD,
        "name: right",
        "name: kindness",
        "rewards.unknown-name",
        "nothing writes a reward `kindness`",
        "kindness",
    ),
    Mistake(
        REWARD,
        'name="right"',
        'name="correct"',
        "rewards.unknown-name",
        "nothing writes a reward `right`",
        "name: right",
        "kiosk.py",
    ),
    Mistake(
        REWARD,
        "{method: gigpo, state_key: place}",
        "{method: mt_grpo, outcome: [breif]}",
        "rewards.unknown-name",
        "nothing writes a reward `breif`",
        "breif",
    ),
    Mistake(
        REWARD,
        "{method: gigpo, state_key: place}",
        "{method: progress, reward: steps}",
        "rewards.unknown-name",
        "nothing writes a reward `steps`",
        "steps",
    ),
    Mistake(
        FACT,
        "facts.wrong > 2",
        "facts.wrongs > 2",
        "guard.unknown-fact",
        "nothing writes the fact `facts.wrongs`",
        "wrongs",
    ),
    Mistake(
        FACT,
        "facts.wrong > 2",
        "feedback.mistakes > 2",
        "guard.unknown-fact",
        "nothing writes the fact `feedback.mistakes`",
        "mistakes",
    ),
    Mistake(
        FACT,
        "state_key: place",
        "state_key: plaice",
        "guard.unknown-fact",
        "nothing writes the fact `plaice`",
        "plaice",
    ),
    Mistake(
        FACT,
        'facts={"wrong": ',
        'facts={"errors": ',
        "guard.unknown-fact",
        "nothing writes the fact `facts.wrong`",
        "facts.wrong",
        "kiosk.py",
    ),
    Mistake(
        FACT,
        "when: turns.assistant > 1",
        "when: \"'level' in facts && facts['level'] > 1\"",
        "guard.unknown-fact",
        "nothing writes the fact `facts.level`",
        "level",
    ),
    Mistake(ROW, '"{{question}}"', '"{{qestion}}"', "prompt.unknown-field", "tasks have no field `qestion`", "qestion"),
    Mistake(
        ROW, "question: question,", "question: text,", "tasks.unreadable", "row 1 has no field `text`", '"number": 1'
    ),
    Mistake(ROW, "id: number", "id: nr", "tasks.unreadable", "row 1 has no field `nr`", '"number": 1'),
    Mistake(
        ROW,
        '"question": "And back?"',
        '"query": "And back?"',
        "tasks.row",
        "row 2 has no field `question`",
        '"number": 2',
        "rows.jsonl",
    ),
    Mistake(
        ROW, "facts.wrong > 2", "task.level > 2", "guard.unknown-field", "tasks have no field `level`", "task.level"
    ),
    Mistake(
        ROW,
        '"{{problem}}',
        '"{{task.qestion}}',
        "prompt.unknown-field",
        "tasks have no field `qestion`",
        "qestion",
        before=(('"Write the call again: {{problem}}', '"{{problem}}'),),
    ),
    Mistake(
        ROW,
        '"question": "How far?"',
        '"query": "How far?"',
        "prompt.unknown-field",
        "row 1 has no field `question`",
        "{{question}}",
        "kiosk.py",
        imports=True,
        before=(PYTHON_ROWS, RENDERED),
    ),
    Mistake(
        ROW,
        '"question": "How far?"',
        '"query": "How far?"',
        "tasks.unreadable",
        "row 1 has no field `question`",
        "question: question",
        "kiosk.py",
        imports=True,
        before=(PYTHON_ROWS,),
    ),
    Mistake(RAISES, "tries: 3", "tries: 12", "code.construct", "12 tries; at most 9", "tries", imports=True),
    Mistake(
        RAISES,
        "self.wrong = 0",
        'self.wrong = open("names.txt").read()',
        "code.construct",
        "FileNotFoundError",
        "patience",
        "kiosk.py",
        imports=True,
    ),
    Mistake(
        RAISES,
        "self.books = set(books)",
        "self.books = books.keys()",
        "code.construct",
        "AttributeError",
        "kiosk:Shelf",
        "kiosk.py",
        imports=True,
    ),
    Mistake(
        RAISES,
        "self.wrong = 0",
        "self.wrong = 1 // (patience - 2)",
        "code.construct",
        "ZeroDivisionError",
        "patience",
        "kiosk.py",
        imports=True,
    ),
    Mistake(
        RAISES,
        "self.wrong = 0",
        'import os; self.wrong = os.environ["KIOSK_KEY"]',
        "code.construct",
        "KeyError",
        "patience",
        "kiosk.py",
        imports=True,
    ),
    Mistake(
        RAISES,
        "self.wrong = 0",
        "raise SystemExit(1)",
        "code.construct",
        "SystemExit",
        "patience",
        "kiosk.py",
        imports=True,
    ),
    Mistake(YAML, "  reassign:", "   reassign:", "yaml.syntax", "the indentation of `reassign:` is wrong", "reassign:"),
    Mistake(
        YAML,
        "    - {at: AWAITING",
        " - {at: AWAITING",
        "yaml.syntax",
        "the indentation of `-` is wrong",
        "- {at: AWAITING",
    ),
    Mistake(
        YAML,
        'content: "You sell books."',
        'content: "You sell books.',
        "yaml.syntax",
        "a quote is opened here and not closed",
        "You sell books",
    ),
    Mistake(
        YAML,
        "with: {tries: 3, tone: plain}",
        "with: {tries: 3, tone: plain",
        "yaml.syntax",
        "`{` is opened here and not closed",
        "tone: plain",
    ),
    Mistake(
        YAML,
        "preset: tools_and_user",
        "preset:tools_and_user",
        "yaml.syntax",
        "there is no space after `preset:`",
        "preset:tools",
    ),
    Mistake(YAML, "user_turns: 3, tool", "user_turns: 3 tool", "yaml.syntax", "a comma is missing here", "user_turns"),
    Mistake(
        YAML,
        '"Write the call again: {{problem}}"',
        "Write the call again: {{problem}}",
        "yaml.syntax",
        "the value contains `: `, so it needs quotes",
        "Write the call",
    ),
    Mistake(
        YAML,
        'content: "{{question}}"',
        "content: {{question}}",
        "yaml.key",
        "a mapping cannot be a key",
        "{{question}}",
    ),
    Mistake(ENTRY, "kiosk:Clerk", "kiosk:Clrek", "code.import", "`kiosk` has no `Clrek`", "Clrek"),
    Mistake(ENTRY, "kiosk:Clerk", "kiosks:Clerk", "code.import", "there is no module `kiosks`", "kiosks"),
    Mistake(ENTRY, "kiosk:Clerk", "kiosk.Clerk", "code.import", "`kiosk.Clerk` is no entry point", "kiosk.Clerk"),
    Mistake(ENTRY, "kiosk:Clerk", "kiosk.py:Clerk", "code.import", "`kiosk` is a module, not a package", "kiosk.py"),
    Mistake(ENTRY, "kiosk:Clerk", "shop.kiosk:Clerk", "code.import", "there is no module `shop`", "shop.kiosk"),
    Mistake(ENTRY, "class Clerk:", "class Clerk", "code.import", "SyntaxError", KIOSK, "kiosk.py"),
    Mistake(
        TOOL,
        "def convert(amount: float,",
        "def convert(amount,",
        "code.protocol",
        "give parameter `amount` a type",
        "kiosk:convert",
        "kiosk.py",
    ),
    Mistake(
        TOOL,
        "def convert(amount: float,",
        "def convert(*amounts: float,",
        "code.protocol",
        "parameter `amounts` must be one that can be given by name",
        "kiosk:convert",
        "kiosk.py",
    ),
    Mistake(
        TOOL,
        "        amount: How far.",
        "        distance: How far.",
        "tools.docs",
        "describes `distance`, which is no parameter",
        "kiosk:convert",
        "kiosk.py",
    ),
    Mistake(TOOL, "name: look_up", "name: look up", "tools.name", "a tool cannot be called `look up`", "look up"),
    Mistake(TOOL, "name: look_up", "name: convert", "tools.name", "two tools are called `convert`", "name: convert"),
    Mistake(
        TOOL,
        "def __call__(self, title: str)",
        "def __call__(self, title)",
        "code.protocol",
        "give parameter `title` a type",
        "kiosk:Shelf",
        "kiosk.py",
    ),
    Mistake(
        TOOL,
        'def convert(amount: float, to: Literal["km", "miles"] = "km") -> str:\n    """Convert a distance.\n\n    Args:\n        amount: How far.\n    """',
        "def convert(amount: float) -> str:",
        "tools.schema",
        "has no docstring",
        "kiosk:convert",
        "kiosk.py",
    ),
]

BEGIN, END = "<!-- typical mistakes: begin -->\n", "<!-- typical mistakes: end -->\n"


def project(mistake: Mistake | None) -> dict[str, str]:
    """The files of the project with a mistake, or without one."""
    files = dict(FILES)
    for old, new in () if mistake is None else mistake.before:
        assert old in files["task.yaml"], old
        files["task.yaml"] = files["task.yaml"].replace(old, new, 1)
    if mistake is not None and mistake.old:
        assert mistake.old in files[mistake.file], mistake.old
        files[mistake.file] = files[mistake.file].replace(mistake.old, mistake.new, 1)
    return files


def _code(text: str) -> str:
    """A piece of YAML or Python as inline code in a table."""
    words = " ".join(line.strip() for line in text.strip().splitlines()).replace("|", "\\|")
    return f"`` {words if len(words) < 80 else words[:77] + '…'} ``" if words else "nothing"


def _edit(mistake: Mistake) -> str:
    old, new = mistake.old, mistake.new
    if old.strip() == new.strip():
        before, after = (len(text) - len(text.lstrip()) for text in (old, new))
        return f"{_code(old)} indented by {after} instead of {before}"
    return f"{_code(old)} → {_code(new)}"


def table() -> str:
    """The table of docs/testing.md: each kind of mistake once, with its first edit and all rules that find its edits."""
    places = {"task.yaml": "spec", "kiosk.py": "code", "rows.jsonl": "rows"}
    lines = ["| mistake | edits | one of them | found by |", "|---|---|---|---|"]
    for kind in dict.fromkeys(item.kind for item in MISTAKES):
        edits = [item for item in MISTAKES if item.kind == kind]
        rules = dict.fromkeys((item.rule, item.imports) for item in edits)
        links = [f"[`{rule}`](rules/{rule}.md){' with `--import`' if imports else ''}" for rule, imports in rules]
        shown = f"in the {places[edits[0].file]}: {_edit(edits[0])}"
        lines.append(f"| {kind} | {len(edits)} | {shown} | {', '.join(links)} |")
    return "\n".join(lines) + "\n"


def written(text: str) -> str:
    """docs/testing.md with the table of today."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    page = Path(__file__).parents[2] / "docs" / "testing.md"
    page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{len(MISTAKES)} mistakes\n")
