"""`engine run` and `engine eval` with `notify`: the notices that a command gets."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import engine_here
from written_specs import save_spec

from engine.plugins.notices.observers import RunNotices
from engine.runner.counters import RunCounters
from engine.runner.summary import RunSummary
from engine.spec.load import load_spec
from engine.store.header import RunHeader
from engine.store.store import RunStore
from engine.validate import check_spec

DOCS = Path(__file__).parents[3] / "docs"
SPEC: dict[str, Any] = {
    "spec": "episode/v1",
    "name": "noticed",
    "backend": {"kind": "scripted", "replies": ["It is 42."]},
    "tasks": {"source": "inline", "rows": [{"id": f"t{n}"} for n in range(3)], "id": "id"},
    "prompt": [{"role": "user", "content": "What is 17 plus 25?"}],
    "machine": "single_turn",
}


class Noticed:
    """A folder with a spec whose notices are written to a file."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder = folder
        self._model = {"path": str(tokenizer)}
        self._file = folder / "notices"

    def write(self, notify: dict[str, Any] | None = None, **changes: Any) -> Path:
        code = f"import sys; open({str(self._file)!r}, 'a').write(sys.stdin.read() + '\\n')"
        own = {"command": [sys.executable, "-c", code]} | (notify or {})
        return save_spec(self.folder / "spec.yaml", {**SPEC, "model": self._model, "notify": own, **changes})

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._file.read_text().splitlines()] if self._file.exists() else []


@pytest.fixture
def noticed(tmp_path: Path, tiny_tokenizer_dir: Path) -> Noticed:
    return Noticed(tmp_path, tiny_tokenizer_dir)


@pytest.mark.parametrize(("command", "what"), [("run", "run"), ("eval", "evaluation")])
def test_a_finished_run_sends_its_counts(command: str, what: str, noticed: Noticed) -> None:
    code, _, err = engine_here(command, noticed.write(), cwd=noticed.folder)
    assert code == 0, err
    (event,) = noticed.events
    del event["time"]
    run = event.pop("run")
    said = "3 episodes, 0 solved, mean reward 0.000"
    assert event == {
        "kind": "finished", "text": f"{run}: {what} finished: {said}", "reason": said,
        "episodes": 3, "solved": 0, "failed_episodes": 0, "mean_reward": 0.0,
    }  # fmt: skip


def test_a_finished_run_that_is_resumed_is_not_told_again(noticed: Noticed) -> None:
    engine_here("run", noticed.write(), cwd=noticed.folder)
    code, _, err = engine_here("run", "--resume", "latest", cwd=noticed.folder)
    assert code == 0, err
    assert [event["kind"] for event in noticed.events] == ["finished"]


@pytest.mark.parametrize("command", ["run", "eval"])
def test_a_run_that_stops_by_itself_sends_why(command: str, noticed: Noticed) -> None:
    (noticed.folder / "broken_world.py").write_text("def make():\n    raise OSError('no such board')\n")
    spec = noticed.write(environment={"use": "broken_world:make"})
    code, _, _ = engine_here(command, spec, cwd=noticed.folder)
    assert code == 3
    (event,) = noticed.events
    assert event["kind"] == "failed"
    assert "failed with one cause" in event["reason"]


def test_a_run_without_a_server_sends_why(noticed: Noticed) -> None:
    spec = noticed.write(backend={"kind": "sglang", "urls": ["http://127.0.0.1:9"], "wait": "1s"})
    code, _, _ = engine_here("run", spec, cwd=noticed.folder)
    assert code == 3
    (event,) = noticed.events
    assert (event["kind"], event["reason"].partition(":")[0]) == ("failed", "OutageError")


def test_a_budget_of_tokens_is_told_and_stops_nothing(noticed: Noticed) -> None:
    spec = noticed.write({"budget": {"tokens": 5}})
    code, out, err = engine_here("run", spec, cwd=noticed.folder)
    assert code == 0, err
    assert "3 episodes" in out
    assert [event["kind"] for event in noticed.events] == ["budget", "finished"]


def test_a_channel_that_cannot_work_is_an_error_before_the_first_episode(noticed: Noticed) -> None:
    code, _, err = engine_here("run", noticed.write({"webhook_env": "NO_SUCH_HOOK"}), cwd=noticed.folder)
    assert code == 1
    assert "the environment variable NO_SUCH_HOOK (notify.webhook_env) is not set" in err
    assert not list((noticed.folder / "runs").iterdir())


def test_a_channel_that_fails_does_not_change_the_run(noticed: Noticed) -> None:
    spec = noticed.write({"command": [sys.executable, "-c", "raise SystemExit('no network')"]})
    code, out, err = engine_here("run", spec, cwd=noticed.folder)
    assert code == 0, err
    assert "3 episodes" in out


def test_a_run_without_running_episodes_does_not_stall(noticed: Noticed) -> None:
    loaded = load_spec(noticed.write())
    with RunStore.create(noticed.folder / "runs", RunHeader.of(loaded)) as store:
        notices = RunNotices(loaded, store)
    for busy in (True, False):
        watch = notices.watch(RunCounters(total=1), RunSummary(), lambda busy=busy: busy)  # type: ignore[misc]
        watch.check()
        watch._last -= 1e9
        watch.check()
        assert watch._stall_sent is busy


def test_the_examples_of_the_page_are_valid(noticed: Noticed) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / "looking.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        whole = yaml.safe_load(noticed.write().read_text())
        del whole["notify"]
        path = noticed.folder / "spec.yaml"
        path.write_text(yaml.safe_dump(whole) + block)
        (noticed.folder / "my_package.py").write_text("def tell(event):\n    pass\n")
        problems = [
            str(item)
            for item in check_spec(load_spec(path))
            if item.rule.startswith(("notify", "code", "spec", "traces"))
        ]
        assert problems == []
