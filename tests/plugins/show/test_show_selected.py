"""`engine show`: choosing and sorting episodes, JSON, tokens, attempts, task fields, facts, judge and images."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from command_line import engine_here
from journals import write_entries, write_result
from listing_kit import begin, ended, fill, new_run
from PIL import Image
from store_kit import make_header, make_task

from engine.schemas.journal import JournalEntry, ScoreRecord
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent
from engine.store.training import begin as begin_training
from engine.train.batch_log import BatchLog, BatchRecord
from engine.train.metrics import MetricsLog

RUN = "run-20260101-000000-abcd"
TRAINING = "demo-train-20260101-000000-abcd"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The index of episodes in a folder of its own."""
    monkeypatch.setenv("EPISODE_ENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


async def judged(store: Any) -> None:
    """Task t9: a picture, and a judge's words."""
    buffer = BytesIO()
    Image.new("RGB", (8, 6), "red").save(buffer, format="PNG")
    begun = await store.begin(make_task(9, question="what colour?", answer="red", notes={"a": [1, 2]}), 0)
    picture = await store.put_image(buffer.getvalue())
    made = replace(ended(5, 0), task_id="t9", episode_id="t9/0")
    made = replace(
        made, messages=[Message(role="user", content=[picture]), *made.messages], facts={"tries": 3, "seen": "r\ned"}
    )
    event = RewardEvent(turn=1, name="judge", value=0.7, cause="the judge gave 7", source="judge")
    record = ScoreRecord(rewards=[event], replies=["Well said.\nScore: 7"])
    entry = JournalEntry(seq=0, state="DONE", event="", dest="DONE", record=record, at=1.0, seconds=0.1)
    await write_entries(begun, entry)
    await write_result(begun, made)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, and a training that is newer."""
    folder = tmp_path_factory.mktemp("work")

    async def make() -> None:
        with new_run(folder / "runs") as store:
            await fill(store, 3, 2)
            await judged(store)
            await store.begin_again(["tool"])
            await begin(store, 11, 4)
        training = begin_training(folder / "runs", make_header(TRAINING, spec={"train": {"steps": 5}}, created=9e9))
        with new_run(training, "rollouts") as store:
            await fill(store, 3, 1)
        with new_run(training / "evals", "step-000002", evaluation=True) as store:
            await fill(store, 2, 1, first=1)
        log = BatchLog(training)
        for step in (1, 2):
            log.append(BatchRecord(step, step, [step], [], [], {str(step): f"t{step}"}))
        metrics = MetricsLog(training)
        metrics.write(1, {"reward/mean": 0.25})
        metrics.write(2, {"reward/mean": 0.5, "eval/reward": 0.75})

    asyncio.run(make())
    return folder


def show(work: Path, *words: str) -> tuple[list[str], str]:
    """Lines of stdout with single spaces, without rules; and stderr."""
    code, out, err = engine_here("show", *words, cwd=work)
    assert code == (2 if err else 0), err
    return [" ".join(line.split()) for line in out.splitlines() if line.strip() and "──" not in line], err


def listed(work: Path, *words: str) -> list[str]:
    return [line.split()[0] for line in show(work, RUN, *words)[0] if line[0] == "t" and "/" in line.split()[0]]


def test_episodes_are_chosen_and_sorted(work: Path) -> None:
    assert listed(work) == ["t0/0", "t0/1", "t1/0", "t1/1", "t2/0", "t2/1", "t9/0", "t11/0"]
    assert listed(work, "--filter", "outcome.solved") == ["t2/0", "t2/1", "t9/0"]
    assert listed(work, "--filter", "outcome.solved", "--sort", "-reward", "--limit", "2") == ["t9/0", "t2/1"]
    assert listed(work, "--text", "WHAT COLOUR") == []
    assert listed(work, "--text", "äpfel", "--sort", "reward:answer") == ["t1/0", "t1/1", "t2/0", "t2/1", "t9/0"]
    assert listed(work, "--filter", 'episode.status == "pending" && task.level == "easy"') == ["t0/0", "t0/1"]
    assert listed(work, "--failed") == []


def test_each_reward_has_a_column(work: Path) -> None:
    lines, _ = show(work, RUN, "--filter", "outcome.solved")
    assert lines[1] == "episode ended turns tokens reward answer format version seconds"
    assert lines[2].rpartition(" ")[0] == "t2/0 solved 1 5 +1.000 +2.000 -1.000 2"
    assert "3 of 3 episodes done · mean reward 2.333 · 3 solved · 0 failed" in lines


def test_what_the_filter_has_no_value_for_is_counted(work: Path) -> None:
    lines, _ = show(work, RUN, "--filter", "facts.tries > 2")
    assert any(
        line.startswith("2 episodes are left out because the filter has no value for them: t2/0: ") for line in lines
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--filter", "outcome.rewrd > 1.0"], "did you mean"),
        (["--sort", "rewards"], "cannot sort by `rewards`"),
        (["--tokens"], "--tokens and --attempt need an EPISODE"),
        (["t9/0", "--filter", "true"], "--filter chooses episodes for the table"),
        (["t9/0", "--attempt", "2"], "t9/0 has 1 attempt; give --attempt 1 to 1"),
        (["--score", "x", "--json"], "leave out --score"),
    ],
)  # fmt: skip
def test_wrong_options_say_what_to_write(work: Path, words: list[str], message: str) -> None:
    _, err = show(work, RUN, *words)
    assert message in err.lower() or message in err


def test_the_list_is_json(work: Path) -> None:
    code, out, _ = engine_here("show", RUN, "--filter", "outcome.limit != ''", "--json", cwd=work)
    found = json.loads(out)
    assert (code, found["total"], [row["episode"] for row in found["rows"]]) == (0, 2, ["t1/0", "t1/1"])
    assert [cause["limit"] for cause in found["causes"]] == ["assistant_turns"]
    assert found["rows"][0]["task_fields"] == {"level": "hard", "answer": "1"}


def test_an_episode_has_its_task_facts_judge_and_image_file(work: Path, cache: Path) -> None:
    lines, _ = show(work, RUN, "t9/0")
    at = lines.index("task")
    assert lines[at : at + 4] == ["task", "question: what colour?", "answer: red", 'notes: {"a":[1,2]}']
    at = lines.index("facts")
    assert lines[at : at + 4] == ["facts", "tries: 3", "seen: r", "ed"]
    at = lines.index("judge")
    assert lines[at : at + 4] == ["judge", "Well said.", "Score: 7", "judge: judge +0.700 on turn 1 · the judge gave 7"]
    (image,) = [line for line in lines if line.startswith("[image sha256:")]
    file = Path(image.rpartition("] ")[2])
    assert file.parent == cache / "view" / "images"
    assert Image.open(file).size == (8, 6)


def test_an_episode_and_its_tokens_are_json(work: Path) -> None:
    code, out, _ = engine_here("show", RUN, "t9/0", "--json", "--tokens", cwd=work)
    document = json.loads(out)
    assert (code, document["episode"], document["task"]["fields"]["answer"]) == (0, "t9/0", "red")
    assert [branch["mask"] for branch in document["tokens"]] == [[0, 0, 0, 0, 1, 1, 1, 1, 1, 0]] * 2
    assert [branch["versions"][4] for branch in document["tokens"]] == [2, 2]


def test_tokens_have_a_line_each(work: Path) -> None:
    lines, _ = show(work, RUN, "t9/0", "--tokens")
    at = lines.index("Branch 1: 10 tokens")
    assert lines[at + 1] == "# turn mask id token log-prob advantage version"
    assert lines[at + 2] == "0–3 0 prompt"
    cells = [line.split() for line in lines[at + 3 : at + 8]]
    assert [(each[0], each[1], each[2], each[-1]) for each in cells] == [(str(at), "1", "1", "2") for at in range(4, 9)]
    assert lines[at + 8] == "9 0 closing"


def test_earlier_attempts_and_unfinished_episodes_have_steps(work: Path) -> None:
    lines, _ = show(work, RUN, "t0/0", "--attempt", "1")
    assert lines[:4] == ["t0/0 · attempt 1 of 2 · 1 step", "task", "level: easy", "answer: 0"]
    assert lines[5].startswith("0 GENERATING failed DONE 0.50 tool_timeout (tool)")
    assert show(work, RUN, "t11/0")[0][0] == "t11/0 · broken off · 4 steps so far"
    lines, _ = show(work, RUN, "t11/0", "--tokens")
    assert "Sampled tokens: 32 tokens" in lines


def test_latest_is_a_training_with_its_episodes(work: Path) -> None:
    lines, _ = show(work, "latest")
    assert lines[0] == f"{TRAINING} · training · done · runs/{TRAINING}"
    assert lines[1] == "step 2 of 5 · reward 0.500"
    assert lines[2] == f"evaluation after step 2: reward 0.750 · {TRAINING}/evals/step-000002"
    assert lines[3].startswith("episode step ended")
    assert [line.split()[:2] for line in lines[4:6]] == [["t2/0", "2"], ["t1/0", "1"]]
    assert lines[-1] == f"To show one: engine show {TRAINING} t0/0"
    assert show(work, TRAINING, "t2/0")[0][0].startswith("t2/0 · solved")
    assert show(work, f"{TRAINING}/evals/step-000002", "t1")[0][0].startswith("t1/0 · limit: assistant_turns")
    chosen = show(work, "latest", "--filter", "run.evaluation")[0]
    assert [line.split()[1] for line in chosen if line.startswith("evals/step-000002 t")] == [
        "t1/0",
        "t2/0",
    ]
