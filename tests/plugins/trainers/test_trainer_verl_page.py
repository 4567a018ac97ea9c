"""The example of the page `from verl`, as it stands there: its tool, YAML, spec and settings."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from shipped_tokenizers import unpack
from verl_python import call_verl, run_verl

from engine.plugins.trainers.capabilities import TRAINERS
from engine.plugins.trainers.verl import settings
from engine.plugins.trainers.verl.agent_loop import EngineAgentLoop
from engine.plugins.trainers.verl.manager import write_tasks
from engine.spec.load import load_spec
from engine.store import RunStore
from engine.store.rows.export import export_rows

ROOT = Path(__file__).parents[3]
PAGE = re.split(r"^## From (?:verl|slime)$", (ROOT / "docs" / "from-trainers.md").read_text(), flags=re.M)[1]


def blocks(language: str) -> list[str]:
    """The page's code blocks in this language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def words() -> list[str]:
    """The settings of the page's command."""
    (command,) = [block for block in blocks("sh") if "main_ppo" in block]
    return command.partition("main_ppo")[2].replace("\\\n", " ").split()


def row(n: int) -> dict[str, Any]:
    """A row as verl's data preparation writes it."""
    truth = str(n + 5)
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": f"What is {n}+5?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": "train",
            "index": n,
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}},
            "interaction_kwargs": {"query": "", "ground_truth": truth},
        },
    }


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files, two rows as verl's data preparation writes them, and a tokenizer as the model."""
    tools, spec, _ = blocks("yaml")
    (tmp_path / "gsm8k_verl.py").write_text(blocks("python")[0])
    (tmp_path / "gsm8k_tool_config.yaml").write_text(tools)
    (tmp_path / "spec.yaml").write_text(spec.replace("Qwen/Qwen2.5-3B-Instruct", str(unpack("qwen2_5", tmp_path))))
    rows = [row(n) for n in range(2)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_spec_fits_and_the_loop_has_the_keys_of_the_page(place: Path) -> None:
    loaded = load_spec(place / "spec.yaml")
    assert not [each for each in TRAINERS["verl"].findings(loaded) if each.severity == "error"]
    found = TRAINERS["verl_agent_loop"].findings(loaded)
    assert [each.path for each in found if each.severity == "error"] == [("rewards", "credit")]
    (keys,) = yaml.safe_load(blocks("yaml")[2])
    assert keys.pop("_target_") == f"{EngineAgentLoop.__module__}.{EngineAgentLoop.__qualname__}"
    EngineAgentLoop(**keys, trainer_config=SimpleNamespace(config={}), server_manager=None)


def test_the_page_names_what_the_code_refuses() -> None:
    source = inspect.getsource(settings)
    named = {path.removeprefix("actor_rollout_ref.") for path, *_ in (*settings.SETTINGS, *settings.MANAGER_SETTINGS)}
    named |= {f"rollout.{name}" for name in re.findall(r'_ROLLOUT \+ "([a-z_]+)"', source)}
    named |= set(re.findall(r'"(trainer\.[a-z0-9_.]+)"', source))
    named = {name.removeprefix("rollout.") if ".multi_turn." in name else name for name in named}
    assert len(named) > 15
    assert not [name for name in named if name not in PAGE]


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.exhaustive
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


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.exhaustive
def test_verls_own_command_trains_on_a_cpu_with_stand_ins_for_servers_and_actor(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verl.trainer.main_ppo` with the page's settings: two steps of two groups; the group whose server was down is replaced."""
    model = place / "qwen2_5"
    sizes = {"vocab_size": 151936, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    (model / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]} | sizes)
    )
    spec = (place / "spec.yaml").read_text()
    (place / "spec.yaml").write_text(spec.replace("samples_per_task: 16", "samples_per_task: 4"))
    rows = [row(n) for n in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), place / "train.parquet")
    assert write_tasks("spec.yaml", "tasks.parquet") == 4
    given = [word.replace("Qwen/Qwen2.5-3B-Instruct", str(model)) for word in words()]
    given += ["data.train_batch_size=2", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.use_kl_loss=False"]
    given += ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.n_gpus_per_node=1", "trainer.total_epochs=1"]
    given += [
        "trainer.logger=[console]",
        "trainer.device=cpu",
        "ray_kwargs.ray_init.num_cpus=4",
        "trainer.save_freq=-1",
    ]
    given += ["transfer_queue.backend.SimpleStorage.num_data_storage_units=1", "data.dataloader_num_workers=0"]
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "verl_cpu")
    monkeypatch.setenv("VERL_CPU_LOG", str(place / "updates.jsonl"))
    said = call_verl("-m", "verl.trainer.main_ppo", *given)
    updates = [json.loads(line) for line in (place / "updates.jsonl").read_text().splitlines()]
    stored = RunStore.open(place / "runs/with-verl/rollouts", readonly=True)
    episodes = {each["episode_id"]: each for each in export_rows(stored) if each["trainable"]}
    assert len(updates) == 2
    seen = []
    for step, update in enumerate(updates, 1):
        made = [each for each in update if not each["padding"]]
        assert [each["version"] for each in made] == [step - 1] * 8
        assert len({each["key"].partition("_")[0] for each in made}) == 2
        for each in made:
            found = episodes[each["episode"]]
            start = int(found["loss_mask"].argmax())
            wanted = np.where(found["loss_mask"] == 1, found["advantages"], 0.0)[start:]
            assert each["input_ids"] == found["input_ids"].tolist()
            assert np.abs(np.array(each["advantages"]) - wanted).max() < 1e-6
        seen += [each["episode"] for each in made]
        (score,) = re.findall(rf"step:{step} .*?critic/score/mean:(?:np.float64\()?([\d.]+)", said)
        assert float(score) == pytest.approx(np.mean([episodes[each["episode"]]["outcome"]["reward"] for each in made]))
    assert len(set(seen)) == 16
    assert not [name for name in seen if name.startswith("3/")]
