"""Models whose weights are read after they were sharded, by one process that shards over itself."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from installed_plugins import needs_plugin
from safetensors.torch import load_file, save_file

from engine.errors import TrainError
from engine.schemas.sections import read_stored
from engine.schemas.train import TrainSpec
from engine.train.distributed import ProcessGroup, join_alone
from engine.train.learner import Learner
from engine.train.optimizers import local_of
from engine.train.packing import pack_rows
from engine.train.policy import Policy

sys.path.append(str(Path(__file__).parent))
from nets_for_tests import build, make_row
from process_group_worker import rows_of, save_model
from slow_cases import slow_after, slow_but
from training_rows import with_branch

ROWS = [make_row([5, 3, 8, 8, 2, 9, *tail]) for tail in ([4, 4, 1], [7, 2], [4, 1, 3, 3])]
LORA = {"rank": 3, "alpha": 6.0}


@pytest.fixture
def sharding() -> Iterator[ProcessGroup]:
    yield join_alone()
    dist.destroy_process_group()


def open_policy(folder: Path, process_group: ProcessGroup | None, **spec: Any) -> Policy:
    train = read_stored({"device": "cpu"} | spec, TrainSpec)
    policy = Policy.load(folder, train, temperature=1.0, vocab=None, vision=None, process_group=process_group)
    if process_group is not None:
        policy.shard(offload=train.memory.offload == "all")
    return policy


def logprobs(policy: Policy) -> torch.Tensor:
    (pack,) = pack_rows(ROWS, 1000, share_prefixes=policy.can_share_prefixes)
    with torch.no_grad():
        return policy.forward(pack, entropy=False)[0]


def as_bin(folder: Path) -> Path:
    """The same model in a file that is not safetensors."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("family", "changes", "spec"),
    slow_after(
        2,
        [
            ("Qwen2", {"head_dim": ..., "tie_word_embeddings": True}, {"precision": "bfloat16"}),
            ("Qwen3Moe", MOE, {}),  # transformers joins the experts' weights
            ("Qwen3", {}, {"lora": LORA, "precision": "bfloat16"}),
            ("Qwen3", {}, {"lora": LORA}),
            ("Llama", {}, {}),
            ("Llama", {"bin": True}, {}),
            ("Llama", {}, {"memory": {"offload": "all"}}),
        ],
        several=True,
    ),
)
def test_sharded_weights_are_those_of_the_files(
    sharding: ProcessGroup, tmp_path: Path, family: str, changes: dict[str, Any], spec: dict[str, Any]
) -> None:
    folder = build(family, tmp_path / "model", **{key: value for key, value in changes.items() if key != "bin"})
    if "bin" in changes:
        as_bin(folder)
    alone = open_policy(folder, None, **spec)
    found = open_policy(folder, sharding, **spec)
    assert found.net._deferred is None
    own, wanted = found.weights("model"), alone.weights("model")
    assert own.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert own[name].dtype == tensor.dtype
        assert torch.equal(own[name], tensor), name
    torch.testing.assert_close(logprobs(found), logprobs(alone), rtol=0, atol=0)
    assert found.weights().keys() == alone.weights().keys()
    if "lora" in spec:
        for each, place in ((alone, "one"), (found, "other")):
            each.save_adapter(tmp_path / place)
        one, other = (load_file(tmp_path / place / "adapter_model.safetensors") for place in ("one", "other"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_model_is_made_without_memory(sharding: ProcessGroup, tmp_path: Path) -> None:
    folder = build("Llama", tmp_path / "model")
    spec = read_stored({"device": "cpu", "kl": {"coefficient": 0.1}}, TrainSpec)
    policy = Policy.load(folder, spec, temperature=1.0, vocab=None, vision=None, process_group=sharding)
    reference = policy.reference_model
    assert reference is not None
    for model in (policy.model, reference.model):
        assert all(each.is_meta for each in model.parameters())
        assert not any(each.is_meta for each in model.buffers())


def test_a_folder_without_one_of_the_weights_is_refused(sharding: ProcessGroup, tmp_path: Path) -> None:
    folder = build("Llama", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TrainError, match=r"has no weight 'model.layers.1.mlp.up_proj.weight'") as caught:
        open_policy(folder, sharding)
    assert caught.value.kind == "train_setup"


def test_weights_of_another_shape_are_refused(sharding: ProcessGroup, tmp_path: Path) -> None:
    folder = build("Llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))
    with pytest.raises(TrainError, match="cannot be read") as caught:
        open_policy(folder, sharding)
    assert caught.value.kind == "train_setup"


def learner_of(folder: Path, process_group: ProcessGroup, **spec: Any) -> Learner:
    common = {"device": "cpu", "optimizer": {"lr": 1e-2, "eps": 1e-3}, "loss": {"kind": "grpo"}}
    train = read_stored(common | spec, TrainSpec)
    policy = Policy.load(folder, train, temperature=1.0, vocab=None, vision=None, process_group=process_group)
    return Learner(policy, train, process_group=process_group)


@pytest.mark.parametrize("offload", slow_but(["optimizer", "all"], "all"))
def test_what_stays_on_the_cpu_changes_no_step(sharding: ProcessGroup, tmp_path: Path, offload: str) -> None:
    save_model(tmp_path / "model", tied=True)
    wanted = learner_of(tmp_path / "model", ProcessGroup())
    found = learner_of(tmp_path / "model", sharding, memory={"offload": offload})
    for number in range(3):
        assert found.step(rows_of(), number) == pytest.approx(wanted.step(rows_of(), number), rel=1e-6, abs=1e-6)


def test_moments_that_stay_on_the_cpu_change_no_step_of_one_process(tmp_path: Path) -> None:
    save_model(tmp_path / "model", tied=False)
    wanted = learner_of(tmp_path / "model", ProcessGroup())
    found = learner_of(tmp_path / "model", ProcessGroup(), memory={"offload": "optimizer"})
    for number in range(3):
        assert found.step(rows_of(), number) == wanted.step(rows_of(), number)


@pytest.mark.parametrize("sharded", [True, False])
@torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]  # the same update, not compiled
def test_moments_of_8_bits_come_back(tmp_path: Path, sharded: bool) -> None:
    optim = pytest.importorskip("torchao.optim")
    process_group = join_alone() if sharded else ProcessGroup()
    try:
        build("Llama", tmp_path / "model", hidden_size=64, intermediate_size=96)
        settings: dict[str, Any] = {"optimizer": {"kind": "adamw_8bit", "lr": 1e-2, "eps": 1e-3}}
        rows = [with_branch(row, input_ids=row.branch.input_ids % 40) for row in rows_of()]
        whole = learner_of(tmp_path / "model", process_group, **settings)
        assert isinstance(whole.optimizer, optim.AdamW8bit)
        whole.step(rows, 0)
        whole.save_state(tmp_path / "state")
        again = learner_of(tmp_path / "model", process_group, **settings)
        again.load_state(tmp_path / "state")
        kinds = {type(getattr(each, "_local_tensor", each)).__name__
                 for state in again.optimizer.state.values() for each in state.values()}  # fmt: skip
        assert kinds == {"Tensor", "OptimState8bit"}
        for number in (1, 2, 3):
            assert again.step(rows, number) == pytest.approx(whole.step(rows, number), rel=1e-5, abs=1e-5)
        shutil.rmtree(tmp_path / "state")
    finally:
        if sharded:
            dist.destroy_process_group()


def test_8_bits_without_their_package_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "model", tied=False)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(TrainError, match=r"needs torchao .*pip install 'episode-engine\[adamw-8bit\]'"):
        learner_of(tmp_path / "model", ProcessGroup(), optimizer={"kind": "adamw_8bit"})


@needs_plugin("lora")
def test_an_adapter_is_sent_without_its_base_model(
    sharding: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: all weights of the base were gathered for a push of the adapter."""
    from engine.train import distributed

    policy = open_policy(build("Llama", tmp_path / "model"), sharding, lora=LORA)
    gathered: list[torch.Tensor] = []
    whole = distributed.full_tensor_on_cpu
    monkeypatch.setattr(distributed, "full_tensor_on_cpu", lambda tensor: gathered.append(tensor) or whole(tensor))  # type: ignore[func-returns-value]
    policy.save_adapter(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum(each.numel() for each in gathered) == sum(each.numel() for each in stored.values())
    assert len(gathered) == len(stored) == 2 * 7 * 2


@pytest.mark.parametrize("sharded", [True, False])
def test_weights_are_sent_in_the_number_types_of_the_server(
    sharding: ProcessGroup, tmp_path: Path, sharded: bool
) -> None:
    """config.json says bfloat16, and the trainer has float32; a weight that the files keep in float32 stays so."""
    folder = build("Llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    policy = open_policy(folder, sharding if sharded else None)
    for _, parameter in policy.named_parameters():
        local_of(parameter.detach()).add_(0.001)
    trained = {name: each.clone() for name, each in policy.weights().items()}
    policy.save(tmp_path / "served", serving=True)
    policy.save(tmp_path / "kept")
    served, kept = (load_file(tmp_path / name / "model.safetensors") for name in ("served", "kept"))
    assert served.keys() == kept.keys() == trained.keys()
    for name, tensor in trained.items():
        assert torch.equal(served[name], tensor.to(torch.bfloat16))
        assert torch.equal(kept[name], tensor)
    mixed = {name: each.float() if "norm" in name else each for name, each in served.items()}
    save_file(mixed, folder / "model.safetensors", {"format": "pt"})
    found = policy.serving_weights()
    assert {name: each.dtype for name, each in found.items()} == {name: each.dtype for name, each in mixed.items()}
