"""What trackers are sent, and what is said of those that are missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tracked import FACE, TrackedMetrics, Tracker
from written_specs import save_spec, scripted_spec

from engine.errors import SpecError, TrainError
from engine.plugin import installed, missing
from engine.plugins.report.spec import ReportSpec, TrackingSpec
from engine.plugins.report.trackers import TrackedTraining, observe
from engine.runner.observers import OBSERVE_TRAINING
from engine.schemas.episode import EpisodeSpec
from engine.schemas.sections import dump, read_stored, written
from engine.spec.load import load_spec
from engine.train.metrics import MetricsLog, read_metrics
from engine.train.setup import resumable_keys
from engine.validate import check_spec

RUN = TrackingSpec(name="run")


def test_a_package_that_is_not_there_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(TrainError, match=r"pip install 'episode-engine\[trackio\]', or leave it out") as caught:
        TrackedMetrics(tmp_path, ["trackio"])
    assert caught.value.kind == "train_setup"


def test_a_sink_that_fails_does_not_end_the_training(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = TrackedMetrics(tmp_path, ["tensorboard"])
    sink = log.trackers._trackers["tensorboard"]
    sink.close()
    sink._writer = None  # type: ignore[attr-defined]
    log.write(1, {"loss": 0.5})
    log.write(2, {"loss": 0.5})
    log.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


@pytest.fixture
def tracker() -> Iterator[type[Tracker]]:
    """A tracker that another package adds."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(installed().plugins, "made", FACE)
        monkeypatch.setitem(installed().packages, "made", "made 1.0")
        for name, value in (("runs", {}), ("tracking", []), ("buffers", False), ("can_remove", False)):
            monkeypatch.setattr(Tracker, name, value)
        ReportSpec.model_rebuild(force=True)
        yield Tracker
    ReportSpec.model_rebuild(force=True)


def killed_after(folder: Path, *steps: int, shown: int) -> None:
    """A training that wrote lines of these steps and was killed when the tracker had the first `shown` of them."""
    log = TrackedMetrics(folder, ["made"], tracking=RUN)
    for number, step in enumerate(steps):
        if number == shown:
            log.trackers._trackers.clear()
        log.write(step, {"loss": float(step)})


def test_a_line_that_a_kill_kept_from_a_tracker_is_sent_by_the_next_process(
    tmp_path: Path, tracker: type[Tracker]
) -> None:
    killed_after(tmp_path, 1, 2, 3, shown=2)
    assert tracker.runs == {"run": [(1, 1.0), (2, 2.0)]}
    log = TrackedMetrics(tmp_path, ["made"], tracking=RUN)
    log.truncate(3)
    log.write(4, {"loss": 4.0})
    log.close()
    assert tracker.runs == {"run": [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]}


@pytest.mark.parametrize("can_remove", [True, False])
def test_a_tracker_never_shows_two_values_of_a_step(can_remove: bool, tmp_path: Path, tracker: type[Tracker]) -> None:
    tracker.can_remove = can_remove
    killed_after(tmp_path, 1, 2, 3, shown=3)
    for value in (20.0, 30.0):
        log = TrackedMetrics(tmp_path, ["made"], tracking=RUN)
        log.truncate(1)
        log.write(2, {"loss": value})
        log.close()
    first = [(1, 1.0), (2, 2.0), (3, 3.0)]
    others = {"run": first, "run-2": [(1, 1.0), (2, 20.0)], "run-3": [(1, 1.0), (2, 30.0)]}
    assert tracker.runs == ({"run": [(1, 1.0), (2, 30.0)]} if can_remove else others)


def test_what_a_tracker_may_have_held_in_a_buffer_is_sent_again(tmp_path: Path, tracker: type[Tracker]) -> None:
    tracker.buffers = True
    killed_after(tmp_path, 1, 2, shown=2)
    for shown in (
        [(1, 1.0), (2, 2.0), (2, 2.0)],
        [(1, 1.0), (2, 2.0), (2, 2.0)],
    ):  # the second time it was closed in order
        log = TrackedMetrics(tmp_path, ["made"], tracking=RUN)
        log.truncate(2)
        log.close()
        assert tracker.runs == {"run": shown}


def test_a_tracker_is_given_the_names_of_the_spec(tmp_path: Path, tracker: type[Tracker]) -> None:
    wanted = TrackingSpec(project="sums", name="first", group="g", tags=["a"])
    log = TrackedMetrics(tmp_path, ["made"], tracking=wanted)
    log.write(1, {"loss": 1.0})
    log.write(2, {"loss": 2.0})
    log.truncate(1)  # a tracker that cannot remove values gets another run, with the same names
    log.close()
    assert tracker.tracking == [wanted, wanted]
    assert tracker.runs == {"first": [(1, 1.0), (2, 2.0)], "first-2": [(1, 1.0)]}


def spec_file(folder: Path, tokenizer: Path, train: dict[str, object]) -> Path:
    plain = scripted_spec("plain", tokenizer, ["Done."], tool_calls=None)
    return save_spec(folder / "spec.yaml", plain | {"machine": "single_turn", "train": train})


def test_a_tracker_that_is_no_ones_is_refused_with_the_known_ones(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(spec_file(tmp_path, tiny_tokenizer_dir, {"report_to": ["wand"]}))
    (error,) = caught.value.diagnostics
    names = "one of tensorboard, trackio, wandb, mlflow"
    assert (error.message, error.fix) == (
        f"`train.report_to[0]` must be {names}; it is `wand`",
        "did you mean `wandb`?",
    )


def test_a_tracker_of_a_plugin_that_is_not_there_is_told_by_its_plugin(
    tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(installed().left_out, "made", FACE)
    monkeypatch.setitem(installed().broken, "made", "no module `made`")
    with pytest.raises(SpecError) as caught:
        load_spec(spec_file(tmp_path, tiny_tokenizer_dir, {"report_to": ["made"]}))
    told = "it belongs to the plugin `made`, which cannot be used (no module `made`): pip install made"
    assert [error.fix for error in caught.value.diagnostics] == [told] == [missing("trackers", "made")]


def test_the_old_key_is_named(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(spec_file(tmp_path, tiny_tokenizer_dir, {"report": ["wandb"]}))
    assert [error.fix for error in caught.value.diagnostics] == ["did you mean `report_to`?"]


def test_a_tracker_of_another_package_is_named_in_a_spec_and_read(
    tmp_path: Path, tiny_tokenizer_dir: Path, tracker: type[Tracker]
) -> None:
    train: dict[str, object] = {"report_to": ["made"], "tracking": {"group": "g"}}
    loaded = load_spec(spec_file(tmp_path, tiny_tokenizer_dir, train))
    assert [item for item in check_spec(loaded) if item.rule.startswith("report.")] == []
    MetricsLog(tmp_path)
    observer = observe(loaded, tmp_path)
    assert observer is not None
    observer.began()
    observer.stepped(1, {"loss": 0.5})
    observer.close()
    assert tracker.runs == {tmp_path.name: [(1, 0.5)]}


def test_only_a_spec_that_names_a_tracker_is_observed(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    train: dict[str, object] = {"report_to": ["tensorboard"], "tracking": {"name": "first"}}
    loaded = load_spec(spec_file(tmp_path, tiny_tokenizer_dir, train))
    assert observe in OBSERVE_TRAINING.all(written(loaded.spec))
    assert isinstance(observe(loaded, tmp_path), TrackedTraining)
    plain = load_spec(spec_file(tmp_path, tiny_tokenizer_dir, {"steps": 2}))
    assert observe not in OBSERVE_TRAINING.all(written(plain.spec))


@pytest.mark.usefixtures("tracker")
def test_packages_that_are_missing_are_worth_knowing(
    tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("tensorboard", "mlflow"):
        monkeypatch.setitem(sys.modules, package, None)
    file = spec_file(tmp_path, tiny_tokenizer_dir, {"report_to": ["tensorboard", "made", "mlflow"]})
    assert [(item.path, item.fix) for item in check_spec(load_spec(file)) if item.rule == "report.no-package"] == [
        (("train", "report_to", 0), "pip install 'episode-engine[tensorboard]'"),
        (("train", "report_to", 2), "pip install 'episode-engine[mlflow]'"),
    ]


def test_its_keys_may_change_at_a_resume_and_are_stored(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    assert {"train.report_to", "train.tracking.*"} <= {*resumable_keys()}
    loaded = load_spec(spec_file(tmp_path, tiny_tokenizer_dir, {"report_to": ["wandb"], "tracking": {"group": "g"}}))
    stored = read_stored(dump(loaded.spec), EpisodeSpec)
    assert stored.train is not None
    assert ReportSpec.section_of(stored.train) == ReportSpec(report_to=["wandb"], tracking=TrackingSpec(group="g"))
