"""How much of the movement that AdamW intends the trained weights make, with every precision and every optimizer of the schema."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from installed_plugins import needs_plugin
from nets_for_tests import VOCAB, build
from process_group_worker import rows_of
from slow_cases import slow_but
from training_rows import with_branch

from engine.schemas.sections import read_stored
from engine.schemas.train import OptimizerSpec, TrainSpec
from engine.store.rows.row import TrainingRow
from engine.train.distributed import ProcessGroup, join_alone
from engine.train.learner import Learner
from engine.train.optimizers import MasterWeights, local_of
from engine.train.policy import Policy, open_model

PRECISIONS = get_args(TrainSpec.model_fields["precision"].annotation)
OPTIMIZERS = get_args(OptimizerSpec.model_fields["kind"].annotation)
RATE, STEPS = 1e-6, 4
LORA = {"rank": 4, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture
def sharding() -> Iterator[ProcessGroup]:
    yield join_alone()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Matrices of 64 x 96: large enough for moments of 8 bits. As in real models, most weights are about 0.02."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.02, "tie_word_embeddings": True}
    return build("Llama", tmp_path_factory.mktemp("movement") / "model", **sizes)


def rows() -> list[TrainingRow]:
    return [with_branch(row, input_ids=row.branch.input_ids % VOCAB) for row in rows_of()]


def learner_of(folder: Path, process_group: ProcessGroup | None = None, **train: Any) -> Learner:
    optimizer = {"lr": RATE, "max_grad_norm": None} | train.pop("optimizer", {})
    common = {"device": "cpu", "optimizer": optimizer}
    spec = read_stored(common | train, TrainSpec)
    group = process_group or ProcessGroup()
    policy = Policy.load(folder, spec, temperature=1.0, vocab=None, vision=None, process_group=group)
    return Learner(policy, spec, process_group=group)


def state_of(learner: Learner) -> dict[str, torch.Tensor]:
    """What a checkpoint has of the trained weights, float64."""
    tensors = learner.state_parts()["policy"].tensors()
    return {name: local_of(tensor).detach().double() for name, tensor in tensors.items()}


def movement_of(learner: Learner, steps: int = STEPS) -> tuple[torch.Tensor, torch.Tensor]:
    """The movement of all trained weights in some steps, and that of AdamW in float64 with the same gradients, [weights] each."""
    before = state_of(learner)
    intended = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in before.items()}
    settings = learner._spec.optimizer
    exact = torch.optim.AdamW(
        intended.values(), lr=settings.lr, betas=(settings.betas[0], settings.betas[1]), weight_decay=0.0
    )
    step = learner.optimizer.step

    def seen_step(*args: Any) -> Any:
        updated = [parameter for group in learner.optimizer.param_groups for parameter in group["params"]]
        for parameter, own in zip(updated, intended.values(), strict=True):
            assert parameter.grad is not None
            own.grad = local_of(parameter.grad).double()
        exact.step()
        return step(*args)

    learner.optimizer.step = seen_step  # type: ignore[method-assign]
    for number in range(steps):
        learner.step(rows(), number)
    after = state_of(learner)
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before])
    return moved, torch.cat([(intended[name].detach() - before[name]).flatten() for name in before])


def realised(moved: torch.Tensor, intended: torch.Tensor) -> float:
    """The movement along the intended one, as a part of it."""
    return float(moved @ intended / (intended @ intended))


@pytest.mark.parametrize("trained", slow_but([{}, {"lora": LORA}], {}), ids=["all weights", "lora"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
@torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]  # the same update, not compiled
def test_weights_make_the_movement_that_the_optimizer_intends(
    model: Path, precision: str, optimizer: str, trained: dict[str, Any]
) -> None:
    if optimizer != "adamw":
        pytest.importorskip("torchao.optim")
    learner = learner_of(model, precision=precision, optimizer={"kind": optimizer}, **trained)
    moved, intended = movement_of(learner)
    exact = optimizer == "adamw"  # moments of 8 bits are rounded
    assert realised(moved, intended) == pytest.approx(1.0, abs=0.01 if exact else 0.05)
    assert float((moved - intended).norm() / intended.norm()) < (0.01 if exact else 0.4)


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_sharded_weights_and_those_on_the_cpu_make_it_too(model: Path, sharding: ProcessGroup, offload: str) -> None:
    memory = {"max_tokens_per_microbatch": 32, "offload": offload}  # several micro-batches
    learner = learner_of(model, sharding, precision="bfloat16", memory=memory)
    moved, intended = movement_of(learner)
    assert realised(moved, intended) == pytest.approx(1.0, abs=0.01)
    assert {tensor.dtype for tensor in learner.policy.state().values()} == {torch.bfloat16}


@needs_plugin("critic")
def test_a_critic_of_its_own_makes_it_too(model: Path) -> None:
    from engine.plugins.critic.spec import GaeCredit

    """Its output layer is frozen, so it has no copy."""
    from engine.plugins.critic.critic import Critic
    from engine.plugins.critic.spec import ValueCritic

    spec = read_stored({"device": "cpu", "precision": "bfloat16", "critic": {"kind": "network", "lr": RATE}}, TrainSpec)
    settings: dict[str, Any] = {"temperature": 1.0, "vocab": None, "vision": None}
    policy, net = Policy.load(model, spec, **settings), open_model(model, spec, **settings)
    assert isinstance(spec.critic, ValueCritic)
    critic = Critic(spec.critic, GaeCredit(), policy, ProcessGroup(), model=net)
    critic.shard(offload=False)
    before = {name: tensor.double() for name, tensor in critic.state_parts()["critic"].tensors().items()}
    generator = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(each.shape, generator=generator) for name, each in critic.parameters.items()}
    for _ in range(3):
        for name, parameter in critic.parameters.items():
            parameter.grad = gradients[name].clone()
        critic.update()
    tensors = critic.state_parts()["critic"].tensors()
    for name, gradient in gradients.items():  # a constant gradient: steps of lr, against its sign
        wanted = -3 * RATE * gradient.sign().double()
        assert realised(
            (tensors[f"weight::{name}"].double() - before[f"weight::{name}"]).flatten(), wanted.flatten()
        ) == (pytest.approx(1.0, abs=0.02))


def test_gradients_of_many_micro_batches_are_added_up_in_float32(model: Path) -> None:
    """300 equal gradients: added up in bfloat16, the sum would stop at 256."""
    spec = read_stored({"device": "cpu", "precision": "bfloat16"}, TrainSpec)
    policy = Policy.load(model, spec, temperature=1.0, vocab=None, vision=None)
    parameters = dict(policy.named_parameters())
    masters = MasterWeights(parameters)
    assert set(masters.named) == set(parameters)
    for _ in range(300):
        torch.stack([parameter.sum() for parameter in parameters.values()]).sum().backward()
    assert all(parameter.grad is None for parameter in parameters.values())
    for name, master in masters.named.items():
        assert master.grad is not None
        assert master.grad.dtype == torch.float32
        assert float(master.grad.min()) == float(master.grad.max()) == 300, name


def test_the_model_has_the_rounded_weights_and_frozen_ones_have_no_copy(model: Path) -> None:
    learner = learner_of(model, precision="bfloat16", freeze=["layers.0."], optimizer={"lr": 1e-3})
    before = {name: tensor.clone() for name, tensor in learner.policy.model.state_dict().items()}
    learner.step(rows(), 0)
    copies, now = learner.state_parts()["policy"].tensors(), learner.policy.model.state_dict()
    assert {tensor.dtype for tensor in copies.values()} == {torch.float32}
    assert not [name for name in copies if "layers.0." in name]
    for name, tensor in copies.items():
        assert torch.equal(now[name], tensor.bfloat16())
        assert not torch.equal(now[name], before[name])
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items() if "layers.0." in name)


@pytest.mark.parametrize("sharded", slow_but([False, True], False))
def test_a_resume_goes_on_with_the_same_copies(model: Path, tmp_path: Path, sharded: bool) -> None:
    """Bit for bit, although the weights of the model did not move yet."""
    group = join_alone() if sharded else ProcessGroup()
    try:
        whole = learner_of(model, group, precision="bfloat16")
        for number in range(2):
            whole.step(rows(), number)
        whole.save_state(tmp_path / "state")
        fresh = learner_of(model, group, precision="bfloat16")
        fresh.load_state(tmp_path / "state")
        for number in (2, 3):
            assert fresh.step(rows(), number) == whole.step(rows(), number)
        one, other = state_of(whole), state_of(fresh)
        assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
        served, again = whole.policy.weights(), fresh.policy.weights()
        assert all(torch.equal(served[name], tensor) for name, tensor in again.items())
    finally:
        if sharded:
            dist.destroy_process_group()
