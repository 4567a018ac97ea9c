"""`engine new`: what it makes is valid, runs as it stands, and never replaces anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.checks import check_spec
from engine.cli.main import app
from engine.cli.new import scaffold
from engine.spec.load import load_spec

FILES = ["spec.yaml", "environment.py", "replies.yaml", "test_shop_v2.py"]


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
        "",
        "Next:",
        f"  engine validate --import {folder}/spec.yaml",
        f"  engine run {folder}/spec.yaml",
        f"  pytest {folder}",
    ]
    assert sorted(file.name for file in folder.iterdir()) == sorted(FILES)


def test_a_missing_parent_folder_is_made(tmp_path: Path) -> None:
    files = scaffold("shop", tmp_path / "a" / "b")
    assert [file.relative_to(tmp_path).as_posix() for file in files][:2] == [
        "a/b/shop/spec.yaml",
        "a/b/shop/environment.py",
    ]


def test_the_spec_has_no_findings(shop: Path, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer_dir: Path) -> None:
    monkeypatch.setenv("MODEL", str(tiny_tokenizer_dir))
    loaded = load_spec(shop / "spec.yaml")
    assert [str(item) for item in check_spec(loaded) if item.severity != "info"] == []
    assert loaded.spec.name == "shop-v2"
    assert loaded.spec.model.path == str(tiny_tokenizer_dir)


def test_one_override_puts_a_real_model_in(shop: Path) -> None:
    loaded = load_spec(shop / "spec.yaml", ["backend={kind: local}"])
    assert (loaded.spec.backend.kind, loaded.spec.model.path) == ("local", "smollm2-135m-instruct")


def test_the_schema_that_the_editor_is_pointed_at_is_there(shop: Path) -> None:
    line = (shop / "spec.yaml").read_text().splitlines()[0]
    assert line.startswith("# yaml-language-server: $schema=")
    assert Path(line.partition("=")[2]).name == "episode.schema.json"
    assert Path(line.partition("=")[2]).is_file()


@pytest.mark.slow
def test_its_own_tests_pass(shop: Path, tiny_tokenizer_dir: Path) -> None:
    environment = os.environ | {"MODEL": str(tiny_tokenizer_dir)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(shop)]
    result = subprocess.run(command, cwd=shop.parent, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("4 passed")


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
