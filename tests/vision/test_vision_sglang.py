"""Images on a real SGLang server: what it expands is ours, and its log-probs are transformers'."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recompute import apart
from vision_code import FIRST, MACHINE, SECOND, THIRD

from engine.tokens.images import digest_of

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
SCRIPT = Path(__file__).parents[2] / "scripts" / "sglang_cpu.sh"


@contextmanager
def serving(model: Path, state: Path) -> Iterator[str]:
    """The URL of a server with this model, until the block ends."""
    python = Path(subprocess.run([SCRIPT, "python"], capture_output=True, text=True, check=True).stdout.strip())
    if not python.exists():
        message = f"SGLang is not installed ({python} is not there): run scripts/sglang_cpu.sh install"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    environment = {**os.environ, "SGLANG_CPU_STATE": str(state), "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    flags = ["--deterministic", "--mm-attention-backend", "sdpa"]
    started = subprocess.run(
        [SCRIPT, "start", model, *flags], env=environment, capture_output=True, text=True, check=False
    )
    if started.returncode:
        pytest.fail(f"the SGLang server did not start:\n{started.stderr[-4000:]}")
    url = started.stdout.strip().splitlines()[-1]
    try:
        yield url
    finally:
        port = url.rpartition(":")[2]
        subprocess.run([SCRIPT, "stop", "--port", port], env=environment, capture_output=True, check=False)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
async def test_episodes_are_exact_to_the_pixel(
    make_spec: Any, run_spec: Any, vlm: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    """Figures of Geometry3K and pictures of every form, on a server whose own processor scales otherwise."""
    with serving(vlm(family), tmp_path_factory.mktemp("sglang")) as url:
        backend = {"kind": "sglang", "urls": [url], "timeout": "2m", "verify": True}
        ran = await run_spec(
            make_spec(
                family,
                environment={"use": "vision_code:Gallery"},
                machine=MACHINE,
                backend=backend,
                tasks={"source": "inline", "rows": [{"id": name} for name in "abc"], "id": "id"},
            )
        )
        figures = await run_spec(
            make_spec(
                family,
                environment={"use": "vision_code:Figures"},
                machine=MACHINE,
                backend=backend,
                tasks={
                    "source": "inline",
                    "rows": [{"id": str(at), "first": at} for at in range(0, 300, 60)],
                    "id": "id",
                },
            )
        )
    assert ran.stats["certificate"] == {"turns_checked": 12, "turns_unchecked": 0, "prompt_mismatches": 0}
    assert ran.stats["seeded"] is True
    for trajectory in ran.trajectories.values():
        assert trajectory.outcome.failure is None
        assert len(trajectory.turns) == 4
        shown = [digest_of(data) for data in (FIRST, SECOND, THIRD, FIRST)]
        assert [image.image for image in trajectory.branches[-1].images] == shown
        for branch in trajectory.branches:
            assert not np.isin(branch.input_ids[branch.loss_mask == 1], ran.vision.banned).any()
    bank = ran.vision.bank
    assert (bank.looked, bank.processed) == (
        4,
        1,
    )  # the picture of the check of log-probs, which alone needs a tensor here
    assert figures.stats["certificate"] == {"turns_checked": 15, "turns_unchecked": 0, "prompt_mismatches": 0}
    for made in (ran, figures):
        assert made.stats["verified"]["tokens"] > 20
        assert made.stats["verified"]["largest"] < 1e-4
    images = figures.stats["images"]
    assert images["server_processors"] == ["auto"]
    assert images["unscaled_gap"] > 1e-4  # sent as it came, the probe's picture would have had other pixels
    for made in (ran, figures):
        off, count, rows = apart(made.store, made.vision, vlm(family))
        assert off < 1e-4
        assert count == sum(int(row["loss_mask"].sum()) for row in rows)
