"""`engine export --push`, by the hub's own client over HTTP to a local stand-in of the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import engine_here
from hub_stand_in import TOKEN, DataSet, Hub, hub_stand_in
from written_specs import scripted_spec

pytest.importorskip("huggingface_hub")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("pushed")
    spec = {
        **scripted_spec(
            "said", tiny_tokenizer_dir, ["one"], [{"id": "x", "word": "one"}], ask="Say {{word}}.", tool_calls=None
        ),
        "machine": "single_turn",
    }
    (folder / "said.yaml").write_text(yaml.safe_dump(spec))
    code, out, err = engine_here("run", "said.yaml", "--quiet", cwd=folder)
    assert code == 0, out + err
    return next((folder / "runs").iterdir())


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_stand_in() as hub:
        yield hub


Push = Callable[..., tuple[int, str, str]]


@pytest.fixture
def push(run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Push:
    """Push with the hub's client in this process. It reads some variables when it is imported, so they are set in its module."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))

    def push(
        *words: str, token: str | None = TOKEN, endpoint: str | None = None, offline: bool = False
    ) -> tuple[int, str, str]:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setenv("HF_ENDPOINT", endpoint or hub.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        said = ["export", run, "--format", "trl", "--out", "x.parquet", "--push", *words]
        code, out, err = engine_here(*said, cwd=tmp_path)
        assert TOKEN not in out + err
        return code, out, err

    return push


def test_a_new_data_set_is_private_and_has_the_file_and_a_card_in_one_commit(
    push: Push, hub: Hub, run: Path, tmp_path: Path
) -> None:
    code, out, err = push("team/said")
    assert code == 0, err
    assert f"pushed: {hub.url}/datasets/team/said" in out
    made = hub.sets["team/said"]
    assert made.private
    assert made.commits == [f"Add 1 rows of {run.name}"]
    assert made.files.keys() == {f"data/{run.name}-turns.parquet", "README.md"}
    assert made.files[f"data/{run.name}-turns.parquet"] == (tmp_path / "x.parquet").read_bytes()
    card = made.files["README.md"].decode()
    assert yaml.safe_load(card.split("---")[1])["configs"][0]["data_files"][0]["path"] == "data/*-turns.parquet"


def test_a_second_push_replaces_its_own_file_and_no_other(push: Push, hub: Hub, run: Path) -> None:
    hub.sets["team/said"] = DataSet(private=True, files={"README.md": b"mine", "data/other-turns.parquet": b"x"})
    assert push("team/said")[0] == 0
    assert push("team/said")[0] == 0
    files = hub.sets["team/said"].files
    assert files.keys() == {"README.md", "data/other-turns.parquet", f"data/{run.name}-turns.parquet"}
    assert (files["README.md"], files["data/other-turns.parquet"]) == (b"mine", b"x")


def test_public_is_asked_for(push: Push, hub: Hub) -> None:
    assert push("team/said", "--public")[0] == 0
    assert not hub.sets["team/said"].private
    before = dict(hub.sets["team/said"].files)
    code, _, err = push("team/said")
    assert code == 2
    assert "the data set team/said is public; add --public" in err
    assert hub.sets["team/said"].files == before


FAULTS = [
    ("whoami", 401, "the token in HF_TOKEN is not valid"),
    ("create", 403, "it needs the right to write"),
    ("create", 409, "at the same time: push again"),
    ("commit", 403, "it needs the right to write"),
    ("commit", 409, "at the same time: push again"),
    ("commit", 400, "with status 400: no commit"),
    ("upload/", 403, "it needs the right to write"),
]


@pytest.mark.parametrize(
    ("part", "status", "said", "exists"),
    [
        pytest.param(*fault, exists, marks=() if exists == (at % 2 == 1 and fault[0] != "create") else pytest.mark.slow)
        for at, fault in enumerate(FAULTS)
        for exists in (False, True)
        if not (exists and fault[0] == "create")
    ],
)
def test_a_refusal_is_explained_and_leaves_the_hub_as_it_was(
    part: str, status: int, said: str, exists: bool, push: Push, hub: Hub, tmp_path: Path
) -> None:
    if exists:
        hub.sets["team/said"] = DataSet(private=True, files={"README.md": b"mine"})
    hub.faults[part] = status
    code, _, err = push("team/said")
    assert code == 2, err
    assert f"with status {status}: " in err
    assert said in err
    assert {name: each.files for name, each in hub.sets.items()} == (
        {"team/said": {"README.md": b"mine"}} if exists else {}
    )
    assert (tmp_path / "x.parquet").is_file()


def test_a_data_set_that_cannot_be_deleted_again_is_named(push: Push, hub: Hub) -> None:
    hub.faults |= {"/commit": 403, "repos/delete": 403}
    code, _, err = push("team/said")
    assert code == 2
    assert "the empty data set team/said was created and could not be deleted again: delete it" in err


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["team/said"], {"token": None}, "--push needs a token that may write, in the environment variable HF_TOKEN"),
        (["said"], {}, "--push said: not the id of a data set; write OWNER/NAME"),
        (["team/said", "--images", "paths"], {}, "--images paths names files of this machine"),
        (["team/said"], {"token": "hf_other"}, "with status 401: the token in HF_TOKEN is not valid"),
        (["team/said"], {"endpoint": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached"),
        (["team/said"], {"offline": True}, "HF_HUB_OFFLINE is set"),
        (["team/said", "--filter", "false"], {}, "has no rows: nothing is pushed"),
    ],
)
def test_what_a_push_needs_is_said(
    words: list[str], variables: dict[str, Any], said: str, push: Push, hub: Hub
) -> None:
    code, _, err = push(*words, **variables)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert hub.sets == {}
