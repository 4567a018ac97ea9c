"""From what a training leaves to a model that can be evaluated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from installed_commands import installed, needs_command
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result
from written_specs import save_spec

from engine.cli.main import app as main
from engine.errors import TrainError
from engine.plugins.evaluation.command import evaluate
from engine.plugins.evaluation.trained_model import merged, trained_model


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPISODE_ENGINE_CACHE", str(tmp_path / "cache"))


def model_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def save_adapter(base: Path, folder: Path, targets: tuple[str, ...] = ("q_proj", "down_proj")) -> torch.Tensor:
    """An adapter whose matrices are not zero; the logits that it gives on ids 0 … 9."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), init_lora_weights=False)
    wrapped = peft.get_peft_model(model_of(base), config).eval()
    wrapped.save_pretrained(folder)
    with torch.inference_mode():
        logits: torch.Tensor = wrapped(torch.arange(10)[None]).logits
    return logits


def never() -> Path:
    raise AssertionError("no base is needed")


def checkpoint(training: Path, step: int, best: int | None, model: Path) -> Path:
    folder = training / "checkpoints" / f"step-{step:06d}"
    shutil.copytree(model, folder / "model")
    (folder / "state.json").write_text(json.dumps({"step": step, "best_step": best}))
    return folder


def test_a_models_folder_is_itself_and_a_checkpoint_its_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    assert trained_model(tiny_model_dir, never) == tiny_model_dir.resolve()
    folder = checkpoint(tmp_path / "training", 5, None, tiny_model_dir)
    assert trained_model(folder, never) == folder / "model"


def test_of_a_training_the_best_checkpoint_is_taken_else_the_newest(tiny_model_dir: Path, tmp_path: Path) -> None:
    first = checkpoint(tmp_path, 5, None, tiny_model_dir)
    newest = checkpoint(tmp_path, 10, None, tiny_model_dir)
    assert trained_model(tmp_path, never) == newest / "model"
    (newest / "state.json").write_text(json.dumps({"step": 10, "best_step": 5}))
    assert trained_model(tmp_path, never) == first / "model"


def test_an_adapter_is_merged_once_and_gives_its_own_logits(tiny_model_dir: Path, tmp_path: Path) -> None:
    wanted = save_adapter(tiny_model_dir, tmp_path / "step-000010" / "adapter")
    folder = trained_model(tmp_path / "step-000010", lambda: tiny_model_dir)
    with torch.inference_mode():
        got = model_of(folder)(torch.arange(10)[None]).logits
        base = model_of(tiny_model_dir)(torch.arange(10)[None]).logits
    assert float((got - wanted).abs().max()) < 1e-4
    assert float((base - wanted).abs().max()) > 0.1
    assert (folder / "tokenizer.json").read_bytes() == (tiny_model_dir / "tokenizer.json").read_bytes()
    made = (folder / "config.json").stat().st_mtime_ns
    assert merged(tmp_path / "step-000010" / "adapter", tiny_model_dir) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]


def test_an_adapter_of_another_model_is_refused(tiny_model_dir: Path, tiny_tokenizer_dir: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=1000, n_positions=64)).save_pretrained(
        tmp_path / "gpt"
    )
    save_adapter(tmp_path / "gpt", tmp_path / "adapter", ("c_attn",))
    with pytest.raises(TrainError, match=r"does not fit the spec's model|belongs to another model") as caught:
        merged(tmp_path / "adapter", tiny_model_dir)
    assert caught.value.kind == "checkpoint"
    assert not list((tmp_path / "cache" / "merged").glob("*/config.json"))


def test_a_folder_without_a_model_is_told_what_one_is(tmp_path: Path) -> None:
    with pytest.raises(
        TrainError, match=r"holds no model: name a folder with config\.json and safetensors, a checkpoint"
    ):
        trained_model(tmp_path, never)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(TrainError, match="has no checkpoint yet"):
        trained_model(tmp_path, never)


def call(command: Any, *words: str | Path) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def spec(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tasks, four greedy episodes each, on the local backend."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "runner"))
    document = {
        "spec": "episode/v1",
        "name": "demo",
        "model": {"path": str(tiny_model_dir), "tool_calls": "hermes"},
        "backend": {"kind": "local", "dtype": "float32", "threads": 1},
        "sampling": {"temperature": 0.0, "max_new_tokens": 4},
        "tasks": {"source": "inline", "rows": [{"id": f"t{n}"} for n in range(2)], "id": "id"},
        "prompt": [{"role": "user", "content": "What is 17 plus 25?"}],
        "user": {"use": "code_for_tests:Critic"},
        "limits": {"assistant_turns": 2},
        "rollout": {"samples_per_task": 4},
    }
    return save_spec(tmp_path / "demo.yaml", document)


@pytest.mark.slow
def test_an_adapter_is_evaluated_as_the_whole_model_that_it_makes(
    spec: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    from engine.store import RunStore

    save_adapter(tiny_model_dir, tmp_path / "adapter")
    told = []
    for words in ([], ["--model", tmp_path / "adapter"]):
        result = call(evaluate, spec, "--json", *words)
        assert result.exit_code == 0, result.output
        told.append(json.loads(result.stdout))
    assert set(told[0]["estimates"]) >= {"success", "reward", "turns", "tokens", "pass@1", "pass@2", "pass@4"}
    said = []
    for one in told:
        with RunStore.open(Path(one["run"]), readonly=True) as store:
            said.append(
                [message.text for message in next(store.trajectories()).messages if message.role == "assistant"]
            )
    assert said[0] != said[1]  # greedy: other weights
    for words in installed([["compare", told[0]["run"], told[1]["run"], "--json"]]):
        held = json.loads(CliRunner().invoke(main, words).stdout)
        assert (held["tasks"], held["masked"]) == (2, [0, 0])


@needs_command("compare")
def test_of_two_trainings_the_newest_evaluations_are_compared(spec: Path, tmp_path: Path) -> None:
    for training, name in (("a", "step-000000"), ("a", "step-000010"), ("b", "step-000010")):
        folder = json.loads(call(evaluate, spec, "--json", "--limit", "1").stdout)["run"]
        (tmp_path / training / "evals").mkdir(parents=True, exist_ok=True)
        shutil.move(folder, tmp_path / training / "evals" / name)
    result = CliRunner().invoke(main, ["compare", "a", "b", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["differences"]["pass@4"]["difference"] == 0.0


def test_servers_with_other_weights_are_not_taken_for_the_checkpoint(spec: Path, tiny_model_dir: Path) -> None:
    """A real HTTP server that says which model it serves."""
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"model_path": "/models/other"}')

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        backend = f"backend={{kind: sglang, urls: ['{url}']}}"
        result = call(evaluate, spec, "--model", tiny_model_dir, "--set", backend)
    finally:
        server.shutdown()
        server.server_close()
    assert result.exit_code == 1
    assert result.stderr.startswith(
        f"{url} samples with the weights of /models/other, not of {tiny_model_dir.resolve()}: start it"
    )
