"""Three steps of a tiny Llama, by one process or by several: what the test of `engine.train.distributed` launches."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from engine.train.distributed import Alone, Run, Team, join
from engine.train.losses import objective
from engine.train.packing import Pack, pack_rows
from engine.train.policy import Policy
from engine.train.shares import token_shares
from engine.train.tally import Tally
from engine.train.tokens import Tokens
from schemas.train import TrainSpec

STEPS = 3
VOCABULARY = 101
KINDS = {
    "plain": {"loss": {"kind": "grpo"}, "entropy": 0.01},
    "tied": {"loss": {"kind": "gspo"}, "memory": {"checkpointing": True}},
    "lora": {
        "loss": {"kind": "dapo"},
        "kl": {"coefficient": 0.5},
        "lora": {"rank": 3, "targets": ["q_proj", "down_proj"]},
        "optimizer": {"lr": 0.1, "eps": 1e-3},
    },
}


def spec_of(kind: str) -> TrainSpec:
    """AdamW with an eps above the gradients' rounding, which it would else divide by itself where they are all but 0."""
    return TrainSpec.model_validate({"device": "cpu", "optimizer": {"lr": 1e-2, "eps": 1e-3}} | KINDS[kind])


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
                "images": [],
                "episode_id": f"e{number // 2}",
                "logprobs": rng.normal(-4.6, 0.1, size),
                "advantages": rng.normal(0, 1, size),
            }
        )
    return rows


class Learning:
    """The least that learns: the real policy, packs, losses and shares."""

    def __init__(self, team: Team, folder: Path, kind: str) -> None:
        self.team = team
        self.spec = spec_of(kind)
        self.policy = Policy.load(folder, self.spec, temperature=1.0, vocab=None, vision=None)
        self._run: Run = team.shard(self.policy.model)
        self.named = dict(self.policy.named_parameters())
        self.optimizer = torch.optim.AdamW(self.named.values(), lr=self.spec.optimizer.lr, eps=self.spec.optimizer.eps)

    def step(self, rows: list[dict[str, Any]]) -> dict[str, float]:
        self.team.tell("step", rows)
        places = [np.flatnonzero(row["loss_mask"] == 1) for row in rows]
        shares = token_shares(self.spec.loss, [len(place) for place in places], [row["episode_id"] for row in rows])
        packs = pack_rows(rows, 32, share_prefixes=False)
        assert len(packs) == 5
        loss, tally, passes = 0.0, Tally(), 0
        for pack, counts in self.team.deal(packs, lambda pack: pack.tokens):
            reference = self._run(self.policy.reference, pack) if self.spec.kl.coefficient else None
            logprobs, entropy = self._run(self.policy.forward, pack, entropy=True)
            passes += 1

            def flat(by_row: list[np.ndarray], pack: Pack = pack) -> torch.Tensor:
                return torch.tensor(np.concatenate([by_row[row] for row in pack.rows]), dtype=torch.float32)

            share = flat(shares)
            tokens = Tokens(
                logprobs,
                logprobs.detach(),
                flat([row["logprobs"][place] for row, place in zip(rows, places, strict=True)]),
                flat([row["advantages"][place] for row, place in zip(rows, places, strict=True)]),
                share if counts else torch.zeros_like(share),
                pack.row,
                pack.row,
                reference=reference,
                entropy=entropy,
            )
            part, counted = objective(self.spec, tokens)
            part.backward()
            if counts:
                loss += float(part.detach())
                tally.merge(counted)
        merged = Tally()
        for other in self.team.everyone(tally.cpu()):
            merged.merge(other)
        assert len(set(self.team.everyone(passes))) == 1
        norm = self.team.clip_norm(list(self.named.values()), 0.05)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return merged.result() | {"loss": sum(self.team.everyone(loss)), "grad_norm": norm}

    def moments(self) -> dict[str, torch.Tensor]:
        self.team.tell("moments")
        found = {name: self.optimizer.state[parameter]["exp_avg"] for name, parameter in self.named.items()}
        return {name: tensor.clone() for name, tensor in self.team.gather(found).items()}

    @torch.no_grad()
    def measure(self, rows: list[dict[str, Any]]) -> float:
        """A pass without gradients."""
        self.team.tell("measure", rows)
        pack = pack_rows(rows[:1], 32, share_prefixes=False)[0]
        return float(self._run(self.policy.forward, pack, entropy=False)[0].sum())

    def halve(self) -> dict[str, torch.Tensor]:
        """Put other weights in, and read them again."""
        with self.team.whole(self.policy.model, write=True):
            self.policy.load_state({name: tensor * 0.5 for name, tensor in self.policy.state().items()})
        return self.weights()

    def weights(self) -> dict[str, torch.Tensor]:
        with self.team.whole(self.policy.model):
            return {name: tensor.clone() for name, tensor in self.policy.weights().items()}


def told_by(learning: Learning) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What process 0 comes to."""
    rows = rows_of()
    numbers: dict[str, Any] = {"steps": [learning.step(rows) for _ in range(STEPS)]}
    numbers["measured"] = learning.measure(rows)
    tensors = {f"weights.{name}": tensor for name, tensor in learning.weights().items()}
    tensors |= {f"moments.{name}": tensor for name, tensor in learning.moments().items()}
    tensors |= {f"halved.{name}": tensor for name, tensor in learning.halve().items()}
    numbers["halved"] = learning.step(rows)
    return numbers, {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def main(folder: Path, kind: str) -> None:
    team = join()
    assert not isinstance(team, Alone)
    learning = Learning(team, folder / "model", kind)
    if not team.main:
        team.follow({"step": learning.step, "moments": learning.moments, "measure": learning.measure})
        return
    numbers, tensors = told_by(learning)
    parameters: list[Any] = list(learning.policy.model.parameters())
    numbers["share"] = sum(each.to_local().numel() for each in parameters) / sum(each.numel() for each in parameters)
    numbers["size"] = team.size
    team.close()
    save_file(tensors, folder / "told.safetensors")
    (folder / "told.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
