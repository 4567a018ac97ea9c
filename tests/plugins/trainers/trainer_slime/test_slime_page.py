"""The example of the page `from slime`, as it stands there, run with a small vision model behind a fake router."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vision_kit
import yaml
from slime_kit import FakeVisionRouter, Sample, arrived, assert_same, run_router, stored

from engine.environments.geo3k import problems
from engine.errors import TrainError
from engine.plugins.trainers.capabilities import TRAINERS
from engine.plugins.trainers.slime import advantages, convert, generate_rollout
from engine.plugins.trainers.slime.rollouts import SlimeEpisodes
from engine.plugins.trainers.slime.settings import refuse_arguments
from engine.spec.load import load_spec

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "from-trainers.md").read_text().split("\n## From slime\n")[1]
BATCH = {"rollout_batch_size": 2, "global_batch_size": 16}


def blocks(language: str) -> list[str]:
    """The page's code blocks in this language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def flags() -> dict[str, Any]:
    """The flags and the engine's settings of the page, as slime reads them."""
    (command,) = [block for block in blocks("sh") if block.startswith("python train.py")]
    words = [flag.partition(" ") for flag in command.replace("\\\n", " ").split("--")[1:]]
    given = {
        name.strip().replace("-", "_"): yaml.safe_load(value) if value.strip() else True for name, _, value in words
    }
    return given | yaml.safe_load(blocks("yaml")[1])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the project's specs and the page's spec."""
    (tmp_path / "specs").symlink_to(ROOT / "specs")
    (tmp_path / "spec.yaml").write_text(blocks("yaml")[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_spec_and_the_flags_fit(place: Path, flags: dict[str, Any]) -> None:
    spec = load_spec(place / "spec.yaml")
    assert not [each for each in TRAINERS["slime"].findings(spec) if each.severity == "error"]
    refuse_arguments(SimpleNamespace(**flags), spec)
    with pytest.raises(TrainError, match="--n-samples-per-prompt"):
        refuse_arguments(SimpleNamespace(**flags | {"n_samples_per_prompt": 4}), spec)


class Solver(FakeVisionRouter):
    """Hands the right answer in with every second call, and another one with the others."""

    def __init__(self, model: Path, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]) -> None:
        super().__init__(model, encode("x<|im_end|>"))
        self._encode, self._decode = encode, decode
        self._answers = {row["question"].replace("<image>", "").strip(): row["answer"] for row in problems()}

    def said(self, prompt: list[int]) -> list[int]:
        text = self._decode(prompt)
        asked = [answer for question, answer in self._answers.items() if question in text]
        if not asked:  # the engine's look at the server before the first episode
            return self.output
        (answer,) = set(asked)
        value = str(answer) if len(self.calls) % 2 else "-1"
        call = json.dumps({"name": "calc_score", "arguments": {"answer": value}})
        return self._encode(f"<tool_call>\n{call}\n</tool_call><|im_end|>")


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> None:
    """slime's two classes of results, where slime is not installed."""
    base = ModuleType("slime.rollout.base_types")
    base.RolloutFnTrainOutput = base.RolloutFnEvalOutput = SimpleNamespace  # type: ignore[attr-defined]
    for name in ("slime", "slime.rollout"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "slime.rollout.base_types", base)


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.usefixtures("results", "megatron")
def test_the_example_runs(place: Path, flags: dict[str, Any]) -> None:
    """A rollout of the page's spec: two tasks with eight samples each, to the columns and the advantages of slime's update."""
    model = vision_kit.build_qwen25(place / "vlm")
    with (place / "spec.yaml").open("a") as file:
        file.write(f"model: {{path: {model}, tool_calls: hermes}}\n")  # a 2B model is not fetched for a test
    (listing,) = [block for block in blocks("sh") if block.startswith("python -c")]
    code, _, target = listing.removeprefix('python -c "').rpartition('" > ')
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    Path(target.strip()).write_text(made.stdout)
    tasks = [json.loads(line)[flags["input_key"]] for line in Path(flags["prompt_data"]).read_text().splitlines()]
    assert len(tasks) == 301

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    router = Solver(model, lambda text: tokenizer.encode(text), tokenizer.decode)
    stop = run_router(router, model)
    host, _, port = router.url.removeprefix("http://").partition(":")
    connection = {"sglang_router_ip": host, "sglang_router_port": port, "eval_datasets": []}
    args = SimpleNamespace(**flags | BATCH | connection)
    size = args.n_samples_per_prompt
    groups = [[Sample(tasks[at], at * size + each, at) for each in range(size)] for at in range(2)]
    try:
        output = generate_rollout(
            args, 0, SimpleNamespace(get_samples=lambda count: [groups.pop(0) for _ in range(count)])
        )
        samples = [sample for group in output.samples for sample in group]
        data = convert(args, samples)
        SlimeEpisodes.of(args).stop()
    finally:
        stop()
    rows = stored(args)
    assert_same(samples, data, rows)
    assert len(rows) == 16
    assert {tuple(tensors) for tensors in data["multimodal_train_inputs"]} == {("pixel_values", "image_grid_thw")}
    assert set(data["raw_reward"]) > {1.0}
    expected = [values.clone() for values in data["rewards"]]
    assert sum(float(values.abs().sum()) for values in expected) > 1.0
    batch = arrived(data)
    advantages(args, batch)
    for got, values in zip(batch["advantages"], expected, strict=True):
        assert np.array_equal(got.numpy(), values.numpy())
