"""Trainings whose episodes run on several drivers, on a real Ray, against a stand-in for SGLang's server.

Needs Ray (the extra `ray`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from trainings import begin_training
from written_specs import listener_spec, save_spec

from engine.spec.load import load_spec
from engine.store import RunStore
from engine.tokens.loading import load_format
from engine.train.batch_log import BatchLog
from engine.train.metrics import read_metrics
from engine.train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from fake_sglang import Call, FakeSGLang

pytest.importorskip("ray", reason="needs Ray: pip install 'episode-engine[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

SAME = ("step", "reward/mean", "episode/tokens", "tokens/trained", "staleness/max", "loss", "grad_norm", "lr")
LOAD = "/update_weights_from_disk"


class Replying(FakeSGLang):
    """Its replies depend on the prompt, and take 20 to 50 ms."""

    async def _generate(self, call: Call) -> None:
        number = zlib.crc32(call.prompt)
        whole = [5 + number % 40, 5 + number // 64 % 40, 5 + number // 4096 % 40, 2]
        self.latency = 0.02 + number % 30 / 1000
        ids = whole[: call.most]
        plain = call.reply

        def reply(**changes: Any) -> bytes:
            told = {
                "output_ids": ids,
                "output_token_logprobs": [[-0.5, token, None] for token in ids],
                "completion_tokens": len(ids),
                "weight_versions": [{"version": self.weight_version, "start": 0, "end": len(ids)}],
            }
            return plain(**(told | changes))

        call.reply = reply  # type: ignore[method-assign]
        await super()._generate(call)

    @property
    def loads(self) -> list[str]:
        """The versions that it was sent, in order."""
        return [body["weight_version"] for path, body in self.control if path == LOAD]


@pytest.fixture(autouse=True)
def _spec_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "core" / "train"))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("EPISODE_ENGINE_CACHE", str(tmp_path / "cache"))


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[tuple[Replying, str]]:
    from engine.schemas.model import ModelSpec

    server = Replying(output=[5, 6, 7, 2])
    server.tokenize = load_format(ModelSpec(path=str(model)), model).encode
    try:
        yield server, await server.start()
    finally:
        await server.stop()


def begin(folder: Path, model: Path, url: str, drivers: int, on_step: Any = None, **train: Any) -> Trainer:
    spec = {
        **listener_spec("driven", model),
        "backend": {"kind": "sglang", "urls": [url], "timeout": "20s", "wait": "20s"},
        "limits": {"turn_tokens": 6, "assistant_turns": 2, "episode_tokens": 96},
        "rewards": {"credit": {"method": "turn_return", "baseline": "none", "scale": "none"}},
        "rollout": {"samples_per_task": 2, "seed": 3, "concurrency": 8, "drivers": drivers},
        "train": {"device": "cpu", "steps": 4, "tasks_per_step": 2, "dynamic_sampling": False, "advantage_norm": "none",
                  "weight_sync": {"method": "disk"}, "checkpoints": {"every": 100}} | train,
    }  # fmt: skip
    path = save_spec(folder / f"driven{drivers}.yaml", spec)
    loaded = load_spec(path)
    return begin_training(loaded, folder / f"runs{drivers}", on_step=on_step)


def rows_of(trainer: Trainer) -> dict[str, Any]:
    """Tokens, weight versions and rewards of each episode of a training."""
    found: dict[str, Any] = {}
    with RunStore.open(trainer.folder / "rollouts", readonly=True) as store:
        for each in store.trajectories():
            assert each.episode_id not in found
            rows = [
                (row.input_ids.tolist(), row.loss_mask.tolist(), row.weight_versions.tolist()) for row in each.branches
            ]
            found[each.episode_id] = (each.seed, rows, each.outcome.rewards)
    return found


async def test_two_drivers_train_the_rows_of_one_process_and_each_version_is_pushed_once(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    trained: list[Any] = []
    for drivers in (1, 2):
        async with served(tiny_model_dir) as (server, url):
            trainer = begin(tmp_path, tiny_model_dir, url, drivers)
            result = await trainer.run()
            assert (result.steps, result.faults) == (4, [])
            assert server.loads == ["0", "1", "2", "3", "4"]
            lines = [{name: line.get(name) for name in SAME} for line in read_metrics(trainer.folder)]
            used = [record.used for record in BatchLog(trainer.folder).read()]
            trained.append((lines, used, rows_of(trainer)))
    assert trained[0] == trained[1]
    stores = sorted(path.parent.name for path in (tmp_path / "runs2").glob("*/rollouts/drivers/*/run.db"))
    assert stores == ["0", "1"]
    assert len(trained[1][2]) == 16


async def test_no_token_is_staler_than_the_bound_though_a_driver_is_killed(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow"  # the processes of drivers start slowly, as on a machine that has much to do
    slow.mkdir()
    (slow / "sitecustomize.py").write_text("import time\n\ntime.sleep(3)\n")
    monkeypatch.syspath_prepend(str(slow))
    monkeypatch.setattr("engine.plugins.drivers.run.MAX_DEATHS", 1)
    killed: list[int] = []
    trainer: Trainer

    def kill(step: int, values: Mapping[str, float]) -> None:
        steps: Any = trainer.source
        reports = steps._runner._fleet.reports
        if step in (3, 6) and reports:
            pid = reports[step % len(reports)]["pid"]
            if pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    async with served(tiny_model_dir) as (server, url):
        trainer = begin(
            tmp_path, tiny_model_dir, url, 2, on_step=kill, steps=10, tasks_per_step=3, asynchrony={"max_staleness": 2}
        )
        result = await trainer.run()
        assert (result.steps, result.faults) == (10, [])
        assert server.loads == [str(version) for version in range(11)]
    assert len(killed) >= 1
    lines = read_metrics(trainer.folder)
    assert all(line["episodes/count"] == 6 and line["staleness/max"] <= 2 for line in lines)
    assert max(line["staleness/max"] for line in lines) > 0
    used = [number for record in BatchLog(trainer.folder).read() for number in record.used]
    assert used == list(range(30))


@pytest.mark.exhaustive
async def test_a_training_goes_on_with_another_number_of_drivers(tmp_path: Path, tiny_model_dir: Path) -> None:
    async with served(tiny_model_dir) as (_, url):
        stop = asyncio.Event()
        trainer = begin(tmp_path, tiny_model_dir, url, 3, on_step=lambda step, values: step == 2 and stop.set())
        first = await trainer.run(stop=stop)
        assert (first.interrupted, first.steps) == (True, 2)
        for drivers, steps in ((2, 3), (1, 4)):
            loaded = load_spec(
                tmp_path / "driven3.yaml",
                [f"rollout.drivers={drivers}", f"train.steps={steps}", f"backend.urls=[{url}]"],
            )
            result = await Trainer(loaded, trainer.folder).run()
            assert (result.steps, result.faults, result.repeated_steps) == (steps, [], 0)
    used = [number for record in BatchLog(trainer.folder).read() for number in record.used]
    assert used == list(range(8))
    assert len(rows_of(trainer)) >= 16


@pytest.mark.exhaustive
async def test_the_command_stops_at_a_signal_and_is_resumed(tmp_path: Path, tiny_model_dir: Path) -> None:
    async with served(tiny_model_dir) as (server, url):
        trainer = begin(tmp_path, tiny_model_dir, url, 2, steps=40)  # for its spec and its folder
        path = os.pathsep.join(
            [str(Path(__file__).parents[2] / "core" / "train"), *filter(None, [os.environ.get("PYTHONPATH")])]
        )

        async def command(*more: str) -> asyncio.subprocess.Process:
            words = ["-m", "engine.cli.main", "train", "--resume", str(trainer.folder), "-q", *more]
            return await asyncio.create_subprocess_exec(sys.executable, *words, env={**os.environ, "PYTHONPATH": path})

        process = await command()
        metrics = trainer.folder / "metrics.jsonl"
        while process.returncode is None and not (metrics.is_file() and len(read_metrics(metrics)) >= 2):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 143
        done = len(read_metrics(trainer.folder))
        assert 2 <= done < 40
        again = await command("--set", f"train.steps={done + 2}")
        assert await again.wait() == 0
    used = [number for record in BatchLog(trainer.folder).read() for number in record.used]
    assert used == list(range(2 * (done + 2)))
    assert sorted({*map(int, server.loads)}) == list(range(done + 3))
    assert server.loads[-3:] == [str(version) for version in range(done, done + 3)]
