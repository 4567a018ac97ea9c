from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ended_runs import run_to_end
from installed_plugins import needs_plugin
from nets_for_tests import build, make_row, plain
from slow_cases import slow_after
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.errors import EngineError, TrainError
from engine.schemas.model import ModelSpec
from engine.schemas.sections import read_stored
from engine.schemas.train import TrainSpec
from engine.store.rows.row import TrainingRow
from engine.tokens.loading import load_format
from engine.train.distributed import ProcessGroup
from engine.train.files import write_tensors
from engine.train.packing import pack_rows
from engine.train.policy import Policy
from engine.train.verify import recompute

ROWS = [make_row([5, 3, 8, 8, 2, 9, *tail]) for tail in ([4, 4, 1], [7, 2], [4, 1, 3, 3])]
LORA = {"rank": 3, "alpha": 6.0}


def open_policy(folder: Path, temperature: float = 1.0, vocab: int | None = None, **spec: Any) -> Policy:
    return Policy.load(
        folder, read_stored({"device": "cpu"} | spec, TrainSpec), temperature=temperature, vocab=vocab, vision=None
    )


def one_pack(policy: Policy, rows: list[TrainingRow] = ROWS) -> Any:
    (pack,) = pack_rows(rows, 1000, share_prefixes=policy.can_share_prefixes, min_shared_tokens=1)
    return pack


def step(policy: Policy, lr: float = 0.05) -> None:
    """One step up the rows' likelihood."""
    optimizer = torch.optim.AdamW(dict(policy.named_parameters()).values(), lr=lr)
    (-policy.forward(one_pack(policy), entropy=False)[0].sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def logprobs(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.forward(one_pack(policy), entropy=False)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("Qwen2", tmp_path_factory.mktemp("qwen2"))


def test_log_probs_are_under_the_temperature_and_the_vocabulary(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    policy = open_policy(folder, temperature=0.6, vocab=30)
    found, entropy = policy.forward(one_pack(policy), entropy=True)
    wanted = plain(model, ROWS, temperature=0.6, vocab=30)
    torch.testing.assert_close(found, wanted[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy, wanted[1], rtol=0, atol=2e-5)
    assert found.requires_grad


def test_temperature_0_counts_as_1(folder: Path) -> None:
    assert torch.equal(logprobs(open_policy(folder, temperature=0.0)), logprobs(open_policy(folder)))


def test_a_token_that_rows_share_is_computed_once_and_counts_for_each(folder: Path) -> None:
    policy = open_policy(folder)
    twice = policy.forward(one_pack(policy, [ROWS[0], ROWS[0]]), entropy=True)
    once = policy.forward(one_pack(policy, [ROWS[0]]), entropy=True)
    for two, one in zip(twice, once, strict=True):
        assert two is not None
        assert one is not None
        assert torch.equal(two, one.repeat(2))


@pytest.mark.parametrize(("precision", "dtype", "close"), [("mixed", "float32", 0.5), ("bfloat16", "bfloat16", 1.0)])
def test_precisions(folder: Path, precision: str, dtype: str, close: float) -> None:
    policy = open_policy(folder, precision=precision)
    assert {str(parameter.dtype) for _, parameter in policy.named_parameters()} == {f"torch.{dtype}"}
    found = logprobs(policy)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, logprobs(open_policy(folder)), rtol=0, atol=close)
    before = found.sum()
    step(policy)
    assert logprobs(policy).sum() > before


def test_frozen_parameters_stay(folder: Path) -> None:
    policy = open_policy(folder, freeze=[r"embed", r"layers\.0\."])
    names = [name for name, _ in policy.named_parameters()]
    assert names
    assert not [name for name in names if "embed" in name or "layers.0." in name]
    before = {name: parameter.clone() for name, parameter in policy.model.named_parameters()}
    step(policy)
    changed = [name for name, parameter in policy.model.named_parameters() if not torch.equal(parameter, before[name])]
    assert changed == names


@needs_plugin("lora")
def test_what_is_frozen_already_is_refused(folder: Path) -> None:
    with pytest.raises(
        TrainError, match=r"'embed' has no effect: with `train.lora` the weights that it matches are frozen already"
    ):
        open_policy(folder, lora=LORA, freeze=["embed"])
    assert dict(open_policy(folder, lora=LORA, freeze=[r"layers\.0\.", r"layers\.0\.self"]).named_parameters())


@pytest.mark.parametrize(
    ("freeze", "why"), [(["."], "nothing to train"), (["visual"], "'visual' matches no parameter's name")]
)
def test_what_freezes_all_or_nothing_is_refused(folder: Path, freeze: list[str], why: str) -> None:
    with pytest.raises(TrainError, match=why):
        open_policy(folder, freeze=freeze)


@pytest.mark.parametrize("device", ["cuda", "nonsense"])
def test_a_device_that_is_not_there(folder: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(EngineError, match=f"`train.device: {device}`"):
        open_policy(folder, device=device)


def test_checkpointing_gives_the_same_gradients(folder: Path) -> None:
    found = []
    for checkpointing in (False, True):
        policy = open_policy(folder, memory={"gradient_checkpointing": checkpointing})
        policy.forward(one_pack(policy), entropy=False)[0].sum().backward()
        found.append({name: parameter.grad for name, parameter in policy.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-5)


# --- reference ----------------------------------------------------------------------------------------------


@needs_plugin("lora")
@pytest.mark.parametrize("spec", [{"kl": {"coefficient": 0.1}}, {"lora": LORA}])
def test_the_reference_stays_where_the_policy_began(folder: Path, spec: dict[str, Any]) -> None:
    policy = open_policy(folder, **spec)
    began = logprobs(policy)
    torch.testing.assert_close(policy.reference(one_pack(policy)), began, rtol=0, atol=1e-6)
    step(policy)
    assert (logprobs(policy) - began).abs().max() > 0.01
    reference = policy.reference(one_pack(policy))
    torch.testing.assert_close(reference, began, rtol=0, atol=1e-6)
    assert not reference.requires_grad
    assert [parameter.requires_grad for _, parameter in policy.named_parameters()]


def test_a_reference_that_nobody_asked_for(folder: Path) -> None:
    policy = open_policy(folder)
    with pytest.raises(TrainError, match="there is no reference model"):
        policy.reference(one_pack(policy))


# --- LoRA ---------------------------------------------------------------------------------------------------


@needs_plugin("lora")
def test_lora_trains_its_matrices_alone(folder: Path) -> None:
    policy = open_policy(folder, lora=LORA)
    assert all(".lora_" in name for name, _ in policy.named_parameters())
    assert policy.state().keys() == {name for name, _ in policy.named_parameters()}
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items() if ".lora_" not in name}
    torch.testing.assert_close(logprobs(policy), logprobs(open_policy(folder)), rtol=0, atol=1e-6)
    step(policy)
    after = policy.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@needs_plugin("lora")
def test_a_frozen_part_of_an_adapter_stays_frozen(folder: Path) -> None:
    policy = open_policy(folder, lora=LORA, freeze=[r"layers\.0\."])
    names = [name for name, _ in policy.named_parameters()]
    logprobs = policy.forward(one_pack(policy), entropy=False)[0]
    policy.reference(one_pack(policy))
    logprobs.sum().backward()
    assert [name for name, _ in policy.named_parameters()] == names
    assert all(".layers.1." in name for name in names)
    assert all(parameter.grad is not None for _, parameter in policy.named_parameters())


@needs_plugin("lora")
def test_lora_begins_the_same_with_the_same_seed(folder: Path) -> None:
    states = [open_policy(folder, lora=LORA, seed=seed).state() for seed in (1, 1, 2)]
    name = next(name for name in states[0] if "lora_A" in name)
    assert torch.equal(states[0][name], states[1][name])
    assert not torch.equal(states[0][name], states[2][name])


@needs_plugin("lora")
def test_merged_weights_give_the_same_log_probs_and_change_nothing(folder: Path, tmp_path: Path) -> None:
    policy = open_policy(folder, lora=LORA | {"target_modules": ["q_proj", "down_proj"]})
    step(policy)
    wanted = logprobs(policy)
    policy.save(tmp_path / "merged")
    torch.testing.assert_close(logprobs(open_policy(tmp_path / "merged")), wanted, rtol=0, atol=1e-5)
    assert torch.equal(logprobs(policy), wanted)


@needs_plugin("lora")
def test_an_adapter_is_saved_as_peft_reads_it(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    policy = open_policy(folder, lora=LORA)
    step(policy)
    policy.save_adapter(tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    torch.testing.assert_close(plain(loaded, ROWS)[0].detach(), logprobs(policy), rtol=0, atol=2e-5)
    with pytest.raises(TrainError, match="no adapter to save"):
        open_policy(folder).save_adapter(tmp_path / "none")


@needs_plugin("lora")
def test_a_dropped_out_adapter_has_a_row_to_itself_and_drops_in_training_alone(folder: Path) -> None:
    policy = open_policy(folder, lora=LORA | {"dropout": 0.5})
    step(policy)
    assert not policy.can_share_prefixes
    assert torch.equal(logprobs(policy), logprobs(policy))
    torch.manual_seed(0)
    drawn = [policy.forward(one_pack(policy), entropy=False)[0] for _ in range(2)]
    assert not torch.equal(*drawn)
    merged = policy.weights()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.load_state_dict(merged)
    torch.testing.assert_close(plain(model, ROWS)[0].detach(), logprobs(policy), rtol=0, atol=2e-5)


@needs_plugin("lora")
@pytest.mark.parametrize("targets", [["nowhere"], ["lm_head"]])
def test_targets_that_cannot_be_adapted(folder: Path, targets: list[str]) -> None:
    with pytest.raises(TrainError, match=r"`train\.lora\.target_modules`"):
        open_policy(folder, lora=LORA | {"target_modules": targets})


# --- weights and files --------------------------------------------------------------------------------------


@needs_plugin("lora")
def test_weights_have_the_names_of_the_files(tiny_model_dir: Path) -> None:
    from engine.train.files import tensor_files

    for spec in ({}, {"lora": LORA}):
        policy = open_policy(tiny_model_dir, **spec)
        assert policy.weights().keys() == tensor_files(tiny_model_dir).keys()
        assert "lm_head.weight" not in policy.weights()  # tied
        assert policy.weights("model").keys() == policy.weights().keys() | {"lm_head.weight"}
        assert not any(tensor.requires_grad for tensor in policy.weights().values())


def test_a_saved_folder_is_a_model_path(tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = [make_row(np.arange(5, 25).tolist())]
    policy = open_policy(tiny_model_dir)
    step(policy)
    policy.save(tmp_path / "saved")
    (tmp_path / "saved" / "stale").touch()
    policy.save(tmp_path / "saved")  # in the place of the older one
    assert {file.name for file in (tmp_path / "saved").iterdir()} == {file.name for file in tiny_model_dir.iterdir()}
    assert load_format(ModelSpec(path=str(tmp_path / "saved")), tmp_path).vocab_size == 1000
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    again = open_policy(tmp_path / "saved")
    with torch.no_grad():
        found = again.forward(one_pack(again, rows), entropy=False)[0]
        torch.testing.assert_close(found, plain(model, rows)[0], rtol=0, atol=2e-5)
        assert torch.equal(found, policy.forward(one_pack(policy, rows), entropy=False)[0])
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == json.loads(
        (tiny_model_dir / "config.json").read_text()
    )
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_folder_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainError, match="cannot write") as caught:
        open_policy(folder).save(tmp_path / "file" / "model")
    assert caught.value.kind == "checkpoint"


@needs_plugin("lora")
@pytest.mark.parametrize("spec", slow_after(1, [{"lora": LORA}, {}, {"freeze": ["embed"]}]))
def test_a_state_is_taken_back(folder: Path, spec: dict[str, Any], tmp_path: Path) -> None:
    policy, other = open_policy(folder, **spec), open_policy(folder, **spec)
    step(policy)
    write_tensors(policy.state(), tmp_path / "state", ProcessGroup())
    other.load_state(tmp_path / "state")
    assert torch.equal(logprobs(other), logprobs(policy))


@needs_plugin("lora")
def test_a_state_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    policy = open_policy(folder)
    write_tensors(open_policy(folder, lora=LORA).state(), tmp_path / "state", ProcessGroup())
    with pytest.raises(TrainError, match="parameters differ, for example") as caught:
        policy.load_state(tmp_path / "state")
    assert caught.value.kind == "checkpoint"


# --- the sampler's log-probs --------------------------------------------------------------------------------


async def rows_of(spec: Path, folder: Path) -> list[TrainingRow]:
    """The training rows of a run on the local backend."""
    from engine.store.rows.export import training_rows

    with (await run_to_end(spec, folder)).store as store:
        return list(training_rows(store, trainable_only=True))


async def test_recomputed_rows_have_the_samplers_log_probs(
    train_spec: Callable[..., Path], tiny_model_dir: Path, tmp_path: Path
) -> None:
    rows = await rows_of(train_spec(sampling={"temperature": 0.7}), tmp_path / "runs")
    policy = open_policy(tiny_model_dir, temperature=0.7, vocab=1000)
    for max_tokens_per_microbatch in (1, 50, 8192):
        found = recompute(policy, rows, max_tokens_per_microbatch)
        assert found.tokens == sum(int(row.loss_mask().sum()) for row in rows)
        assert found.tokens > 100
        assert found.largest < 1e-4
        assert found.mean <= found.largest
    step(policy)
    assert recompute(policy, rows).largest > 1e-2


@pytest.mark.model
async def test_the_real_models_rows_have_the_samplers_log_probs(tmp_path: Path, smollm_dir: Path) -> None:
    source = Path(__file__).parents[3] / "specs" / "train_arithmetic.yaml"
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"extends: {source}\nbackend: {{kind: local, dtype: float32}}\ntasks: {{with: {{count: 2}}}}\n")
    rows = await rows_of(spec, tmp_path / "runs")
    found = recompute(open_policy(smollm_dir), rows)
    assert found.tokens > 50
    assert found.largest < 1e-4
