"""The engine itself as a subject of rollout.py: a spec with the SGLang backend, driven by the runner, journal on.

What is measured is a run as `engine run` does it, from its first episode to its last: reset, prompt, requests, checks,
the reply read, the tool called, every step written down and committed, limits, trajectory. Each task is sampled eight
times, as a group is in training. Opening the spec, the tokenizer and the store is not part of it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import structlog
from floor import OBSERVATION, PROBLEM, QUESTION

SAMPLES = 8
"""Episodes of one task."""
SAID = OBSERVATION.partition("<tool_response>\n")[2].partition("\n</tool_response>")[0]


async def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: What to work out.
    """
    return SAID.format(expression, 422)


class Engine:
    """One spec against one server; a run for each measurement.

    Args:
        url: The server's.
        model: A folder with a tokenizer, or a name of the catalogue.
        turns: Turns of an episode: it ends by the limit on them.
        prompt: How many tokens a prompt has, about.
        images: Files of images that the prompt shows.
        backend: More keys of the spec's backend.
    """

    def __init__(
        self,
        url: str,
        model: str,
        turns: int,
        *,
        prompt: int = 347,
        images: Sequence[str] = (),
        backend: dict[str, Any] | None = None,
    ) -> None:
        self._backend = {"kind": "sglang", "urls": [url], **(backend or {})}
        self.stored = 0
        """Bytes of the newest run's folder at its end."""
        self._folder = Path(tempfile.mkdtemp(prefix="bench-rollout-"))
        self._model = str(Path(model).resolve()) if Path(model).exists() else model
        self._turns = turns
        rest = 260 if self._knows_tools() else 110  # the tool's schema, where the template shows it
        self._filler = PROBLEM.format(a=17, b=25, c=3) * max(0, (prompt - rest) // 24 + 1)
        self._images = [{"type": "image", "image": path} for path in images]
        self._format: Any = None

    def _spec(self, tasks: int, concurrency: int, live: int | None) -> Path:
        import yaml

        text = {"type": "text", "text": self._filler + "This is shop {{id}}."}
        spec = {
            "spec": "episode/v1",
            "name": "bench",
            "model": {"path": self._model, "context": 1_000_000},
            "backend": self._backend,
            "sampling": {"temperature": 1.0, "max_new_tokens": 512},
            "tasks": {"source": "inline", "rows": [{"id": f"t{n}"} for n in range(tasks)], "id": "id"},
            "prompt": [
                {"role": "system", "content": QUESTION},
                {"role": "user", "content": [*self._images, text] if self._images else text["text"]},
            ],
            "tools": [{"use": "subject:calculate"}],
            "machine": "tools",
            "limits": {"assistant_turns": self._turns, "tool_calls": None, "turn_tokens": 512, "episode_tokens": None},
            "rollout": {"samples_per_task": SAMPLES, "concurrency": concurrency, "live_episodes": live},
        }
        if not self._knows_tools():
            spec["model"].update(tool_calls="hermes", tool_role="user")  # type: ignore[attr-defined]
        path = self._folder / "spec.yaml"
        path.write_text(yaml.safe_dump(spec))
        return path

    def _knows_tools(self) -> bool:
        """Whether the model's own template shows tools."""
        import json

        folder = Path(self._model)
        if not folder.exists():
            from engine.tokens.catalogue import resolve_model

            folder = resolve_model(self._model)
        template = folder / "chat_template.jinja"
        if template.exists():
            return "tools" in template.read_text()
        return "tools" in str(json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template"))

    async def run(
        self,
        episodes: int,
        concurrency: int,
        *,
        live: int | None = None,
        watch: AbstractContextManager[Any] = nullcontext(),  # noqa: B008  (it holds nothing)
    ) -> tuple[int, float, float]:
        """(turns taken, CPU seconds, wall seconds) of one run of so many episodes; a multiple of `SAMPLES`. `watch` is
        open meanwhile."""
        from engine.backends.registry import open_backend
        from engine.runner.runner import Runner
        from engine.spec.load import load_spec
        from engine.spec.tasks import load_tasks
        from engine.store import RunHeader, RunStore
        from engine.tokens.loading import load_format

        loaded = load_spec(self._spec(max(1, episodes // SAMPLES), concurrency, live))
        if self._format is None:
            self._format = load_format(loaded.spec.model, loaded.base)
        tasks = load_tasks(loaded)
        backend = open_backend(loaded, self._format)
        await backend.start()
        store = RunStore.create(self._folder / "runs", RunHeader.of(loaded))
        try:
            runner = Runner(loaded, tasks, self._format, backend, store)
            began, wall = time.process_time(), time.perf_counter()
            with watch:
                result = await runner.run()
            spent, took = time.process_time() - began, time.perf_counter() - wall
        finally:
            await backend.close()
            store.close()
            self.stored = sum(path.stat().st_size for path in (self._folder / "runs").rglob("*") if path.is_file())
            shutil.rmtree(self._folder / "runs", ignore_errors=True)
        done = len(tasks) * SAMPLES
        assert not result.faults, result.faults
        assert result.summary.outcomes == {"limit: assistant_turns": done}, result.summary.outcomes
        certificate = {"turns_checked": self._turns * done, "turns_unchecked": 0, "prompt_mismatches": 0}
        assert backend.stats()["certificate"] == certificate, backend.stats()
        return self._turns * done, spent, took

    def close(self) -> None:
        """Remove what it wrote."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _memory(field: str) -> float:
    """MB of this process, as Linux counts it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def main() -> None:
    """How many MB a run adds to this process at most: `subject.py URL MODEL TURNS EPISODES`."""
    url, model, turns, episodes = sys.argv[1:]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    engine = Engine(url, model, int(turns))
    asyncio.run(engine.run(SAMPLES, SAMPLES))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is the present from here on
    before = _memory("VmRSS")
    asyncio.run(engine.run(int(episodes), int(episodes), live=int(episodes)))
    engine.close()
    print(_memory("VmHWM") - before)


if __name__ == "__main__":
    main()
