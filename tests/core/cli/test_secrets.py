"""A secret that the environment gives to a spec is in no file of the run and in no output; files are their owner's."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from installed_commands import installed
from installed_plugins import needs_plugin
from slow_cases import slow_but
from typer.testing import CliRunner

from engine import masking
from engine.cli.main import app
from engine.store import RunStore, find_run

CANARY = "canary-3f9a\"'\\é-secret"
NUMBER = "4815162342"


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_known", {})
    monkeypatch.setattr(masking, "_pattern", None)
    monkeypatch.setenv("CANARY", CANARY)
    monkeypatch.setenv("NUMBER", NUMBER)
    monkeypatch.setenv("PLACE", "here")
    monkeypatch.delenv("UNSET", raising=False)


@pytest.fixture
def spec(tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    document: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "leaky",
        "description": "In ${PLACE}.",
        "model": {"path": str(tiny_tokenizer_dir), "tool_calls": "hermes"},
        "backend": {"kind": "scripted", "replies": [call, "done"]},
        "tasks": {"source": "python", "use": "leaky_code:rows", "with": {"key": "${CANARY}"}, "id": "id"},
        "prompt": [{"role": "user", "content": "Go."}],
        "environment": {
            "use": "leaky_code:Board",
            "with": {"key": "${CANARY}", "number": "${NUMBER}"},
        },
        "tools": [{"use": "leaky_code:Look", "name": "look", "with": {"key": "${CANARY}"}}],
        "user": {"use": "leaky_code:Reader", "with": {"headers": {"authorization": "Bearer ${CANARY}"}}},
    }
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(document).replace("'${NUMBER}'", "${NUMBER}"))
    return path


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def forms() -> list[bytes]:
    """What must be found nowhere: the secret as it is, in JSON, in a `repr`, and its recognisable parts."""
    return [b"canary-3f9a", NUMBER.encode()]


@needs_plugin("replay")
def test_the_secret_is_in_no_file_and_no_output(spec: Path, tmp_path: Path) -> None:
    outputs = {"run": call("run", spec, "--quiet")}
    folder = find_run("latest", tmp_path / "runs")
    places = ("none", "reset", "tool", "user", "score", "url")
    shows = installed([("show", "latest"), *(("show", "latest", place) for place in places)])
    outputs |= {" ".join(words): call(*words) for words in shows}
    outputs |= {
        "jsonl": call("export", "latest"),
        "parquet": call("export", "latest", "--format", "parquet"),
        "replay": call("replay", "latest"),
        "rescore": call("rescore", "latest", "--spec", spec),
    }
    for name, result in outputs.items():
        assert result.exit_code == 0, (name, result.output, result.exception)
        assert not [form for form in forms() if form in result.output.encode()], (name, result.output)
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {"run.db", "rows.jsonl", "rows.parquet", "backend.json"} <= {file.name for file in files}
    for file in files:
        data = file.read_bytes()
        assert not [form for form in forms() if form in data], file
    if shows:
        assert "401 for" in outputs["show latest reset"].output
        assert "${CANARY}" in outputs["show latest user"].output
        assert "https://me:***@host/x" in outputs["show latest url"].output


def test_a_run_keeps_the_references_and_is_taken_up_with_the_values(spec: Path, tmp_path: Path) -> None:
    assert call("run", spec, "--quiet").exit_code == 0
    with RunStore.open(find_run("latest", tmp_path / "runs"), readonly=True) as store:
        stored, loaded = store.header, store.header.loaded_spec(strict=True)
    assert stored.data["environment"]["with"] == {"key": "${CANARY}", "number": "${NUMBER}"}
    assert stored.spec["user"]["with"]["headers"] == {"authorization": "Bearer ${CANARY}"}
    assert stored.spec["description"] == "In here."
    assert loaded.spec.environment is not None
    assert loaded.spec.environment.with_ == {"key": CANARY, "number": int(NUMBER)}
    assert loaded.data["user"]["with"]["headers"]["authorization"] == f"Bearer {CANARY}"
    assert call("run", "--resume", "latest", "--quiet").exit_code == 0


def test_a_resume_with_another_value_is_refused_by_name(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("run", spec, "--quiet").exit_code == 0
    for name, value, why in [
        ("CANARY", None, "`CANARY`, which `environment.with.key` uses, is not set now"),
        ("CANARY", "another-value", "`CANARY`, which `environment.with.key` uses, holds another value now"),
        ("NUMBER", "7", "`NUMBER`, which `environment.with.number` uses, holds another value now"),
    ]:
        with monkeypatch.context() as patch:
            patch.delenv(name) if value is None else patch.setenv(name, value)
            result = call("run", "--resume", "latest", "--quiet")
            assert result.exit_code == 1
            assert f"the environment variable {why}" in " ".join(result.output.split())
            assert value is None or len(value) < 2 or value not in result.output
            # reading needs no secret
            for words in installed([("show", "latest", "none"), ("export", "latest"), ("replay", "latest")]):
                assert call(*words).exit_code == 0, words


def test_a_default_is_what_a_variable_that_is_not_set_holds(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec.write_text(spec.read_text().replace("${CANARY}", "${UNSET:" + "canary-3f9a" + "}"))
    monkeypatch.setattr("leaky_code.check", lambda key: None)
    assert call("run", spec, "--quiet").exit_code == 0
    assert call("run", "--resume", "latest", "--quiet").exit_code == 0
    monkeypatch.setenv("UNSET", "something")
    result = call("run", "--resume", "latest", "--quiet")
    assert result.exit_code == 1
    assert "was not set when the run began" in " ".join(result.output.split())


@pytest.mark.parametrize("mask", slow_but([0o022, 0o000], 0o000))
def test_a_run_is_its_owners_alone_whatever_the_umask(spec: Path, tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        assert call("run", spec, "--quiet").exit_code == 0
        folder = find_run("latest", tmp_path / "runs")
        assert call("export", "latest").exit_code == 0
        assert call("export", "latest", "--out", tmp_path / "elsewhere.parquet").exit_code == 0
        with RunStore.open(folder) as store:  # with a WAL, while it is open
            open_files = {file.name for file in folder.iterdir()}
            modes = {file: stat.S_IMODE(file.stat().st_mode) for file in folder.rglob("*") if file.is_file()}
            assert store.status == "running"
    finally:
        os.umask(before)
    assert {"run.db", "run.db-wal", "run.db-shm", "run.lock", "backend.json", "rows.jsonl"} <= open_files
    assert set(modes.values()) == {0o600}, modes
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o755  # nobody else may put another run in its place
    assert stat.S_IMODE((tmp_path / "elsewhere.parquet").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pw@host/x and https://a:b%40c@h", "http://me:***@host/x and https://a:***@h"),
        ("http://host:8000/x", "http://host:8000/x"),
        ('{"error": "Incorrect API key provided: sk-proj-abcdefgh12345678"}', '{"error": "Incorrect API key provided: sk-***"}'),
        ("Authorization: Bearer abc.def-ghi_jkl", "Authorization: Bearer ***"),
        ('{"api_key": "0123456789"}', '{"api_key": "***"}'),
        ("api-key=0123456789&x=1", "api-key=***&x=1"),
        ("password: hunter22", "password: ***"),
        ("the basic idea of tokens; token=7", "the basic idea of tokens; token=7"),
    ],
)  # fmt: skip
def test_credentials_of_known_forms_are_masked_in_errors(text: str, shown: str) -> None:
    assert masking.mask_credentials(text) == shown


def test_short_values_and_ordinary_names_are_left_alone() -> None:
    masking.remember("API_KEY", "1")
    assert masking.mask("1 + 1") == "1 + 1"
    for name, value in {"ROOT": str(Path(__file__).parent), "HOST": "localhost", "COUNT": "100000"}.items():
        masking.remember_variable(name, value)
        assert masking.mask(value) == value
    masking.remember_variable("DB_PASSWORD", "correcthorse")
    masking.remember_variable("ACCOUNT", "a8f0-b7c1")
    assert masking.mask("correcthorse a8f0-b7c1") == "${DB_PASSWORD} ${ACCOUNT}"


@pytest.mark.parametrize(
    "name", ["OPENAI_API_KEY", "KEY", "apikey", "HF_TOKEN", "TOKEN_2", "AWS_SECRET_ACCESS_KEY", "DB_PASS", "DB_PWD", "SENTRY_DSN"]
)  # fmt: skip
def test_a_name_says_that_a_value_is_secret(name: str) -> None:
    assert masking.is_secret(name, "x")


@pytest.mark.parametrize("name", ["MODEL_DIR", "TOKENIZER_PATH", "PWD", "MONKEY", "AUTHOR", "PASSAGES", "HOME"])
def test_an_ordinary_name_says_nothing(name: str) -> None:
    assert not masking.is_secret(name, "/models")
    assert masking.is_secret(name, "https://me:password@host")
