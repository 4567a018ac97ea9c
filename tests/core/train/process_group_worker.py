"""Steps of a tiny Llama, by one process or by several: what the test of `engine.train.distributed` launches."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from training_rows import row_of, with_branch

from engine.rewards.credit import Member
from engine.rewards.ledger import Ledger
from engine.schemas.credit import TurnReturnCredit
from engine.schemas.reward import RewardEvent
from engine.schemas.sections import read_stored
from engine.schemas.train import TrainSpec
from engine.store.rows.row import RowCredit, TrainingRow
from engine.train.checkpoint import State, read_checkpoint, write_checkpoint
from engine.train.credited_rows import RewardKl
from engine.train.distributed import ProcessGroup, join_process_group
from engine.train.files import read_tensors, stored_names
from engine.train.learner import Learner
from engine.train.policy import Policy, open_model

VOCABULARY = 101
CUT: dict[str, Any] = {"loss": {"kind": "ppo"}, "update_epochs": 2}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"loss": {"kind": "dr_grpo"}, "entropy_coefficient": 0.01},
    "tied": {
        "loss": {"kind": "gspo"},
        "memory": {"max_tokens_per_microbatch": 32, "gradient_checkpointing": True},
        "update_epochs": 2,
        "minibatches": 2,
    },
    "kl": {"loss": {"kind": "grpo"}, "kl": {"coefficient": 0.3}},
    "penalties": {"loss": {"kind": "grpo"}, "kl": {"coefficient": 0.3, "in": "reward"}},
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
    "experts": {
        "loss": {"kind": "grpo"},
        "kl": {"coefficient": 0.3},
        "memory": {"max_tokens_per_microbatch": 32, "gradient_checkpointing": True},
    },
    "network": {"critic": {"kind": "network", "lr": 1e-3, "update_epochs": 3}, **CUT},
}


def spec_of(kind: str) -> TrainSpec:
    """AdamW with an eps above the gradients' rounding, which it would else divide by itself where they are all but 0."""
    common = {"device": "cpu", "optimizer": {"lr": 1e-2, "eps": 1e-3}, "memory": {"max_tokens_per_microbatch": 32}}
    return read_stored(common | KINDS[kind], TrainSpec)


def save_model(folder: Path, *, tied: bool, layers: int = 3, width: int = 1) -> None:
    """Sizes that two processes do not share evenly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=18 * width,
            intermediate_size=33 * width,
            num_hidden_layers=layers,
            num_attention_heads=3,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
        )
    ).save_pretrained(folder)


def save_model_with_experts(folder: Path) -> None:
    """Four experts, of which each token uses two, in each of two layers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 20, "moe_intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "norm_topk_prob": True,
    }
    config = Qwen3MoeConfig(vocab_size=VOCABULARY, initializer_range=0.1, **sizes, **experts)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def rows_for(learner: Learner) -> list[TrainingRow]:
    """The rows that a learner trains on."""
    rows = rows_of() if not learner.objectives else with_groups(rows_of())
    if not learner.policy.net.replays_experts:
        return rows
    rng = np.random.default_rng(2)
    drawn = [rng.random((len(row.branch.input_ids) - 1, 2, 4)).argsort(-1)[..., :2].astype(np.uint8) for row in rows]
    return [with_branch(row, routed_experts=experts) for row, experts in zip(rows, drawn, strict=True)]


def rows_of() -> list[TrainingRow]:
    """Five packs of 32 tokens: an odd number, so that one process makes a pass that does not count."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(6):
        size = int(rng.integers(12, 24))
        mask = (rng.random(size) < 0.6).astype(np.int64)
        mask[0] = 0
        rows.append(
            row_of(
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
        )
    return rows


def with_groups(rows: list[TrainingRow]) -> list[TrainingRow]:
    """Each row as an episode whose credit is computed in the trainer; every other one was cut by a limit."""
    rng = np.random.default_rng(1)
    found, groups = [], {row.episode.task_id: dict[str, Member]() for row in rows}
    for number, row in enumerate(rows):
        ledger, turns = Ledger(), int(row.branch.turn_ids.max()) + 1
        for turn in range(turns):
            ledger.post(RewardEvent(turn=turn, value=float(rng.normal())), turn)
        turn_ids = np.where(row.branch.loss_mask == 1, row.branch.turn_ids, -1)
        group = groups[row.episode.task_id]
        group[f"e{number}"] = Member(ledger=ledger.seal(turns))
        found.append(
            replace(
                with_branch(row, turn_ids=turn_ids),
                episode=replace(row.episode, episode_id=f"e{number}"),
                advantages=np.zeros_like(row.advantages),
                credit=RowCredit(members=group, needs_values=True, cut=number % 2 == 1),
            )
        )
    return found


def learner_of(process_group: ProcessGroup, folder: Path, kind: str) -> Learner:
    spec, critic = spec_of(kind), None
    settings: dict[str, Any] = {"temperature": 1.0, "vocab": None, "vision": None, "process_group": process_group}
    policy = Policy.load(folder, spec, **settings, replay_experts=kind == "experts")
    if spec.critic is not None:
        from engine.plugins.critic.critic import Critic
        from engine.plugins.critic.spec import GaeCredit, ValueCritic

        assert isinstance(spec.critic, ValueCritic)
        own = open_model(folder, spec, **settings) if spec.critic.own_model else None
        credit = GaeCredit(gamma=0.9, lam=0.8)
        critic = Critic(spec.critic, credit, policy, process_group, model=own)
    learner = Learner(
        policy,
        spec,
        process_group=process_group,
        objectives=[
            *([RewardKl(spec.kl.coefficient, TurnReturnCredit())] if spec.kl.in_reward else []),
            *([critic] if critic is not None else []),
        ],
    )
    for group in critic.optimizer.param_groups if critic is not None else ():
        group["eps"] = 1e-3
    return learner


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.policy.weights().items()}


def state_of(learner: Learner, folder: Path) -> dict[str, torch.Tensor]:
    """Whole tensors of all parts of the state, `part.tensor`, from the files that all processes write."""
    learner.save_state(folder)
    return state_in(folder, list(learner.state_parts()))


def state_in(folder: Path, parts: list[str]) -> dict[str, torch.Tensor]:
    alone, found = ProcessGroup(), {}
    for part in parts:
        tensors = {
            name: torch.zeros(shape, dtype=torch.uint8 if "rng" in name else torch.float32)
            for name, shape in stored_names(folder / part).items()
        }
        read_tensors(tensors, folder / part, alone)
        found |= {f"{part}.{name}": tensor for name, tensor in tensors.items() if "rng" not in name}
    return found


def told_by(learner: Learner, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Two steps, a checkpoint, a third; and that third again from the checkpoint."""
    rows = rows_for(learner)
    told = [learner.step(rows, number) for number in range(2)]
    checkpoint = write_checkpoint(folder, 1, State(step=2, version=2), learner)
    told.append(learner.step(rows, 2))
    tensors = {f"weights.{name}": tensor for name, tensor in weights_of(learner).items()}
    tensors |= {f"state.{name}": tensor for name, tensor in state_of(learner, folder / "state").items()}
    read_checkpoint(checkpoint, learner)
    told.append(learner.step(rows, 2))
    tensors |= {f"again.{name}": tensor for name, tensor in weights_of(learner).items()}
    tensors |= {f"state-again.{name}": tensor for name, tensor in state_of(learner, folder / "state-again").items()}
    return {"steps": told, "checkpoint": str(checkpoint)}, {name: each.contiguous() for name, each in tensors.items()}


def main(folder: Path, kind: str) -> None:
    process_group = join_process_group()
    assert type(process_group) is not ProcessGroup
    learner = learner_of(process_group, folder / "model", kind)
    if not process_group.main:
        learner.follow()
        return
    numbers, tensors = told_by(learner, folder / "several")
    parameters: list[Any] = list(learner.policy.model.parameters())
    numbers["share"] = sum(each.to_local().numel() for each in parameters) / sum(each.numel() for each in parameters)
    numbers["size"] = process_group.size
    for checkpoint in (folder / "one" / "checkpoints").glob("step-*"):  # of one process
        read_checkpoint(checkpoint, learner)
        numbers["steps"].append(learner.step(rows_for(learner), 2))
    process_group.close()
    save_file(tensors, folder / "told.safetensors")
    (folder / "told.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
