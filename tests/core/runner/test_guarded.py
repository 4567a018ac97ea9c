"""Rows whose bridges are wrong although their proof accepts them are refused by the guard, and what follows is rendered whole."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import code_for_tests as spec_code
import pytest
from chat_kit import COUNTING, PLAIN, make_tokenizer
from installed_commands import needs_command
from stopping import Resumed
from typer.testing import CliRunner

from engine.actions import generate
from engine.cli.main import app
from engine.errors import StoreError
from engine.runner.guarded import FILE
from engine.runner.replay import Replayer
from engine.schemas.journal import GenerationRecord
from engine.schemas.trajectory import Trajectory
from engine.store import RunStore
from engine.store.rows.export import export_rows
from engine.tokens.bridge import bridge as bridging
from engine.tokens.bridge import guard
from engine.tokens.bridge.check import BridgeVerdict
from engine.tokens.bridge.keys import TemplateKeys
from engine.tokens.jinja_template import JinjaSource

PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def each(content: str, before: str = "") -> str:
    """A template that writes a content for each message `m`."""
    message = "{{ '<|im_start|>' + m.role + '\\n' + CONTENT + '<|im_end|>\\n' }}".replace("CONTENT", content)
    return "{%- for m in messages %}" + before + message + "{% endfor %}" + PROMPT


REMINDED = "{%- set ns = namespace(asked=0) %}" + each(
    "m.content + (' Be brief.' if m.role == 'user' and ns.asked == 2 else '')",
    "{%- if m.role == 'user' %}{%- set ns.asked = ns.asked + 1 %}{% endif %}",
)
"""Adds a reminder to the second message of a user."""
CUT = each("m.content[:40]")
"""Cuts long messages."""
MARKED = each("(m.content + ' (a number)' if '17' in m.content else m.content)")
"""Marks messages that have a number."""
KIND = "{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}"
MOOD = "{%- if 'please' in messages[-1].content %}" + KIND + "{% endif %}" + each("m.content")
"""Its first line depends on words of the newest message."""
ANSWERED = each("m.content").replace("assistant\\n'", "assistant\\nAnswer: '")
"""Its generation prompt has words that history is shown without."""
REPLIES = ["no", "it is 17, or what the second line of the table says, please", "no"]
HOSTILE = {
    "counting": (COUNTING, "5 messages", "before the first message"),
    "reminded": (REMINDED, "Be brief.", "after message 4 (`user`)"),
    "cut": (CUT, "<|im_end|>", "message 3 (`assistant`)"),
    "marked": (MARKED, " (a number)", "after message 3 (`assistant`)"),
    "mood": (MOOD, "Be kind.", "before the first message"),
    "answered": (ANSWERED, "no", "message 1 (`assistant`)"),
}
"""Templates, what they write where the row has something else, and where that is."""


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof that accepts every bridge, of templates in which nothing is seen that it could not tell."""
    monkeypatch.setattr(JinjaSource, "keys", TemplateKeys())
    monkeypatch.setattr(bridging, "check_bridge", lambda *_: BridgeVerdict(True, False, history=True))


@pytest.fixture
def hostile(make_spec: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A spec with three episodes, one after the other, on a template."""

    def make(template: str, **changes: Any) -> Path:
        folder = make_tokenizer(tmp_path / "tokenizer", template)
        base: dict[str, Any] = {
            "model": {"path": str(folder)},
            "tools": [],
            "tasks": {"rows": [{"id": each} for each in "abc"]},
            "limits": {"user_turns": 2},
            "rollout": {"live_episodes": 1, "concurrency": 1},
        }
        return make_spec(REPLIES, **(base | changes))

    return make


def written(form: Any, trajectory: Trajectory, branch: int) -> str:
    """What transformers writes for the conversation before a branch's last reply."""
    last = max(turn.index for turn in trajectory.turns if turn.branch == branch)
    replies = [at for at, message in enumerate(trajectory.messages) if message.role == "assistant"]
    shown = [{"role": each.role, "content": each.text} for each in trajectory.messages[: replies[last]]]
    return str(form.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True))


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_bridge_that_its_proof_accepts_wrongly_is_refused_and_the_next_episodes_are_right(
    name: str, hostile: Any, run_spec: Any
) -> None:
    template, text, place = HOSTILE[name]
    ran = await run_spec(hostile(template))
    first, *others = (ran.trajectories[f"{each}/0"] for each in "abc")
    failure = first.outcome.failure
    assert (failure.kind, failure.blame, first.outcome.trainable) == ("bridge_differs", "engine", False)
    assert text in failure.message
    assert place in failure.message
    assert not ran.result.faults
    for trajectory in others:
        assert trajectory.outcome.failure is None
        assert trajectory.outcome.trainable
        for branch in trajectory.branches:
            start = max(span.start for span in branch.spans if span.kind == "generated")
            assert ran.template.decode(branch.input_ids[:start]) == written(ran.template, trajectory, branch.index)
    rows = {(row["episode_id"], row["trainable"]) for row in export_rows(ran.store)}
    assert rows == {("a/0", False), ("b/0", True), ("c/0", True)}
    assert json.loads((ran.store.folder / FILE).read_text())["reason"].startswith("a/0, branch 0, token ")
    replayer = Replayer(ran.loaded, ran.template, ran.store)
    for trajectory in ran.trajectories.values():
        assert (await replayer.check(trajectory, ran.store.task(trajectory.task_id))).difference is None
    replayer.close()


@pytest.mark.usefixtures("blind")
async def test_a_resume_renders_whole_from_its_first_prompt_and_repairs_what_was_refused(
    hostile: Any, tmp_path: Path
) -> None:
    path = hostile(REMINDED)
    await Resumed(path).run(tmp_path / "runs")
    again = Resumed(path)
    with RunStore.open(next((tmp_path / "runs").iterdir())) as store:
        assert await store.begin_again(["engine"]) == ["a/0"]
    assert again.template.bridges.whole is None
    result = await again.run(tmp_path / "runs")
    assert again.template.bridges.whole is not None
    assert result.summary.trainable == 3
    assert await again.differences(tmp_path / "runs") == []


@pytest.mark.usefixtures("blind")
async def test_export_names_the_reason(hostile: Any, run_spec: Any, tmp_path: Path) -> None:
    ran = await run_spec(hostile(REMINDED))
    folder = str(ran.store.folder)
    told = CliRunner().invoke(app, ["export", folder, "-o", str(tmp_path / "rows.jsonl")])
    assert "1 of them are not trainable, because the guard refused them: bridge_differs 1" in told.output
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["outcome"]["failure"] and row["outcome"]["failure"]["kind"] for row in rows] == [
        "bridge_differs",
        None,
        None,
    ]


@needs_command("show")
@pytest.mark.usefixtures("blind")
async def test_show_names_the_reason(hostile: Any, run_spec: Any) -> None:
    folder = str((await run_spec(hostile(REMINDED))).store.folder)
    listed = CliRunner().invoke(app, ["show", folder])
    assert "1 × bridge_differs (engine): branch 0, token " in listed.output
    shown = CliRunner().invoke(app, ["show", folder, "a/0"])
    assert "not trainable" in shown.output
    assert "Failed in DONE at turn 2: bridge_differs" in shown.output


def ways(store: RunStore) -> list[bool]:
    """By turn of the first episode: whether its prompt was rendered whole."""
    records = [entry.record for entry in store.journal("a/0")]
    return [record.whole for record in records if isinstance(record, GenerationRecord)]


@pytest.mark.usefixtures("blind")
async def test_a_switch_in_the_middle_of_an_episode_is_replayed_where_it_was(hostile: Any, tmp_path: Path) -> None:
    resumed = Resumed(hostile(REMINDED, tasks={"rows": [{"id": "a"}]}))

    def switch() -> None:
        if spec_code.CALLS["asked"] == 2:
            resumed.template.bridges.whole = "a test"

    spec_code.ON_CALL.append(switch)
    await resumed.run(tmp_path / "runs")
    with resumed.store(tmp_path / "runs") as store:
        assert ways(store) == [False, False, True]
        assert next(store.trajectories()).outcome.trainable
    for way in (None, "a test"):
        resumed.template.bridges.whole = way
        assert await resumed.differences(tmp_path / "runs") == []


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("way", [None, "a test"])
@pytest.mark.parametrize("commit", [6, 8])
async def test_turns_are_restored_in_the_way_in_which_they_were_made(
    way: str | None, commit: int, hostile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "LONG_TEXT", 0)  # every prompt is made ahead, in a thread
    resumed = Resumed(hostile(REMINDED, tasks={"rows": [{"id": "a"}]}))
    other = None if way else "a test"
    resumed.template.bridges.whole = way
    assert await resumed.starved(tmp_path / "runs", commit)
    resumed.template.bridges.whole = other
    await resumed.run(tmp_path / "runs")
    with resumed.store(tmp_path / "runs") as store:
        assert ways(store)[1:] == [way is not None, (other if commit == 6 else way) is not None]
    for replayed in (way, other):
        resumed.template.bridges.whole = replayed
        assert await resumed.differences(tmp_path / "runs") == []


async def test_what_a_damaged_note_means_is_said(hostile: Any, tmp_path: Path) -> None:
    resumed = Resumed(hostile(PLAIN))
    await resumed.run(tmp_path / "runs")
    (next((tmp_path / "runs").iterdir()) / FILE).write_text("{")
    with pytest.raises(StoreError, match="is damaged"):
        await resumed.run(tmp_path / "runs")


# --- the child -----------------------------------------------------------------------------------------------------------


async def killed(times: int) -> None:
    """Kill the guard's process as often as it is there."""
    last = 0
    while times:
        asking = guard._current
        if asking is not None and (child := asking.child) is not None and child.process.pid != last:
            last, times = child.process.pid, times - 1
            os.kill(last, signal.SIGKILL)
        await asyncio.sleep(0)


@pytest.mark.parametrize("times", [2, 1_000_000])
async def test_a_run_whose_guard_is_killed_ends_and_hands_nothing_over_unchecked(
    times: int, hostile: Any, run_spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_current", None)
    killing = asyncio.create_task(killed(times))
    ran = await run_spec(hostile(PLAIN, rollout={"live_episodes": 3, "concurrency": 3}))
    killing.cancel()
    found = [each.outcome for each in ran.trajectories.values()]
    assert len(found) == 3
    assert not ran.result.faults
    if times == 2:
        assert all(outcome.trainable for outcome in found)
    else:
        kinds = {(outcome.failure.kind, outcome.failure.blame) for outcome in found}
        assert kinds == {("unguarded", "engine")}
        assert all("killed by signal 9" in outcome.failure.message for outcome in found)
        assert not any(row["trainable"] for row in export_rows(ran.store))
    replayer = Replayer(ran.loaded, ran.template, ran.store)
    for trajectory in ran.trajectories.values():
        assert (await replayer.check(trajectory, ran.store.task(trajectory.task_id))).difference is None
    replayer.close()


async def test_a_run_that_is_stopped_while_its_guard_hangs_loses_nothing(
    hostile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.store.journal.PATIENCE", 0.01)
    monkeypatch.setattr(guard, "_current", None)
    resumed = Resumed(hostile(PLAIN, tasks={"rows": [{"id": "a"}]}))
    running = asyncio.create_task(resumed.run(tmp_path / "runs"))
    child = None
    while child is None:
        child = None if guard._current is None else guard._current.child
        await asyncio.sleep(0)
    os.kill(child.process.pid, signal.SIGSTOP)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    asked = spec_code.CALLS["asked"]
    with resumed.store(tmp_path / "runs") as store:
        assert not list(store.trajectories())
        assert len(ways(store)) == 3
    os.kill(child.process.pid, signal.SIGCONT)
    result = await resumed.run(tmp_path / "runs")
    assert result.summary.trainable == 1
    assert spec_code.CALLS["asked"] == asked
    assert await resumed.differences(tmp_path / "runs") == []
