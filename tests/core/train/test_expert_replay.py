"""The trainer uses the experts that the sampler chose (`routed_experts` of rows)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_moe
import torch
from nets_for_tests import build, make_row
from safetensors.torch import load_file
from slow_cases import slow_but
from training_rows import with_branch
from trainings import metric_lines
from transformers import AutoModelForCausalLM

from engine.errors import TrainError
from engine.schemas.sections import read_stored
from engine.schemas.train import TrainSpec
from engine.spec.load import load_spec
from engine.store import RunHeader, RunStore
from engine.store import training as training_folder
from engine.store.rows.export import training_rows
from engine.store.rows.row import TrainingRow
from engine.train.packing import pack_rows
from engine.train.policy import Policy
from engine.train.trainer import Trainer

TOKENS = [5, 3, 8, 8, 2, 9, 30, 31, 7, 12, 40, 41, 42, 11, 3, 8, 20, 21]


def drawn(seed: int, tokens: int) -> np.ndarray:
    """Random choices of three of eight experts in three layers."""
    draw = np.random.default_rng(seed).random((tokens, 3, 8))
    return draw.argsort(-1)[..., :3].astype(np.uint8)


def routed(ids: list[int], seed: int, **changes: Any) -> TrainingRow:
    return make_row(ids, **{"routed_experts": drawn(seed, len(ids) - 1)} | changes)


def open_policy(folder: Path, *, replay: bool = True, **spec: Any) -> Policy:
    train = read_stored({"device": "cpu"} | spec, TrainSpec)
    return Policy.load(folder, train, temperature=1.0, vocab=None, vision=None, replay_experts=replay)


def forced(folder: Path, row: TrainingRow) -> np.ndarray:
    """Log-probs of a row's trained tokens by the model of transformers, whose routers were replaced by the published formula."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    experts = torch.tensor(row.branch.routed_experts.astype(np.int64))

    def router_of(layer: int, gate: Any) -> Any:
        def forward(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = states.reshape(-1, states.shape[-1]) @ gate.weight.T
            chosen = experts[: len(logits), layer]
            weights = torch.stack([torch.exp(logits[token, chosen[token]]) for token in range(len(logits))])
            every = weights.sum(-1) if getattr(gate, "norm_topk_prob", True) else torch.exp(logits).sum(-1)
            return logits, weights / every[:, None], chosen

        return forward

    for name, module in model.named_modules():
        if name.endswith(".gate") and hasattr(module, "top_k"):
            module.forward = router_of(int(name.split(".")[2]), module)
    ids = torch.tensor(row.branch.input_ids)
    with torch.no_grad():
        chances = model(input_ids=ids[None, :-1], use_cache=False).logits[0].log_softmax(-1)
    return chances.gather(1, ids[1:, None])[:, 0].numpy()[np.flatnonzero(row.loss_mask()) - 1]


def computed(policy: Policy, rows: Sequence[dict[str, Any]], most: int = 1000, **packing: Any) -> list[np.ndarray]:
    """For each row: log-probs of its trained tokens."""
    found: list[np.ndarray] = [np.zeros(0)] * len(rows)
    with torch.no_grad():
        for pack in pack_rows(rows, most, **({"share_prefixes": True, "min_shared_tokens": 1} | packing)):
            values = policy.forward(pack, entropy=False)[0].numpy()
            for row in pack.rows:
                found[row] = values[(pack.row == row).numpy()]
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("moe")
    return {family: tiny_moe.build(base / family, family) for family in tiny_moe.FAMILIES}


@pytest.mark.parametrize("family", slow_but(["Qwen3Moe", "Qwen2Moe", "Mixtral"], "Qwen3Moe"))
def test_log_probs_are_those_of_the_given_experts(family: str, folders: dict[str, Path]) -> None:
    """However rows are packed: with shared prefixes, without, each alone."""
    same = drawn(0, 9)
    rows = [routed(TOKENS, seed) for seed in (1, 2)] + [routed([*TOKENS[:10], 4, 4], 3)]
    rows[2].branch.routed_experts[:9] = rows[0].branch.routed_experts[:9] = same
    policy = open_policy(folders[family])
    wanted = [forced(folders[family], row) for row in rows]
    for found in (computed(policy, rows), computed(policy, rows, share_prefixes=False), computed(policy, rows, 1)):
        for own, right in zip(found, wanted, strict=True):
            np.testing.assert_allclose(own, right, atol=2e-5)
    plain = computed(open_policy(folders[family], replay=False), rows)
    assert max(np.abs(own - right).max() for own, right in zip(plain, wanted, strict=True)) > 0.1


def test_rows_share_only_tokens_with_the_same_experts() -> None:
    rows = [routed(TOKENS, 1), routed([*TOKENS[:12], 4, 4], 1), routed([*TOKENS[:12], 6, 6], 2)]
    experts = rows[0].branch.routed_experts
    assert experts is not None
    other = experts[:13].copy()
    other[7, 2, 0] ^= 4
    rows[1:] = with_branch(rows[1], routed_experts=experts[:13]), with_branch(rows[2], routed_experts=other)
    (pack,) = pack_rows(rows, 1000, share_prefixes=True, min_shared_tokens=1)
    assert pack.tokens == 17 + (13 - 12) + (13 - 7)
    assert pack.experts is not None
    for number, row in zip(pack.rows, rows, strict=True):
        places = pack.row_tokens(number)
        np.testing.assert_array_equal(pack.experts[places].numpy(), row.branch.routed_experts)


def test_tokens_without_known_experts_use_the_routers_own(folders: dict[str, Path]) -> None:
    policy = open_policy(folders["Qwen3Moe"])
    bare = make_row(TOKENS)
    (own,) = computed(policy, [bare])
    none, half = (with_branch(bare, routed_experts=drawn(1, 17)[:known]) for known in (0, 8))
    mixed = computed(policy, [bare, none, half], share_prefixes=False)
    np.testing.assert_allclose(mixed[0], own, rtol=1e-6)
    np.testing.assert_allclose(mixed[1], own, rtol=1e-6)
    assert np.abs(mixed[2] - own).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 2}}], ids=["all weights", "lora"])
def test_gradients_are_the_same_with_recomputed_activations(changes: dict[str, Any], folders: dict[str, Path]) -> None:
    """A layer that runs again in the backward pass uses the same experts, and gradients reach the routers."""
    found = []
    for checkpointing in (True, False):
        memory = {"gradient_checkpointing": checkpointing}
        policy = open_policy(folders["Qwen3Moe"], memory=memory, kl={"coefficient": 0.1}, **changes)
        for seed in (1, 2):
            (pack,) = pack_rows([routed(TOKENS, seed)], 1000, share_prefixes=False)
            loss = (policy.forward(pack, entropy=False)[0] - policy.reference(pack)).square().sum()
            loss = loss - policy.forward(pack, entropy=False)[0].sum()
            loss.backward()
        found.append({name: parameter.grad for name, parameter in policy.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], atol=1e-5, rtol=1e-4)
    if not changes:
        assert all(float(found[0][f"model.layers.{layer}.mlp.gate.weight"].abs().max()) > 1e-4 for layer in range(3))


def test_the_reference_uses_the_same_experts(folders: dict[str, Path]) -> None:
    policy = open_policy(folders["Qwen3Moe"], kl={"coefficient": 0.1})
    (pack,) = pack_rows([routed(TOKENS, 1)], 1000, share_prefixes=False)
    with torch.no_grad():
        torch.testing.assert_close(policy.forward(pack, entropy=False)[0], policy.reference(pack), atol=1e-6, rtol=0)


def test_near_ties_are_no_error_of_the_packed_pass(tmp_path: Path) -> None:
    """Log-probs of such a model depend on the order of additions, in the check of the packed pass too."""
    folder = tiny_moe.build(tmp_path, ties=True)
    for replay in (True, False):
        open_policy(folder, replay=replay)


def test_a_model_without_routers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"no routers that transformers declares.*backend\.routed_experts") as caught:
        open_policy(build("Qwen2", tmp_path))
    assert caught.value.kind == "train_setup"


def test_experts_of_another_model_are_refused(folders: dict[str, Path]) -> None:
    policy = open_policy(folders["Qwen3Moe"])
    row = make_row(TOKENS)
    with pytest.raises(TrainError, match="sampled with another model"):
        computed(policy, [with_branch(row, routed_experts=drawn(1, 17)[:, :2])])
    with pytest.raises(TrainError, match="sampled with another model"):
        pack_rows([routed(TOKENS, 1), with_branch(row, routed_experts=drawn(1, 17)[:, :2])], 1000, share_prefixes=True)


@pytest.mark.parametrize("family", ["Qwen3Moe", pytest.param("Mixtral", marks=pytest.mark.slow)])
def test_a_model_with_experts_is_saved_as_it_was_loaded(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Files have the weights of each expert, which the model holds as one parameter."""
    open_policy(folders[family]).save(tmp_path / "saved", serving=True)
    stored, saved = (load_file(folder / "model.safetensors") for folder in (folders[family], tmp_path / "saved"))
    assert stored.keys() == saved.keys()
    assert any(".experts.7." in name for name in stored)
    for name, tensor in stored.items():
        assert saved[name].equal(tensor)


@pytest.mark.slow
async def test_a_training_uses_the_experts_of_the_local_backend(
    train_spec: Callable[..., Path], folders: dict[str, Path], tmp_path: Path
) -> None:
    """Rows of each step have experts, and log-probs with them are the sampler's, also after a push of weights."""
    backend = {"kind": "local", "dtype": "float32", "max_batch": 16, "routed_experts": True}
    train = {"steps": 2, "dynamic_sampling": False, "loss": {"kind": "grpo"}}
    loaded = load_spec(train_spec(train=train, backend=backend, model={"path": str(folders["Qwen3Moe"])}), [])
    trainer = Trainer(loaded, training_folder.begin(tmp_path / "runs", RunHeader.of(loaded)))
    await trainer.run()
    steps = metric_lines(trainer.folder)
    assert [step["sampler/diff_max"] < 1e-4 for step in steps] == [True, True]
    with RunStore.open(trainer.folder / "rollouts", readonly=True) as store:
        rows = list(training_rows(store))
    assert rows
    for row in rows:
        assert row.branch.routed_experts.shape == (int(np.flatnonzero(row.loss_mask())[-1]), 3, 3)
