"""The example of the page `from verl`, as it stands there: its tool, YAML, spec and settings."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from shipped_tokenizers import unpack
from verl_python import run_verl

from engine.integrations.trainers.check import check_trainer
from engine.integrations.trainers.verl import settings
from engine.integrations.trainers.verl.agent_loop import EngineAgentLoop
from engine.spec.load import load_spec
from engine.store import RunStore
from engine.store.export import export_rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-verl.md").read_text()


def blocks(language: str) -> list[str]:
    """The page's code blocks in this language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def words() -> list[str]:
    """The settings of the page's command."""
    (command,) = [block for block in blocks("sh") if "main_ppo" in block]
    return command.partition("main_ppo")[2].replace("\\\n", " ").split()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files, two rows as verl's data preparation writes them, and a tokenizer as the model."""
    tools, spec, _ = blocks("yaml")
    (tmp_path / "gsm8k_verl.py").write_text(blocks("python")[0])
    (tmp_path / "gsm8k_tool_config.yaml").write_text(tools)
    (tmp_path / "spec.yaml").write_text(spec.replace("Qwen/Qwen2.5-3B-Instruct", str(unpack("qwen2_5", tmp_path))))
    rows = [
        {
            "data_source": "openai/gsm8k",
            "agent_name": "tool_agent",
            "prompt": [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": f"What is {n}+5?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 5)},
            "extra_info": {
                "split": "train",
                "index": n,
                "need_tools_kwargs": True,
                "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": str(n + 5)}}},
                "interaction_kwargs": {"query": "", "ground_truth": str(n + 5)},
            },
        }
        for n in range(2)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_spec_fits_and_the_loop_has_the_keys_of_the_page(place: Path) -> None:
    loaded = load_spec(place / "spec.yaml")
    assert not [each for each in check_trainer(loaded, "verl") if each.severity == "error"]
    found = check_trainer(loaded, "verl_agent_loop")
    assert [each.path for each in found if each.severity == "error"] == [("rewards", "credit")]
    (keys,) = yaml.safe_load(blocks("yaml")[2])
    assert keys.pop("_target_") == f"{EngineAgentLoop.__module__}.{EngineAgentLoop.__qualname__}"
    EngineAgentLoop(**keys, trainer_config=SimpleNamespace(config={}), server_manager=None)


def test_the_page_names_what_the_code_refuses() -> None:
    source = inspect.getsource(settings)
    named = set(re.findall(r"\b(?:trainer|algorithm|reward|distillation)\.[a-z0-9_.]+", source))
    named |= {f"rollout.{name}" for name in re.findall(r"\{rollout\}([a-z_]+)", source)}
    named |= {f"multi_turn.{name}" for name in re.findall(r"\{tools\}([a-z_]+)", source)}
    assert len(named) > 15
    assert not [name for name in named if name not in PAGE]


@pytest.mark.slow
def test_the_example_gives_the_advantages_of_its_credit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl reads the settings and the data file; 32 episodes, of which every third calls the tool twice, go through TransferQueue."""
    (line,) = re.findall(r"^export (\w+)=(\S+)$", PAGE, re.MULTILINE)
    monkeypatch.setenv(*line)
    model = str(place / "qwen2_5")
    given = [word.replace("Qwen/Qwen2.5-3B-Instruct", model) for word in words()]
    given += ["transfer_queue.enable=true", "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"]
    found = run_verl(ROOT / "tests" / "kit" / "verl_page.py", json.dumps(given))
    assert set(found["statuses"].values()) == {"finished"}
    rows = {
        row["episode_id"]: row for row in export_rows(RunStore.open(place / "runs/with-verl/rollouts", readonly=True))
    }
    assert len(found["rows"]) == len(rows) == 32
    for made in found["rows"]:
        row = rows[made["episode"]]
        start = int(row["loss_mask"].argmax())
        wanted = np.where(row["loss_mask"] == 1, row["advantages"], 0.0)[start:]
        assert made["input_ids"] == row["input_ids"].tolist()
        assert np.abs(np.array(made["advantages"]) - wanted).max() < 1e-6
        wrong = row["sample_index"] % 3 == 0
        assert row["turn_rewards"].tolist() == ([-0.05, 0.0, 1.0] if wrong else [0.0, 1.0])
        assert made["score"] == pytest.approx(0.95 if wrong else 1.0)
        assert len(set(np.round(wanted[np.array(made["response_mask"]) == 1], 6))) == (3 if wrong else 2)
