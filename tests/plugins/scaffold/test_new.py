"""`engine new`: each kind is valid, runs with its tiny model, and never replaces anything."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from installed_plugins import needs_plugin
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

import engine
from engine.cli.main import app
from engine.plugins.scaffold.command import Kind, scaffold
from engine.spec.load import load_spec
from engine.validate import check_spec

FILES = ["spec.yaml", "environment.py", "replies.yaml", "spec.scenarios.yaml", "test_shop_v2.py"]
TEXT = [kind for kind in Kind if kind is not Kind.VISION]
"""Kinds that any tokenizer can play."""
VALID = [pytest.param(kind, marks=[needs_plugin("roles")] if kind is Kind.JUDGE else []) for kind in Kind]
"""Kinds whose specs have no findings here."""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    scaffold("shop-v2", tmp_path)
    return tmp_path / "shop-v2"


def test_it_prints_the_files_and_the_next_commands(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["new", "shop-v2", "--dir", str(tmp_path)])
    assert result.exit_code == 0
    folder = tmp_path / "shop-v2"
    assert result.stdout.splitlines() == [
        f"Made {folder}/:",
        *(f"  {name}" for name in FILES),
        "  schemas/json/    for completion and errors in an editor",
        "",
        "Next:",
        f"  engine validate --import {folder}/spec.yaml",
        f"  engine test {folder}/spec.yaml --require-coverage",
        f"  engine run {folder}/spec.yaml",
        f"  python -m unittest discover -s {folder}    # or: pytest {folder}",
    ]
    assert sorted(file.name for file in folder.iterdir()) == sorted([*FILES, "schemas"])


@pytest.mark.parametrize("kind", Kind)
def test_each_yaml_file_fits_the_schema_that_its_first_line_names(tmp_path: Path, kind: Kind) -> None:
    folder = scaffold("shop", tmp_path, kind)[0].parent
    for name in ("spec", "replies", "spec.scenarios"):
        text = (folder / f"{name}.yaml").read_text()
        schema = text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")
        assert (
            list(Draft202012Validator(json.loads((folder / schema).read_text())).iter_errors(yaml.safe_load(text)))
            == []
        )


def test_a_missing_parent_folder_is_made(tmp_path: Path) -> None:
    files = scaffold("shop", tmp_path / "a" / "b")
    assert [file.relative_to(tmp_path).as_posix() for file in files][:2] == [
        "a/b/shop/spec.yaml",
        "a/b/shop/environment.py",
    ]


@pytest.mark.parametrize("kind", Kind)
def test_no_file_holds_a_path_of_this_machine(tmp_path: Path, kind: Kind) -> None:
    for file in scaffold("shop", tmp_path, kind):
        text = file.read_text()
        assert re.findall(r"(?<![\w.:}])/(?:\w|\.)[\w./-]*", text.replace("http://", "").replace("</", "<")) == [], (
            file.name
        )
        for place in (tmp_path, Path.home(), Path(engine.__file__).parents[1]):
            assert str(place) not in text


@pytest.mark.parametrize("kind", VALID)
def test_one_override_puts_a_real_model_in(tmp_path: Path, kind: Kind) -> None:
    loaded = load_spec(scaffold("shop", tmp_path, kind)[0], ["backend={kind: local}"])
    model = "tiny-qwen2_5-vl" if kind is Kind.VISION else "tiny-qwen2"
    assert (loaded.spec.backend.kind, loaded.spec.model.path) == ("local", model)
    assert [str(item) for item in check_spec(loaded) if item.severity != "info"] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", VALID)
def test_a_kind_runs_with_its_tiny_model(tmp_path: Path, kind: Kind) -> None:
    spec = scaffold("shop", tmp_path, kind)[0]
    command = ["run", str(spec), "--set", "backend={kind: local}", "--set", "limits.turn_tokens=8", "--quiet"]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "runs")])
    assert result.exit_code == 0, result.output


def test_what_is_there_is_never_replaced(shop: Path, tmp_path: Path) -> None:
    (shop / "spec.yaml").write_text("mine")
    result = CliRunner().invoke(app, ["new", "shop-v2", "--dir", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr == f"{shop} exists already, and nothing was changed. Choose another name, or --dir.\n"
    assert (shop / "spec.yaml").read_text() == "mine"


def test_an_empty_folder_and_a_dangling_link_count_as_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("empty", "link"):
        with pytest.raises(FileExistsError):
            scaffold(name, tmp_path)


def test_a_kind_that_does_not_exist_makes_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["new", "shop", "--kind", "toys", "--dir", str(tmp_path)])
    assert result.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "../x", "a/b", "1st", ".hidden", "sp ace", "naïve", "x\n"])
def test_a_name_that_cannot_be_one_makes_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not a valid name"):
        scaffold(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "title"), [("shop-v2", "ShopV2"), ("a..b", "AB"), ("snake_case", "SnakeCase"), ("x", "X")]
)
def test_the_classes_are_named_after_the_task(tmp_path: Path, name: str, title: str) -> None:
    files = scaffold(name, tmp_path)
    source = files[1].read_text()
    compile(source, files[1].name, "exec")
    assert f"class {title}Environment:" in source
    assert f"environment:{title}User" in files[0].read_text()


def test_a_scaffold_that_cannot_be_written_whole_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(self: Path, text: str, encoding: str | None = None) -> int:
        if self.name == "replies.yaml":
            raise OSError(28, "No space left on device", str(self))
        return write(self, text, encoding=encoding)

    monkeypatch.setattr(Path, "write_text", full)
    result = CliRunner().invoke(app, ["new", "shop", "--dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert list(tmp_path.iterdir()) == []
