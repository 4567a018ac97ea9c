"""No character that a terminal obeys or hides is printed as it is."""

from __future__ import annotations

import io
import json
import logging
import re
import unicodedata
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import engine.cli
from engine.console import SafeConsole
from engine.terminal import visible, visible_json

OBEYED = [chr(code) for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"]
BIDI = [chr(code) for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))]
HIDDEN = ["\u200b", "\ufeff", "\u2028", "\u2029", "\U000e0041", "\ud800", "\udfff"]
SHOWN = "é 漢字 🙂 👩\u200d👩\u200d👧 ❤\ufe0f می\u200cخواهم \u0600 line\n\ttab"


@pytest.mark.parametrize("char", [*OBEYED, *BIDI, *HIDDEN], ids=lambda char: f"{ord(char):04x}")
def test_a_character_that_a_terminal_obeys_is_shown_as_an_escape(char: str) -> None:
    shown = visible(f"a{char}b")
    assert shown.isprintable()
    assert shown.encode().decode("unicode_escape") == f"a{char}b"


def test_text_of_any_script_stays_as_it_is() -> None:
    assert visible(SHOWN) == SHOWN


def test_a_line_stays_one_line_where_that_is_asked_for() -> None:
    assert visible("a\n::error::x\r\n", newlines=False) == r"a\n::error::x\x0d\n"


def test_the_escapes_of_a_json_document_are_json_s_own() -> None:
    value = {"said": "".join([*OBEYED, *BIDI, *HIDDEN[:-2]])}
    printed = visible_json(json.dumps(value, ensure_ascii=False))
    assert visible(printed) == printed
    assert json.loads(printed) == value


def printed(renderable: object, *, terminal: bool) -> str:
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=terminal, width=60, markup=False, highlight=False, emoji=False)
    console.print(renderable, style="red")
    colours = re.compile(r"\x1b\[[0-9;]*m")
    return colours.sub("", file.getvalue())


def table(text: str) -> Table:
    made = Table(text, "b", title=text, box=box.SIMPLE_HEAD)
    made.add_row(text, Text(text))
    return made


@seed(0)
@settings(max_examples=examples(150), deadline=None)
@given(text=st.text(st.one_of(st.sampled_from([*OBEYED, *BIDI, *HIDDEN]), st.characters()), max_size=80))
def test_whatever_is_printed_on_the_console_holds_no_such_character(text: str) -> None:
    for renderable in (text, Text(text), Padding(Text(text), (0, 2)), table(text)):
        for terminal in (False, True):
            out = printed(renderable, terminal=terminal)
            assert visible(out) == out


def test_what_a_model_wrote_is_whole_on_the_console() -> None:
    text = "see \x1b]52;c;cm0gLXJmIC8=\x07 and \u202egnp.exe [bold]x[/bold] :smile:"
    out = printed(Text(visible(text)), terminal=True)
    assert "".join(out.split()) == "".join(visible(text).split())
    assert "".join(printed(text, terminal=True).split()) == "".join(visible(text).split())


@pytest.mark.parametrize("as_json", [True, False])
def test_log_lines_hold_no_such_character(
    as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import structlog

    from engine.logs import configure_logging

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    configure_logging("info", json=as_json)
    hostile = "\x1b]0;owned\x07\u202e\x9b2J\ud800"
    try:
        raise ValueError(hostile)
    except ValueError:
        structlog.get_logger("x").warning("bad", said=hostile, nested={"deep": [hostile]}, exc_info=True)
    structlog.reset_defaults()
    err = capsys.readouterr().err
    assert visible(err) == err
    assert "owned" in err
    if as_json:
        assert json.loads(err)["said"] == hostile


def test_no_command_prints_except_through_the_functions_that_escape() -> None:
    own_printing = re.compile(r"typer\.echo\(|click\.echo\(|(?<![\w.])print\(|(?<!Safe)Console\(|sys\.std\w+\.write\(")
    found = {
        f"{file.name}:{number}"
        for file in Path(engine.cli.__file__).parent.glob("*.py")
        if file.name not in ("console.py", "validate.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if own_printing.search(line)
    }
    assert not found, "print through engine.terminal.echo, echo_json or engine.console.make_console"


def test_a_traceback_of_a_defect_holds_no_such_character(capsys: pytest.CaptureFixture[str]) -> None:
    from engine.cli.main import _print_traceback

    _print_traceback(ValueError, ValueError("\x1b[2J"), None)
    assert capsys.readouterr().err == "ValueError: \\x1b[2J\n"


def test_the_characters_that_stay_are_those_that_scripts_need() -> None:
    hidden = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    kept = {c for c in map(chr, range(0x110000)) if unicodedata.category(c) in hidden and visible(c) == c}
    joiners, spaces = {"\u200c", "\u200d"}, {"\n", "\t"}
    number_signs = {c for c in kept if "ARABIC" in unicodedata.name(c, "") or "SYRIAC" in unicodedata.name(c, "")}
    others = {c for c in kept if unicodedata.name(c, "").startswith(("KAITHI", "EGYPTIAN"))}
    assert kept == joiners | spaces | number_signs | others
