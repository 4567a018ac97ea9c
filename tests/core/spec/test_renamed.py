"""An old key of a spec is an error that names the new key, in a spec file and in the header of an older run."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from written_specs import save_spec

from engine.errors import StoreError
from engine.schemas.train import MemorySpec, TrainSpec, WeightSyncSpec
from engine.spec.load import load_spec, read_spec
from engine.spec.text.places import fields_by_key
from engine.spec.text.problems import RENAMED, new_key
from engine.store.header import RunHeader

SPEC: dict[str, Any] = {
    "spec": "episode/v1",
    "name": "demo",
    "model": {"path": "some-model"},
    "tasks": {"source": "inline", "rows": [{"question": "1 + 1"}]},
    "train": {"memory": {}, "weight_sync": {}},
}
PLACES: dict[type[BaseModel], tuple[str, ...]] = {
    TrainSpec: ("train",),
    MemorySpec: ("train", "memory"),
    WeightSyncSpec: ("train", "weight_sync"),
}
KEYS = [(owner, old, new) for owner, keys in RENAMED.items() if owner in PLACES for old, new in keys.items()]


def section(document: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    for key in place:
        document = document[key]
    return document


def write(folder: Path, document: dict[str, Any]) -> Path:
    return save_spec(folder / "s.yaml", document)


@pytest.mark.parametrize(("owner", "old", "new"), KEYS)
def test_an_old_key_is_refused_and_the_new_one_named(
    owner: type[BaseModel], old: str, new: str, tmp_path: Path
) -> None:
    """Also with the value that the new key has by default: there are no aliases."""
    known = fields_by_key(owner)
    assert new in known
    assert old not in known
    document = deepcopy(SPEC)
    section(document, PLACES[owner])[old] = getattr(
        section_of(load_spec(write(tmp_path, SPEC)).spec, PLACES[owner]), new
    )
    if isinstance(section(document, PLACES[owner])[old], BaseModel):
        section(document, PLACES[owner])[old] = {}
    loaded, problems = read_spec(write(tmp_path, document))
    assert loaded is None
    assert [(each.rule, each.message, each.fix) for each in problems] == [
        ("spec.unknown-key", f"unknown key `{old}`", f"did you mean `{new}`?")
    ]


def section_of(spec: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        spec = getattr(spec, key)
    return spec


def test_only_the_section_that_had_the_key_names_the_new_one(tmp_path: Path) -> None:
    assert new_key(TrainSpec, "passes") == "update_epochs"
    assert new_key(MemorySpec, "passes") is None
    assert new_key(None, "passes") is None
    _, problems = read_spec(write(tmp_path, SPEC | {"limits": {"passes": 2}}))
    assert [problem.message for problem in problems] == ["unknown key `passes`"]
    assert "update_epochs" not in str(problems[0].fix)


@pytest.mark.parametrize(("owner", "old", "new"), KEYS)
def test_a_header_of_an_older_run_is_refused_by_name(
    owner: type[BaseModel], old: str, new: str, tmp_path: Path
) -> None:
    """Old headers hold every default under its old key: they are refused whether the key was written or not."""
    header = RunHeader.of(load_spec(write(tmp_path, SPEC)), run_id="old-run")
    spec = deepcopy(header.spec)
    held = section(spec, PLACES[owner])
    held[old] = held.pop(new)
    place = ".".join((*PLACES[owner], old))
    with pytest.raises(StoreError) as caught:
        header.model_copy(update={"spec": spec, "engine_version": "0.9"}).loaded_spec()
    assert str(caught.value) == (
        f"old-run: its spec has keys that were renamed: `{place}` is now `{new}`; read it with engine 0.9, which wrote it"
    )


def test_a_key_that_was_moved_to_the_top_level_is_refused_and_its_place_named(tmp_path: Path) -> None:
    document = deepcopy(SPEC)
    document["train"]["notify"] = {"on": ["failed"]}
    loaded, problems = read_spec(write(tmp_path, document))
    assert loaded is None
    assert [(each.rule, each.message, each.fix) for each in problems] == [
        ("spec.unknown-key", "unknown key `notify`", "write `notify:` at the top level of the spec")
    ]
    header = RunHeader.of(load_spec(write(tmp_path, SPEC)), run_id="old-run")
    spec = deepcopy(header.spec)
    spec["train"]["notify"] = {"stall": 5}
    with pytest.raises(StoreError, match=r"`train\.notify` is now `notify` at the top level"):
        header.model_copy(update={"spec": spec}).loaded_spec()
