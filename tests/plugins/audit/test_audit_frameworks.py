"""Files that the frameworks' own code wrote (`scripts/audit_rows.py`, in tests/plugins/audit/data), read back token by token.

The scripted sampler that made them recorded every reply, so what a file trains can be compared with what was sampled.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from engine.plugins.audit.audit import audit, read_rows, read_sampled
from engine.plugins.audit.rows import ForeignRow, runs_of
from engine.schemas.model import ModelSpec
from engine.tokens.loading import load_format

DATA = Path(__file__).parent / "data"
TOKENIZERS = os.environ.get("EPISODE_ENGINE_TOKENIZERS", "")
FILES = {
    "verl_single.pkl": "verl",
    "trl_tools.pt": "trl",
    "slime_search.pt": "slime",
    "skyrl_turns.pkl": "skyrl",
    "skyrl_batch.pkl": "skyrl",
    "areal_turns.pt": "areal",
}
VERSIONS = {"verl_single.pkl": {(3,)}, "slime_search.pt": {(3, 4)}}


def recorded(name: str) -> list[list[int]]:
    return [ids.tolist() for ids in read_sampled(DATA / f"{Path(name).stem}.sampled.jsonl")]


def trained(row: ForeignRow) -> list[tuple[int, int]]:
    return runs_of(row.mask)


@pytest.mark.parametrize("name", FILES)
def test_what_a_file_trains_is_what_was_sampled(name: str) -> None:
    rows = read_rows(FILES[name], [DATA / name])
    assert len(rows) == 8
    replies = recorded(name)
    found = []
    for row in rows:
        assert row.response_ids is not None
        found += [row.response_ids[start:end].tolist() for start, end in trained(row)]
    assert sorted(found) == sorted(replies)


@pytest.mark.parametrize(
    "name", [name for name in FILES if FILES[name] != "trl"]
)  # TRL keeps them only if vLLM samples
def test_log_probs_are_those_of_the_sampler(name: str) -> None:
    for row in read_rows(FILES[name], [DATA / name]):
        assert row.logprobs is not None
        for start, end in trained(row):
            expected = [-0.25 - 0.01 * (at % 10) for at in range(end - start)]
            np.testing.assert_allclose(row.logprobs[start:end], expected, rtol=1e-6)


@pytest.mark.parametrize("name", FILES)
def test_groups_rewards_and_versions(name: str) -> None:
    rows = read_rows(FILES[name], [DATA / name])
    framework = FILES[name]
    groups = [row.group for row in rows]
    sizes = {"skyrl": {"": 8}}.get(framework) or dict.fromkeys(
        dict.fromkeys(groups), 4
    )  # SkyRL's trainer adds groups later
    assert {group: groups.count(group) for group in groups} == sizes
    assert len(sizes) == (1 if framework == "skyrl" else 2)
    if name in ("trl_tools.pt", "skyrl_batch.pkl"):
        assert [row.reward for row in rows] == [None] * 8  # these files have advantages only
    else:
        assert {round(row.reward or 0.0, 6) for row in rows} <= {
            0.0,
            1.0,
            0.9,
        }  # 0.9: AReaL's discount of a second turn
        assert sum(bool(row.reward) for row in rows) >= 4
    if framework == "areal":
        assert all(row.versions is not None for row in rows)
        for row in rows:
            assert row.versions is not None
            assert [set(row.versions[start:end].tolist()) for start, end in trained(row)] == [{3}, {4}]
    else:
        assert {row.row_versions for row in rows} == VERSIONS.get(name, {()})


def test_prompts_are_whole_and_without_padding() -> None:
    messages = [
        {"role": "system", "content": "Answer with one number."},
        {"role": "user", "content": "What is 17 + 25?"},
    ]
    first = read_rows("verl", [DATA / "verl_single.pkl"])[0]
    assert first.messages == messages
    assert first.label == "42"
    prompts = {
        tuple(row.prompt_ids.tolist())
        for name in ("skyrl_turns.pkl", "areal_turns.pt", "slime_search.pt")
        for row in read_rows(FILES[name], [DATA / name])
        if row.prompt_ids is not None
    }
    assert tuple(first.prompt_ids.tolist()) in prompts  # type: ignore[union-attr]
    assert len(prompts) == 2  # one for each task, the same in each framework


def test_a_dump_of_texts_has_texts_scores_and_steps() -> None:
    rows = read_rows("verl", [DATA / "verl_dump.jsonl"])
    assert len(rows) == 8
    assert not any(row.has_ids for row in rows)
    assert rows[0].response_text is not None
    assert rows[0].response_text.endswith(": the answer is 42.")
    assert (rows[0].reward, rows[0].label, rows[0].row_versions) == (1.0, "42", (3,))
    assert len({row.group for row in rows}) == 2


EXPECTED = {
    "verl_single.pkl": {},
    "trl_tools.pt": {"no_versions": {"info": 8}},
    "slime_search.pt": {"prompt_not_template": {"info": 8}, "no_versions": {"warning": 8}},
    "skyrl_turns.pkl": {"no_versions": {"info": 8}},
    "skyrl_batch.pkl": {"no_versions": {"info": 8}},
    "areal_turns.pt": {"prompt_not_template": {"warning": 8}},
}


@pytest.mark.slow
@pytest.mark.skipif(not TOKENIZERS, reason="NOT CHECKED: EPISODE_ENGINE_TOKENIZERS is not set")
@pytest.mark.parametrize("name", FILES)
def test_the_findings_are_those_of_the_page(name: str) -> None:
    form = load_format(ModelSpec(path=f"{TOKENIZERS}/qwen2_5", allow_special=True), Path())
    sampled = read_sampled(DATA / f"{Path(name).stem}.sampled.jsonl")
    report, _ = audit(read_rows(FILES[name], [DATA / name]), FILES[name], form, sampled=sampled)
    assert json.loads(json.dumps(report.counts())) == EXPECTED[name]
