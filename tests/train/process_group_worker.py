"""Steps of a tiny Llama, by one process or by several: what the test of `engine.train.distributed` launches."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from engine.rewards.ledger import Ledger
from engine.schemas.credit import GaeCredit
from engine.schemas.reward import RewardEvent
from engine.schemas.train import TrainSpec
from engine.train.checkpoint import Checkpoints, State
from engine.train.critic import Critic
from engine.train.distributed import ProcessGroup, SingleProcessGroup, join_process_group
from engine.train.learner import Learner
from engine.train.policy import Policy, open_model

VOCABULARY = 101
CUT: dict[str, Any] = {"loss": {"kind": "ppo"}, "update_epochs": 2}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"loss": {"kind": "grpo"}, "entropy_coefficient": 0.01},
    "tied": {
        "loss": {"kind": "gspo"},
        "memory": {"max_tokens_per_microbatch": 32, "gradient_checkpointing": True},
        "update_epochs": 2,
        "minibatches": 2,
    },
    "lora": {
        "loss": {"kind": "dapo"},
        "kl": {"coefficient": 0.5},
        "lora": {"rank": 3, "target_modules": ["q_proj", "down_proj"]},
        "optimizer": {"lr": 0.1, "eps": 1e-3},
    },
    "probe": {
        "critic": {"kind": "probe", "width": 7, "max_grad_norm": 0.1, "update_epochs": 1},
        "minibatches": 2,
        **CUT,
    },
    "head": {
        "critic": {"kind": "head", "coefficient": 1.0, "update_epochs": 3},
        "lora": {"rank": 3, "target_modules": ["q_proj", "down_proj"]},
        "optimizer": {"lr": 0.1, "eps": 1e-3},
        **CUT,
    },
    "network": {"critic": {"kind": "network", "lr": 1e-3, "update_epochs": 3}, **CUT},
}


def spec_of(kind: str) -> TrainSpec:
    """AdamW with an eps above the gradients' rounding, which it would else divide by itself where they are all but 0."""
    common = {"device": "cpu", "optimizer": {"lr": 1e-2, "eps": 1e-3}, "memory": {"max_tokens_per_microbatch": 32}}
    return TrainSpec.model_validate(common | KINDS[kind])


def save_model(folder: Path, *, tied: bool) -> None:
    """Sizes that two processes do not share evenly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=18,
            intermediate_size=33,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
        )
    ).save_pretrained(folder)


def rows_of() -> list[dict[str, Any]]:
    """Five packs of 32 tokens: an odd number, so that one process makes a pass that does not count."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(6):
        size = int(rng.integers(12, 24))
        mask = (rng.random(size) < 0.6).astype(np.int64)
        mask[0] = 0
        rows.append(
            {
                "input_ids": rng.integers(0, VOCABULARY, size),
                "loss_mask": mask,
                "turn_ids": np.arange(size) // 8,
                "images": [],
                "task_id": f"t{number // 3}",
                "episode_id": f"e{number // 2 if number != 3 else 9}",
                "logprobs": rng.normal(-4.6, 0.1, size),
                "advantages": rng.normal(0, 1, size),
            }
        )
    return rows


def for_critic(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row as an episode whose advantages need a critic; every other one was cut by a limit."""
    rng = np.random.default_rng(1)
    found = []
    for number, row in enumerate(rows):
        ledger, turns = Ledger(), int(row["turn_ids"].max()) + 1
        for turn in range(turns):
            ledger.post(RewardEvent(turn=turn, value=float(rng.normal())), turn)
        row["turn_ids"] = np.where(row["loss_mask"] == 1, row["turn_ids"], -1)
        none = np.zeros(len(row["input_ids"]), np.float32)
        own = {"episode_id": f"e{number}", "advantages": none, "ledger": ledger.seal(turns), "cut": number % 2 == 1}
        found.append(row | own)
    return found


def learner_of(process_group: ProcessGroup, folder: Path, kind: str) -> Learner:
    spec, critic = spec_of(kind), None
    policy = Policy.load(folder, spec, temperature=1.0, vocab=None, vision=None)
    if spec.critic is not None:
        own = open_model(folder, spec, temperature=1.0, vocab=None, vision=None) if spec.critic.own_model else None
        credit = GaeCredit(gamma=0.9, lam=0.8)
        critic = Critic(spec.critic, credit, policy, process_group, model=own)
        for group in critic.optimizer.param_groups:
            group["eps"] = 1e-3
    return Learner(policy, spec, process_group=process_group, critic=critic)


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    with learner.process_group.full_parameters(learner.policy.model):
        return {name: tensor.detach().clone() for name, tensor in learner.policy.weights().items()}


def critic_of(learner: Learner, file: Path, name: str) -> dict[str, torch.Tensor]:
    """Weights and moments of the critic."""
    if learner.critic is None:
        return {}
    learner.critic.state_part().save(file)
    return {f"{name}.{key}": tensor for key, tensor in load_file(file).items()}


def told_by(learner: Learner, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Two steps, a checkpoint, a third; and that third again from the checkpoint."""
    rows = for_critic(rows_of()) if learner.critic is not None else rows_of()
    told = [learner.step(rows, number) for number in range(2)]
    checkpoint = Checkpoints(folder, 1).write(State(step=2, version=2), learner)
    told.append(learner.step(rows, 2))
    tensors = {f"weights.{name}": tensor for name, tensor in weights_of(learner).items()}
    tensors |= {f"moments.{name}": tensor.clone() for name, tensor in learner.optimizer_state().items()}
    tensors |= critic_of(learner, folder / "critic.safetensors", "critic")
    Checkpoints.read(checkpoint, learner)
    told.append(learner.step(rows, 2))
    tensors |= {f"again.{name}": tensor for name, tensor in weights_of(learner).items()}
    tensors |= critic_of(learner, folder / "critic.safetensors", "critic-again")
    return {"steps": told, "checkpoint": str(checkpoint)}, {name: each.contiguous() for name, each in tensors.items()}


def main(folder: Path, kind: str) -> None:
    process_group = join_process_group()
    assert not isinstance(process_group, SingleProcessGroup)
    learner = learner_of(process_group, folder / "model", kind)
    if not process_group.main:
        learner.follow()
        return
    numbers, tensors = told_by(learner, folder / "several")
    parameters: list[Any] = list(learner.policy.model.parameters())
    numbers["share"] = sum(each.to_local().numel() for each in parameters) / sum(each.numel() for each in parameters)
    numbers["size"] = process_group.size
    process_group.close()
    save_file(tensors, folder / "told.safetensors")
    (folder / "told.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
