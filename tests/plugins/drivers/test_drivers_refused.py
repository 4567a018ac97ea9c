"""What several drivers cannot do is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import engine_here
from written_specs import save_spec, scripted_spec

from engine.backends.registry import open_backend
from engine.errors import EngineError, SpecError
from engine.plugins.drivers.leases import Leases
from engine.plugins.drivers.processes import DriverProcesses
from engine.plugins.drivers.rules import number_of_drivers
from engine.plugins.drivers.shards import create_shards
from engine.plugins.replay.command import fork
from engine.runner.processes import processes_of
from engine.runner.runner import Runner
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore
from engine.tokens.loading import load_format
from engine.validate.check import check_spec


@pytest.fixture
def spec(tmp_path: Path, tiny_tokenizer_dir: Path) -> Path:
    return save_spec(
        tmp_path / "spec.yaml",
        {
            **scripted_spec("many", tiny_tokenizer_dir, ["Four."], [{"id": "a"}], ask="What is 2 plus 2?"),
            "machine": "tools",
        },
    )


def found(spec: Path, *changes: str) -> list[tuple[str, str]]:
    return [(each.rule, each.message) for each in check_spec(load_spec(spec, list(changes))) if "rollout." in each.rule]


def test_more_drivers_than_places(spec: Path) -> None:
    assert found(spec, "rollout.drivers=4", "rollout.concurrency=4") == []
    assert found(spec, "rollout.drivers=4", "rollout.concurrency=3") == [
        ("rollout.drivers", "4 drivers share 3 places (`concurrency`, `live_episodes`)")
    ]


def test_weights_in_the_process(spec: Path) -> None:
    assert ("rollout.drivers", "each driver would load a copy of the weights") in found(
        spec, "rollout.drivers=2", "backend={kind: local}"
    )


def test_servers_that_the_run_starts(spec: Path) -> None:
    assert ("rollout.drivers", "each driver would start servers of its own") in found(
        spec, "rollout.drivers=2", "backend={kind: sglang, launch: {gpus: 0}}"
    )


def test_shards_of_one_driver(spec: Path) -> None:
    assert found(spec, "rollout.shards=/tmp/shards") == [
        ("rollout.shards", "`shards` has no effect with one driver: its rows stay in the run's store")
    ]


def test_a_service_of_episodes_has_one_process(spec: Path) -> None:
    status, _, errors = engine_here("serve", "--api", spec, "--set", "rollout.drivers=2", cwd=spec.parent)
    assert status == 1
    assert "`engine serve --api` does not support several drivers; `engine run`, `engine eval`," in errors
    assert not list((spec.parent / "runs").glob("*/run.db"))


def test_a_service_of_groups_publishes_no_shards(spec: Path) -> None:
    changes = ["--set", "rollout.drivers=2", "--set", "rollout.shards=shards"]
    status, _, errors = engine_here("serve", spec, *changes, cwd=spec.parent)
    assert status == 1
    assert "a service publishes no shards; its drivers run on its machine" in errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train={lora: {rank: 2}, weight_sync: {method: adapter}}", "`adapter` is not supported with several drivers"),
        ("train={colocate: true}", "`colocate` is not supported with several drivers"),
        ("rollout.shards=/tmp/shards", "a training publishes no shards; its drivers run on the trainer's machine"),
        ("train={kind: sft, data: {path: rows.jsonl}}", "a training on written episodes samples none"),
    ],
)
def test_what_a_training_with_drivers_cannot_do(spec: Path, change: str, message: str) -> None:
    changes = ["backend={kind: sglang, urls: ['http://127.0.0.1:9']}", "train={}", change, "rollout.drivers=2"]
    loaded = load_spec(spec, changes)
    with pytest.raises(SpecError) as caught:
        DriverProcesses(loaded).refuse_training()
    assert message in str(caught.value)


def test_a_training_in_the_trainers_process_is_not_shared_by_drivers(spec: Path) -> None:
    words = ["--set", "backend={kind: local}", "--set", "train={}", "--set", "rollout.drivers=2"]
    status, _, errors = engine_here("train", spec, *words, cwd=spec.parent)
    assert status == 1
    assert "each driver would load a copy of the weights" in errors
    assert "use a backend with servers (`kind: sglang`, `kind: vllm`), or set `rollout.drivers: 1`" in errors


def test_a_runner_in_one_process(spec: Path) -> None:
    loaded = load_spec(spec, ["rollout.drivers=2"])
    form = load_format(loaded.spec.model, loaded.base)
    with RunStore.create(spec.parent, RunHeader.of(loaded)) as store, pytest.raises(SpecError) as caught:
        Runner(loaded, load_tasks(loaded), form, open_backend(loaded, form), store)
    assert "`Runner`, which runs in one process, does not support several drivers" in str(caught.value)
    assert "spec.yaml" in str(caught.value) or "--set rollout.drivers=2" in str(caught.value)


def sharded(spec: Path, *changes: str) -> Path:
    """The folder of a run that drivers have begun."""
    loaded = load_spec(spec, list(changes))
    with RunStore.create(spec.parent / "runs", RunHeader.of(loaded)) as store:
        create_shards(store.folder, store.header)
    return store.folder


def test_a_fork_of_a_run_of_several_drivers(spec: Path) -> None:
    for folder, words in (
        (sharded(spec), "is a run of several drivers; forks of such runs are not supported"),
        (sharded(spec, "rollout.drivers=2"), "a fork does not support several drivers"),
    ):
        with RunStore.open(folder, readonly=True) as source, pytest.raises(EngineError, match=words):
            fork(source, spec.parent / "forks", 0, 1)
    assert not (spec.parent / "forks").exists()


def test_a_resume_of_several_drivers_does_not_retry(spec: Path) -> None:
    for folder in (sharded(spec), sharded(spec, "rollout.drivers=2")):
        status, _, errors = engine_here(
            "run", "--resume", folder, "--set", "rollout.drivers=1", "--retry-failed", "all", cwd=spec.parent
        )
        assert status == 1
        assert "--retry-failed is not supported in a run with several drivers: leave it out" in errors


def test_a_service_does_not_continue_a_run_of_drivers(spec: Path) -> None:
    folder = sharded(spec)
    Leases(folder / "leases.db", 1).close()
    status, _, errors = engine_here("serve", "--resume", folder, cwd=spec.parent)
    assert status == 1
    assert f"{folder} is a run of several drivers: `engine run --resume` continues it" in errors
    assert (folder / "sharded.json").is_file()


def test_a_run_of_one_process_is_not_continued_by_several(spec: Path) -> None:
    assert engine_here("run", spec, "-q", cwd=spec.parent)[0] == 0
    status, _, errors = engine_here("run", "--resume", "latest", "--set", "rollout.drivers=2", cwd=spec.parent)
    assert status == 1
    assert "was begun by one process, and is continued by one: leave out `rollout.drivers`" in errors


@pytest.mark.parametrize(
    ("changes", "drivers"),
    [
        (["rollout.concurrency=1024"], 1),
        (["rollout.concurrency=1025"], 2),
        (["rollout.concurrency=8192"], 3),
        (["rollout.concurrency=8192", "rollout.live_episodes=2"], 1),
        (["rollout.concurrency=8192", "backend={kind: local}"], 1),
        (["rollout.concurrency=8192", "train={colocate: true}"], 1),
    ],
)
def test_auto_picks_drivers_by_slots_and_cores_where_nothing_needs_one_process(
    spec: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], drivers: int
) -> None:
    pytest.importorskip("ray", reason="without Ray it is always 1")
    monkeypatch.setenv("EPISODE_ENGINE_PROCESSES", "3")
    assert number_of_drivers(load_spec(spec, ["rollout.drivers=auto", *changes]).spec) == drivers
    assert not [rule for rule, _ in found(spec, "rollout.drivers=auto", *changes) if rule == "rollout.drivers"]


def test_auto_does_with_one_process_where_several_are_not_supported(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPISODE_ENGINE_PROCESSES", "3")
    loaded = load_spec(spec, ["rollout.drivers=auto", "rollout.concurrency=8192"])
    form = load_format(loaded.spec.model, loaded.base)
    with RunStore.create(spec.parent, RunHeader.of(loaded)) as store:
        Runner(loaded, load_tasks(loaded), form, open_backend(loaded, form), store)


def test_auto_continues_a_run_of_one_process_with_one(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="without Ray it is always one")
    monkeypatch.setenv("EPISODE_ENGINE_PROCESSES", "3")
    assert engine_here("run", spec, "-q", "--set", "rollout.concurrency=8192", cwd=spec.parent)[0] == 0
    (folder,) = (spec.parent / "runs").iterdir()
    loaded = load_spec(spec, ["rollout.drivers=auto", "rollout.concurrency=8192"])
    assert processes_of(loaded) is not None
    assert processes_of(loaded, folder) is None
    status, _, errors = engine_here("run", "--resume", folder, "--set", "rollout.drivers=auto", cwd=spec.parent)
    assert (status, (folder / "sharded.json").exists()) == (0, False), errors


def test_without_ray_the_command_says_what_to_install(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    status, _, errors = engine_here("run", spec, "--set", "rollout.drivers=2", cwd=spec.parent)
    assert status == 1
    assert (
        "`rollout.drivers` needs Ray: pip install 'episode-engine[ray]', or run one driver (--set rollout.drivers=1)"
        in errors
    )
