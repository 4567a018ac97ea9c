"""A syntax error is reported at the line of its cause: a shipped spec is damaged in one place, and the finding is at this place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from slow_cases import slow_after

from engine.spec.text.tree import Place, parse

SPECS = Path(__file__).parents[3] / "specs"


def damaged(line: str) -> Iterator[tuple[str, str]]:
    """(kind of damage, the damaged line)."""
    quotes = list(re.finditer('"', line))
    if len(quotes) > 1:
        yield "quote", line[: quotes[-1].start()] + line[quotes[-1].end() :]
    if re.match(r"\s+[^\s#]", line):
        yield "indentation", f" {line}"
        yield "indentation", line[1:]
    if line.rstrip().endswith(("}", "]")):
        yield "bracket", line.rstrip()[:-1]
    if re.match(r"^\s*[\w-]+: ", line):
        yield "space", line.replace(": ", ":", 1)
        yield "colon", line.replace(": ", " ", 1)
    if ", " in line and "{" in line:
        yield "comma", line[::-1].replace(" ,", " ", 1)[::-1]


@pytest.mark.parametrize("name", slow_after(1, ["quickstart.yaml", "train_credit.yaml", "countdown.yaml"]))
def test_a_damaged_line_is_named(name: str) -> None:
    lines = (SPECS / name).read_text().splitlines()
    broken, elsewhere = 0, []
    for at, line in enumerate(lines):
        for kind, changed in damaged(line) if not line.lstrip().startswith("#") else ():
            _, problems = parse("\n".join([*lines[:at], changed, *lines[at + 1 :]]), Place("x"))
            found = [item for item in problems if item.rule == "yaml.syntax"]
            broken += bool(found)
            if found and (found[0].origin is None or found[0].origin.line != at + 1):
                elsewhere.append((kind, at + 1, changed.strip(), str(found[0])))
    assert broken > 90
    assert len(elsewhere) <= 1, elsewhere  # of hundreds


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        (
            'a: "one\nb: two\nc: "three"\n',
            'x:1:4: error[yaml.syntax] a quote is opened here and not closed (the parser stops in line 3); close it with " in the same line',
        ),
        (
            "rewards:\n  credit: {method: gigpo}\n   reassign:\n    - {at: DONE}\n",
            "x:3:4: error[yaml.syntax] the indentation of `reassign:` is wrong: 3 spaces; indent it by 2, as `credit:` in line 2",
        ),
        (
            "rewards:\n  reassign:\n - {at: DONE}\n",
            "x:3:2: error[yaml.syntax] the indentation of `-` is wrong: 1 space; indent it by 2, as `reassign:` in line 2",
        ),
        (
            "a: {b: 1\nc: 2\n",
            "x:1:4: error[yaml.syntax] `{` is opened here and not closed (the parser stops in line 2); close it with `}`",
        ),
        (
            "a: [1, 2\n\nc: 2\n",
            "x:1:4: error[yaml.syntax] `[` is opened here and not closed (the parser stops in line 3); close it with `]`",
        ),
        (
            "name:demo\nb: 2\n",
            "x:1:5: error[yaml.syntax] there is no space after `name:` (the parser stops in line 2); write `name: …`",
        ),
        (
            "machine single_turn\nb: 2\n",
            "x:1:8: error[yaml.syntax] there is no colon after `machine` (the parser stops in line 2); write `machine:`",
        ),
        (
            "a: {b: 1 c: 2}\nd: 1\n",
            "x:1:9: error[yaml.syntax] a comma is missing here; separate the entries of {…} and […] by commas",
        ),
        ("a: @here\nb: 1\n", 'x:1:4: error[yaml.syntax] the value begins with `@`, so it needs quotes; write "@here"'),
    ],
)
def test_the_cause_is_named(text: str, finding: str) -> None:
    _, problems = parse(text, Place("x"))
    assert [str(item) for item in problems] == [finding]


def test_a_template_without_quotes_is_a_mapping_to_yaml() -> None:
    _, problems = parse("prompt: {{question}}\n", Place("x"))
    assert [str(item) for item in problems] == [
        'x:1:10: error[yaml.key] a mapping cannot be a key; quote the text: "{{question}}"'
    ]


def test_a_large_text_is_not_searched() -> None:
    _, problems = parse("a: [\n" * 30_000, Place("x"))
    assert [item.rule for item in problems] == ["yaml.depth"] or problems[0].message.startswith("while parsing")
