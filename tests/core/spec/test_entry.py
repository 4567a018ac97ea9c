"""Entry points import, or say what failed and what is near."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.spec.code.entry import EntryError, load_entry


def failure(use: str, base: Path | None = None) -> str:
    with pytest.raises(EntryError) as caught:
        load_entry(use, base)
    return str(caught.value)


@pytest.fixture(autouse=True)
def clean_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_dotted_attribute_is_followed() -> None:
    import collections

    assert load_entry("collections:OrderedDict.fromkeys", None) == collections.OrderedDict.fromkeys


def test_the_specs_folder_is_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "code_beside_spec.py").write_text("class Env: pass\n")
    assert load_entry("code_beside_spec:Env", tmp_path).__name__ == "Env"


@pytest.mark.parametrize("on_the_path", [[], ["one"], ["one", "two"], ["two", "one"]])
@pytest.mark.parametrize("started_in", ["", "one", "two"])
def test_two_specs_each_get_their_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_the_path: list[str], started_in: str
) -> None:
    """Wherever the engine was started and whatever PYTHONPATH says; modules that they import, and packages, as well."""
    tag = f"{''.join(on_the_path)}_{started_in}"
    for name in ("one", "two"):
        package = tmp_path / name / f"kit_{tag}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"NAME = {name!r}\n")
        (tmp_path / name / f"helper_{tag}.py").write_text(f"NAME = {name!r}\n")
        (tmp_path / name / f"code_{tag}.py").write_text(
            f"from helper_{tag} import NAME as HELPED\nfrom kit_{tag} import NAME as KIT\nALL = ({name!r}, HELPED, KIT)\n"
        )
    for folder in on_the_path:
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    monkeypatch.chdir(tmp_path / started_in)
    for name in ("one", "two", "one"):
        assert load_entry(f"code_{tag}:ALL", tmp_path / name) == (name, name, name)


def test_a_file_beside_the_spec_never_replaces_pythons_own(tmp_path: Path) -> None:
    (tmp_path / "graphlib.py").write_text("TopologicalSorter = None\n")
    (tmp_path / "engine.py").write_text("__version__ = None\n")
    assert load_entry("graphlib:TopologicalSorter", tmp_path) is not None
    assert load_entry("engine:__version__", tmp_path) is not None


def test_a_namesake_in_another_specs_folder_does_not_stand_in(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "namesake_code.py").write_text(f"NAME = {name!r}\n")
    assert load_entry("namesake_code:NAME", tmp_path / "one") == "one"
    assert load_entry("namesake_code:NAME", tmp_path / "two") == "two"
    assert load_entry("namesake_code:NAME", tmp_path / "one") == "one"


def test_a_file_beside_the_spec_cannot_stand_in_for_the_standard_library(tmp_path: Path) -> None:
    (tmp_path / "sndhdr_or_so.py").write_text("")
    (tmp_path / "tomllib.py").write_text("raise RuntimeError('the wrong one')\n")
    sys.modules.pop("tomllib", None)
    assert load_entry("tomllib:loads", tmp_path)("a = 1") == {"a": 1}


@pytest.mark.parametrize("use", ["json", "json:", ":loads", "json:loads()", "", "a b:c", "../json:loads"])
def test_what_is_no_entry_point(use: str) -> None:
    assert failure(use) == f"`{use}` is no entry point; write `package.module:Name`"


def test_a_misspelled_name_gets_the_nearest() -> None:
    assert failure("json:load_s") == "`json` has no `load_s`; did you mean `loads`?"
    assert (
        failure("collections:OrderedDict.fromkey")
        == "`collections.OrderedDict` has no `fromkey`; did you mean `fromkeys`?"
    )


def test_a_misspelled_module_gets_the_nearest() -> None:
    assert (
        failure("json.decodr:X")
        == "`json.decodr:X`: the package `json` has no module `decodr`; did you mean `decoder`?"
    )
    assert failure("fractons:X") == "`fractons:X`: there is no module `fractons`; did you mean `fractions`?"


def test_a_module_is_not_a_package() -> None:
    assert failure("textwrap.dedent:x") == (
        "`textwrap.dedent:x`: `textwrap` is a module, not a package, so it has no `dedent`; write `textwrap:Name`"
    )


def test_a_missing_dependency_is_told_apart_from_a_missing_module(tmp_path: Path) -> None:
    (tmp_path / "needs_more.py").write_text("import not_there_at_all\n")
    assert (
        failure("needs_more:X", tmp_path) == "`needs_more` needs the module `not_there_at_all`, which is not installed"
    )


def test_what_a_module_raises_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "raises_here.py").write_text("x = 1\nraise ValueError('bad')\n")
    (tmp_path / "exits_here.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "bad_syntax_here.py").write_text("def f(:\n")
    file = tmp_path / "raises_here.py"
    assert failure("raises_here:X", tmp_path) == f"importing `raises_here` failed at {file}:2: ValueError: bad"
    assert failure("exits_here:X", tmp_path) == (
        f"importing `exits_here` failed at {tmp_path / 'exits_here.py'}:1: SystemExit: 3"
    )
    assert failure("bad_syntax_here:X", tmp_path).startswith(
        f"importing `bad_syntax_here` failed at {tmp_path / 'bad_syntax_here.py'}:1: SyntaxError: "
    )


def test_a_part_that_is_loaded_lazily_and_fails(tmp_path: Path) -> None:
    (tmp_path / "lazy_here.py").write_text("def __getattr__(name):\n    raise RuntimeError('no ' + name)\n")
    assert failure("lazy_here:X", tmp_path) == (
        f"`X` of `lazy_here` failed at {tmp_path / 'lazy_here.py'}:2: RuntimeError: no X"
    )
