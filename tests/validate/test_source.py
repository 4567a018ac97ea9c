"""Modules read as text: only what holds whatever their code does is said, and none is imported."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from engine.spec.access import Access
from engine.spec.code.entry import EntryError, load_entry
from engine.validate.code.source import Sources, declared_events

pytestmark = pytest.mark.usefixtures("in_folder")

HEAD = "raise SystemExit('imported')\n"


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


def read(use: str) -> ast.AST | None:
    definition = Sources(Path(), Access.for_spec(Path("s.yaml"))).entry(use).definition
    return None if definition is None else definition.node


BINDINGS = {
    "class": "class X: ...",
    "function": "def X(): ...",
    "async function": "async def X(): ...",
    "value": "X = 1",
    "annotated": "X: int = 1",
    "unpacked": "a, (X, *b) = 1, (2,)",
    "import": "import os as X",
    "dotted import": "import X.y",
    "from": "from os import path as X",
    "star": "from os.path import *",
    "branch": "if True:\n    X = 1\nelse:\n    y = 1",
    "try": "try:\n    import X\nexcept ImportError:\n    X = None",
    "with": "with open('x') as X: ...",
    "loop": "for X in (): ...",
    "walrus": "print(X := 1)",
    "global": "def f():\n    global X\n    X = 1\nf()",
    "lazy": "def __getattr__(name): ...",
    "globals": "globals()['X'] = 1",
    "exec": "exec('X = 1')",
    "itself": "import sys\nsetattr(sys.modules[__name__], 'X', 1)",
    "match": "match 1:\n    case X: ...",
}


@pytest.mark.parametrize("name", BINDINGS)
def test_a_name_that_a_module_may_have_is_no_mistake(name: str) -> None:
    write("bound.py", f"{BINDINGS[name]}\n{HEAD}")
    node = read("bound:X")
    assert (node is not None) == (name in ("class", "function", "async function"))
    assert "bound" not in sys.modules


@pytest.mark.parametrize(
    ("use", "files"),
    [
        ("plain:Baord", {"plain.py": "class Board: ...\nimport os\n"}),
        ("plain:Board.stp", {"plain.py": "class Board:\n    def step(self): ...\n"}),
        ("nowhere_at_all:Board", {}),
        ("pack.none:Board", {"pack/__init__.py": "", "pack/one.py": ""}),
        ("plain.inner:Board", {"plain.py": ""}),
        ("broken:Board", {"broken.py": "def (:\n"}),
        ("no entry", {}),
        ("json:lods", {}),
        ("xml.domm:x", {}),
    ],
)
def test_what_is_said_is_what_importing_would_say(
    use: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        write(name, text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("plain", "pack", "broken"):
        sys.modules.pop(name, None)
    with pytest.raises(EntryError) as said:
        read(use)
    with pytest.raises(EntryError) as imported:
        load_entry(use, tmp_path)
    for name in ("plain", "pack", "broken"):
        sys.modules.pop(name, None)
    assert str(said.value) == str(imported.value)


def test_modules_are_found_where_importing_finds_them() -> None:
    write("textwrap.py", HEAD)  # Python's own comes first
    write("space/inner.py", "class Board: ...\n" + HEAD)
    write("pack/__init__.py", HEAD)
    write("pack/inner.py", "class Board:\n    def step(self): ...\n" + HEAD)
    assert isinstance(read("textwrap:dedent"), ast.FunctionDef)
    assert isinstance(read("space.inner:Board"), ast.ClassDef)
    assert isinstance(read("pack.inner:Board.step"), ast.FunctionDef)
    assert isinstance(read("engine.environments.arithmetic:Arithmetic"), ast.ClassDef)
    assert read("pack:inner") is None
    assert read("sys:path") is None  # it has no text
    assert {"space", "space.inner", "pack", "pack.inner"}.isdisjoint(sys.modules)


def test_what_cannot_be_read_as_text_is_no_mistake(tmp_path: Path) -> None:
    write("huge.py", "x = 1\n" * 400_000)
    outside = tmp_path.parent / f"{tmp_path.name}-outside.txt"
    outside.write_text("not Python: [\n")
    Path("linked.py").symlink_to(outside)
    assert read("huge:Board") is None
    assert read("linked:Board") is None


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("class X:\n    events = ('a', 'b')\n", ("a", "b")),
        ("class X:\n    events: tuple[str, ...] = ['a']\n", ("a",)),
        ("class X:\n    events = MORE\n", None),
        ("class X: ...\n", None),
        ("@action('a', 'b')\ndef X(): ...\n", ("a", "b")),
        ("@environment.action('a')\nasync def X(): ...\n", ("a",)),
        ("@action(*NAMES)\ndef X(): ...\n", None),
        ("@other('a')\ndef X(): ...\n", None),
        ("@action('a')\n@other\ndef X(): ...\n", None),
    ],
)
def test_declared_events(text: str, events: tuple[str, ...] | None) -> None:
    assert declared_events(ast.parse(text).body[0]) == events


def test_a_module_beside_the_spec_comes_before_others_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("other/namesake_text.py", "class Other: ...\n")
    write("specs/namesake_text.py", "class Own: ...\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "other"), *sys.path])
    access = Access.for_spec(Path("specs/s.yaml"))
    own = Sources(Path("specs"), access).entry("namesake_text:Own").definition
    assert own is not None
    assert isinstance(own.node, ast.ClassDef)
    with pytest.raises(EntryError, match="has no `Other`"):
        Sources(Path("specs"), access).entry("namesake_text:Other")
