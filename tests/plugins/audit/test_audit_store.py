"""Audited rows in a run store, and the command: tokens as they were, messages, rewards, other rewards, exit statuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from engine.cli.main import app
from engine.plugins.audit.audit import audit
from engine.plugins.audit.rows import ForeignRow
from engine.plugins.audit.store import store_rows
from engine.runner.replay import Replayer
from engine.schemas.model import ModelSpec
from engine.store import RunStore
from engine.tokens.template import ChatTemplate

PROMPT = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhat is 17 plus 25?<|im_end|>\n<|im_start|>assistant\n"
AFTER = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
PARTS = [("40?<|im_end|>", 1), (AFTER, 0), ("42.<|im_end|>", 1)]


@pytest.fixture
def model(tokenizer_dirs: dict[str, Path]) -> ModelSpec:
    return ModelSpec(path=str(tokenizer_dirs["plain"]), allow_special=True)


@pytest.fixture
def form(formats: Callable[..., ChatTemplate]) -> ChatTemplate:
    return formats("plain", allow_special=True)


def row_of(form: ChatTemplate, parts: list[tuple[str, int]], **keys: Any) -> ForeignRow:
    encoded = [(form.encode(text), trained) for text, trained in parts]
    ids = np.asarray([id_ for part, _ in encoded for id_ in part], np.int32)
    mask = np.asarray([trained for part, trained in encoded for _ in part], np.int32)
    size = len(ids)
    row = ForeignRow(
        place="file row 0",
        group="g",
        prompt_ids=np.asarray(form.encode(PROMPT), np.int32),
        response_ids=ids,
        loss_mask=mask,
        logprobs=-np.arange(1, size + 1, dtype=np.float32) / 8,
        versions=np.where(mask == 1, np.arange(size) // 4, -1).astype(np.int32),
        reward=1.0,
        finish="stop",
    )
    return replace(row, **keys)


def stored(rows: list[ForeignRow], form: ChatTemplate, model: ModelSpec, out: Path) -> RunStore:
    report, examined = audit(rows, "verl", form)
    store = asyncio.run(store_rows(examined, report, model, form, out))
    return RunStore.open(store.folder, readonly=True)


def test_a_row_is_stored_with_its_own_tokens_and_its_messages(
    form: ChatTemplate, model: ModelSpec, tmp_path: Path
) -> None:
    rewards = np.zeros(len(form.encode("40?<|im_end|>" + AFTER + "42.<|im_end|>")))
    rewards[[1, len(rewards) - 1]] = 0.25, 0.5
    row = row_of(
        form, PARTS, token_rewards=rewards, reward=0.75, fields={"step": 3, "object": object(), "list": np.arange(2)}
    )
    with stored([row], form, model, tmp_path) as store:
        (trajectory,) = store.trajectories()
        (branch,) = trajectory.branches
        start = len(row.prompt_ids)  # type: ignore[arg-type]
        assert branch.input_ids.tolist() == row.ids.tolist()
        assert branch.loss_mask[start:].tolist() == row.mask.tolist()
        trained = row.mask == 1
        np.testing.assert_array_equal(branch.logprobs[start:][trained], row.logprobs[trained])  # type: ignore[index]
        np.testing.assert_array_equal(branch.weight_versions[start:][trained], row.versions[trained])  # type: ignore[index]
        assert [(message.role, message.text) for message in trajectory.messages] == [
            ("user", "What is 17 plus 25?"),
            ("assistant", "40?"),
            ("user", "Sure?"),
            ("assistant", "42."),
        ]
        assert [turn.rewards for turn in trajectory.turns] == [{"reward": 0.25}, {"reward": 0.5}]
        assert [row.response_ids[turn.start - start : turn.end - start].tolist() for turn in trajectory.turns] == [  # type: ignore[index]
            form.encode("40?<|im_end|>"),
            form.encode("42.<|im_end|>"),
        ]
        assert trajectory.outcome.trainable
        assert trajectory.facts["findings"] == []
        assert trajectory.facts["fields"] == {"step": 3, "list": [0, 1]}
        assert trajectory.facts["left_out"] == ["object"]


def test_a_row_as_the_engine_writes_it_replays_to_the_same_bytes(
    form: ChatTemplate, model: ModelSpec, tmp_path: Path
) -> None:
    clean, bare = row_of(form, PARTS), row_of(form, [PARTS[0], (AFTER[1:], 0), PARTS[2]])
    with stored([clean, bare], form, model, tmp_path) as store:
        replayer = Replayer(store.header.loaded_spec(), form, store)
        found = [asyncio.run(replayer.check(each, store.task(each.task_id))) for each in store.trajectories()]
        replayer.close()
        facts = [trajectory.facts["findings"] for trajectory in store.trajectories()]
    assert found[0].difference is None
    assert found[1].difference is not None
    assert facts == [[], ["prompt_not_template"]]


def test_what_cannot_be_trained_is_stored_and_is_not_trainable(
    form: ChatTemplate, model: ModelSpec, tmp_path: Path
) -> None:
    row = row_of(form, PARTS)
    rows = [
        replace(row, logprobs=None),
        replace(row, excluded=True),
        replace(row, loss_mask=np.zeros_like(row.mask), reward=0.0),
        ForeignRow(place="line 1", prompt_text="17 + 25?", response_text="<|im_start|> 42.", reward=0.5),
        replace(row, logprobs=np.full(len(row.mask), np.nan, np.float32)),
    ]
    with stored(rows, form, model, tmp_path) as store:
        found = {trajectory.episode_id: trajectory for trajectory in store.trajectories()}
    assert [trajectory.outcome.trainable for trajectory in found.values()] == [False] * 5
    assert found["g/2"].outcome.failure is not None
    assert found["g/2"].outcome.failure.kind == "no_trained_token"
    texts = found["row-3/0"]
    assert [message.text for message in texts.messages] == ["17 + 25?", "<|im_start|> 42."]
    assert texts.outcome.reward == 0.5
    assert not texts.branches[0].loss_mask.any()


def test_messages_that_the_template_refuses_lose_no_token(
    formats: Callable[..., ChatTemplate], tokenizer_dirs: dict[str, Path], tmp_path: Path
) -> None:
    form = formats("alternating", allow_special=True)
    parts = [("40?<|im_end|>", 1), ("no form", 0), ("41<|im_end|>", 1), ("none either", 0), ("42.<|im_end|>", 1)]
    row = row_of(
        form,
        parts,
        prompt_ids=np.asarray(form.encode("no form at all"), np.int32),
        messages=[{"role": "assistant", "content": "x"}],
    )
    with stored([row], form, ModelSpec(path=str(tokenizer_dirs["alternating"]), allow_special=True), tmp_path) as store:
        (trajectory,) = store.trajectories()
    assert trajectory.branches[0].input_ids.tolist() == row.ids.tolist()
    assert len(trajectory.turns) == 3


@pytest.fixture
def rows_file(form: ChatTemplate, tmp_path: Path) -> Path:
    """Three rows of TRL: without a fault, with a trained observation, and without log-probs."""
    rows = [row_of(form, PARTS), row_of(form, [(text, 1) for text, _ in PARTS]), row_of(form, PARTS, logprobs=None)]
    lines = [
        {
            "prompt_ids": row.prompt_ids.tolist(),  # type: ignore[union-attr]
            "completion_ids": row.response_ids.tolist(),  # type: ignore[union-attr]
            "env_mask": row.mask.tolist(),
            **({} if row.logprobs is None else {"logprobs": row.logprobs.tolist()}),
            "reward": 1.0,
            "group": "a",
        }
        for row in rows
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["audit", *arguments])


def test_the_command_names_row_token_and_rule_and_exits_with_1(
    rows_file: Path, model: ModelSpec, form: ChatTemplate
) -> None:
    token = len(form.encode(PROMPT)) + len(form.encode("40?<|im_end|>\n"))
    done = run(str(rows_file), "--from", "trl", "--model", model.path)
    assert done.exit_code == 1
    assert f"rows.jsonl row 1 token {token}: error[observation_trained]" in done.stdout
    assert "3 rows of trl" in done.stdout
    told = json.loads(run(str(rows_file), "--from", "trl", "--model", model.path, "--json").stdout)
    assert told["counts"] == {
        "no_versions": {"info": 3},
        "observation_trained": {"error": 1},
        "closing_trained": {"error": 1},
    }
    (finding,) = [each for each in told["findings"] if each["rule"] == "observation_trained"]
    assert (finding["row"], finding["token"], finding["severity"]) == (1, token, "error")


def test_warnings_fail_only_if_that_is_asked_for(rows_file: Path, model: ModelSpec) -> None:
    lines = rows_file.read_text().splitlines()
    first = json.loads(lines[0])
    rows_file.write_text(json.dumps(first))
    assert run(str(rows_file), "--from", "trl", "--model", model.path).exit_code == 0
    first["env_mask"][first["completion_ids"].index(first["completion_ids"][-1])] = 0  # the first stop token
    rows_file.write_text(json.dumps(first))
    assert run(str(rows_file), "--from", "trl", "--model", model.path).exit_code == 0
    assert run(str(rows_file), "--from", "trl", "--model", model.path, "--strict").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.pt", "--from", "verl", "--model", "MODEL"], "none.pt cannot be read: No such file or directory"),
        (["ROWS", "--from", "slime", "--model", "MODEL"], "no `tokens`; it has completion_ids"),
        (["ROWS", "--from", "verl", "--model", "MODEL"], "rows.jsonl line 1: no `input`, `output`"),
        (
            ["ROWS", "--from", "trl", "--model", "MODEL", "--template-kwargs", "[1]"],
            "--template-kwargs must be a JSON object",
        ),
        (["ROWS", "--from", "trl", "--model", "MODEL", "--sampled", "none"], "none cannot be read"),
    ],
)
def test_what_cannot_be_read_exits_with_2(rows_file: Path, model: ModelSpec, arguments: list[str], words: str) -> None:
    done = run(*[{"ROWS": str(rows_file), "MODEL": model.path}.get(each, each) for each in arguments])
    assert done.exit_code == 2
    assert words in done.output


def test_stored_rows_are_scored_with_other_rewards(rows_file: Path, model: ModelSpec, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    told = json.loads(
        run(str(rows_file), "--from", "trl", "--model", model.path, "--store", "--out", str(out), "--json").stdout
    )
    other = tmp_path / "late.yaml"
    other.write_text(
        f"extends: {told['run']}/spec.yaml\n"
        "rewards:\n"
        "  reassign: [{at: DONE, when: turns.assistant > 1, op: add, name: late, turn: last, value: -0.25, cause: late}]\n"
        "  credit: {method: turn_return, gamma: 0.5}\n"
    )
    done = CliRunner().invoke(app, ["rescore", told["run"], "--spec", str(other)])
    assert "3 episodes scored as `late`: 2 changed, 0 failed" in done.output
    assert "\n  a/0: reward +1.000 -> +0.750\n" in done.output
    with RunStore.open(told["run"], readonly=True) as store:
        scores = {trajectory.episode_id: trajectory.outcome for trajectory in store.trajectories("late")}
    assert {id_: (outcome.reward, outcome.trainable) for id_, outcome in scores.items()} == {
        "a/0": (0.75, True),
        "a/1": (1.0, True),
        "a/2": (0.75, False),  # it has no log-probs, and other rewards do not change that
    }
