"""Episodes with one interaction of verl's form, of which 5 % fail: the others are those of verl's own calls."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from adapters_kit import (
    EPISODES,
    FAULTY_EVERY,
    earned,
    expected_failures,
    failures,
    planned_faults,
    run_spec,
    shown,
    spec_of,
)

from engine.plugins.adapters.verl.interactions import interaction_class

HERE = Path(__file__).parent
KINDS = {
    "start": "user_error",
    "respond": "user_error",
    "shape": "user_error",
    "score": "user_error",
    "hang": "user_timeout",
}
REPLIES = ["1", "2", "3"]


async def by_hand(truth: str) -> tuple[list[str], list[float]]:
    """The calls of verl's agent loop: start, then a response to each reply, then finalize."""
    interaction = interaction_class("verl_faulty.Faulty")({})
    await interaction.start_interaction("a", ground_truth=truth, fault=None)
    messages: list[dict[str, Any]] = []
    seen: list[str] = []
    rewards: list[float] = []
    for reply in REPLIES:
        messages.append({"role": "assistant", "content": reply})
        over, said, reward, _ = await interaction.generate_response("a", messages)
        seen.append(said)
        rewards.append(reward)
        if over:
            break
        messages.append({"role": "user", "content": said})
    await interaction.finalize_interaction("a")
    return seen, rewards


@pytest.mark.slow
def test_episodes_beside_faulty_ones_are_whole(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    shutil.copy(HERE / "verl_faulty.py", tmp_path)
    (tmp_path / "interactions.yaml").write_text(
        yaml.safe_dump({"interaction": [{"name": "faulty", "class_name": "verl_faulty.Faulty", "config": {}}]})
    )
    faults = planned_faults(["start", "respond", "shape", "score", "hang"])
    rows = [
        {
            "id": f"t{n}",
            "prompt": [{"role": "user", "content": "Begin."}],
            "interaction_kwargs": {"name": "faulty", "ground_truth": str(n % 3 + 1), "fault": fault},
        }
        for n, fault in enumerate(faults)
    ]
    environment = {"use": "engine.plugins.adapters.verl.interactions:Prompt", "effects": "pure"}
    user = {
        "use": "engine.plugins.adapters.verl.interactions:Interactions",
        "effects": "replayable",
        "timeout": 10,
        "with": {"config": "interactions.yaml"},
    }
    machine = "retry_with_feedback"
    document = spec_of(tiny_tokenizer_dir, environment, rows, REPLIES, user=user, machine=machine, prompt=[])
    episodes = run_spec(tmp_path, document)
    assert failures(episodes) == expected_failures(rows, faults, KINDS, blame="user")
    assert (len(episodes), len(failures(episodes))) == (EPISODES, EPISODES // FAULTY_EVERY)
    whole = {truth: asyncio.run(by_hand(truth)) for truth in ("1", "2", "3")}
    for row, fault in zip(rows, faults, strict=True):
        if fault is None:
            episode = episodes[f"{row['id']}/0"]
            assert (shown(episode), earned(episode)) == whole[row["interaction_kwargs"]["ground_truth"]]
