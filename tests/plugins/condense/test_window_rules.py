"""What `validate` says about windows of images, and which trainers refuse them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.errors import SpecError, TrainError
from engine.plugins.trainers.capabilities import TRAINERS
from engine.plugins.trainers.rollouts import TrainerRollouts
from engine.spec.load import LoadedSpec, load_spec
from engine.validate import check_spec

CONDENSES = {"on_overflow": "condense", "condensations": 40}
BY_GUARD = {
    "preset": "single_turn",
    "states": {"CONDENSING": {"action": "condense"}},
    "transitions": [
        {"trigger": "answered", "source": "GENERATING", "dest": "CONDENSING"},
        {"trigger": ["condensed", "unchanged"], "source": "CONDENSING", "dest": "GENERATING"},
    ],
}


def loaded(folder: Path, condense: dict[str, Any] | None, limits: dict[str, Any], **changes: Any) -> LoadedSpec:
    spec = {
        "spec": "episode/v1", "name": "demo", "model": {"path": "m"}, "tasks": {"source": "inline", "rows": [{"q": "a"}]},
        "prompt": [{"role": "user", "content": "{{q}}"}], "machine": "tools", "limits": limits, **changes,
    }  # fmt: skip
    (folder / "s.yaml").write_text(yaml.safe_dump(spec | ({} if condense is None else {"condense": condense})))
    return load_spec(folder / "s.yaml")


@pytest.mark.parametrize(
    ("condense", "changes", "found"),
    [
        ({"keep": {"images": "last 2", "pixels": 99}}, {}, [(("condense", "keep", "pixels"), "with `older: text`")]),
        ({"keep": {"images": "last 2", "older": "nothing", "text": "gone"}}, {}, [(("condense", "keep", "text"), "with `older: nothing`")]),
        ({"keep": {"images": "last 2"}}, {}, []),
        ({"keep": {"images": "last 2"}}, {"limits": {"images": 3, **CONDENSES}, "model": {"path": "m", "max_images": 3}}, []),
        ({"keep": {"images": "last 2"}}, {"limits": {}}, [(("condense",), "no state condenses")]),
        ({"keep": {"images": "last 2"}}, {"limits": {"images": 2, **CONDENSES}}, [(("condense", "keep"), "`limits.images`")]),
        ({"keep": {"images": "last 2", "step": 3}}, {"model": {"path": "m", "max_images": 3}}, [(("condense", "keep"), "shows 4 images before")]),
        ({"keep": {"images": "last 2"}, "condenser": "drop"}, {}, [(("condense", "condenser"), "no effect with `keep`")]),
        ({"keep": {"images": "last 2"}, "keep_last": 2}, {}, [(("condense", "keep_last"), "no effect with `keep`")]),
        ({"keep": {"images": "last 2", "step": 1}}, {"machine": BY_GUARD, "limits": {}}, [(("condense", "keep", "step"), "no state handles the event")]),
        ({"keep": {"images": "last 2", "older": "thumbnail", "pixels": 99}}, {"model": {"path": "m", "max_image_pixels": 99}},
         [(("condense", "keep", "pixels"), "no image becomes a thumbnail")]),
    ],
)  # fmt: skip
def test_settings_of_a_window_without_effect(
    tmp_path: Path, condense: dict[str, Any], changes: dict[str, Any], found: list[tuple[tuple[str, ...], str]]
) -> None:
    spec = loaded(tmp_path, condense, changes.pop("limits", CONDENSES), **changes)
    findings = [item for item in check_spec(spec) if item.rule == "condense.no-effect"]
    assert [item.path for item in findings] == [path for path, _ in found]
    for item, (_, words) in zip(findings, found, strict=True):
        assert words in item.message


@pytest.mark.parametrize(
    ("condense", "words"),
    [
        ({"keep": {"images": 4}}, "`condense.keep.images` must be a string; it is 4"),
        ({"keep": {"images": "last 0"}}, "must be text that matches"),
        ({"keep": {"images": "last 4"}, "condenser": "policy", "chunks": "history"}, "`chunks` has no effect with `keep`"),
    ],
)  # fmt: skip
def test_a_window_that_is_wrong_is_refused(tmp_path: Path, condense: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        loaded(tmp_path, condense, CONDENSES)


def test_a_window_has_no_effect_on_a_model_of_text(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "qwen2"}')
    spec = loaded(tmp_path, {"keep": {"images": "last 1"}}, CONDENSES)
    messages = [item.message for item in check_spec(spec) if item.rule == "condense.no-effect"]
    assert messages == ["`keep` has no effect: the model takes only text"]


@pytest.mark.parametrize(
    ("opening", "condensations", "needed"),
    [(False, 6, 7), (False, 7, None), (True, 6, 7), (True, 7, None), (True, None, None)],
)
def test_the_limit_on_condensations_is_compared_with_the_turns(
    tmp_path: Path, opening: bool, condensations: int | None, needed: int | None
) -> None:
    """30 images, of which 2 stay, slide 28 / 4 times; they are those of 30 turns with the prompt's, and of 31 without it."""
    keep = {"images": "last 2", "step": 4}
    limits = {"assistant_turns": 30 if opening else 31, "on_overflow": "condense", "condensations": condensations}
    spec = loaded(tmp_path, {"keep": keep, "opening": opening}, limits)
    fixes = [item.fix for item in check_spec(spec) if item.rule == "condense.window"]
    assert fixes == ([] if needed is None else [f"set `limits.condensations: {needed}`, or a larger `step`"])


@pytest.mark.parametrize(
    ("condense", "path"),
    [
        ({"keep": {"images": "last 2"}}, ("condense", "keep")),
        ({"condenser": "drop"}, ("condense",)),
        (None, ("limits", "on_overflow")),
    ],
)
def test_trainers_that_take_one_row_for_each_prompt_refuse_windows(
    tmp_path: Path, condense: dict[str, Any] | None, path: tuple[str, ...]
) -> None:
    """By `engine validate --trainer`, and where their adapters start."""
    spec = loaded(tmp_path, condense, CONDENSES)
    rules = {
        name: [item.rule for item in TRAINERS[name].findings(spec) if item.path == path]
        for name in ("trl", "skyrl", "verl", "areal", "slime")
    }
    assert rules == {"trl": ["trainer.refused"], "skyrl": ["trainer.refused"], "verl": [], "areal": [], "slime": []}
    for name in ("trl", "skyrl"):
        with pytest.raises(TrainError, match=f"several rows of one episode.*{path[-1]}"):
            TrainerRollouts(spec, tmp_path / "with", name)
